"""The maps of x² and of e^{2sx} against closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from slayformer.attention.kernels import fitted_quadrature, gauss_laguerre
from slayformer.attention.polynomial import (
    POLYNOMIALS,
    Anchor,
    BlockQuadratic,
    LearnedQuadratic,
    Nystrom,
)
from slayformer.attention.positive_features import ExponentialFeatures, gaussian_rows
from slayformer.errors import ConfigError

OPTIONS: dict[str, dict] = {
    "anchor": {"anchor_scale": "paper"},
    "learned_quadratic": {"block_width": 4, "center": 0.7},
}


def unit_vectors(count: int, width: int, seed: int = 0) -> Tensor:
    """Return [1, 1, count, width] unit vectors, fp64."""
    draws = torch.Generator().manual_seed(seed)
    u = torch.randn(1, 1, count, width, generator=draws, dtype=torch.float64)
    return u / u.norm(dim=-1, keepdim=True)


def polynomial(name: str, *, budget: int, width: int, heads: int = 1, seed: int = 0):
    options = OPTIONS.get(name, {})
    return POLYNOMIALS[name](
        trainable=False, budget=budget, heads=heads, width=width, seed=seed, **options
    )


def features(module, u: Tensor):
    return module.features(u, *module.tensors(torch.float64))


@pytest.mark.parametrize("name", POLYNOMIALS)
def test_scores_are_the_products_of_the_features(name):
    module = polynomial(name, budget=40, width=9, heads=2)
    query = features(module, unit_vectors(5, 9, seed=1).expand(1, 2, -1, -1))
    key = features(module, unit_vectors(7, 9, seed=2).expand(1, 2, -1, -1))
    expanded = query.expand() @ key.expand().mT
    torch.testing.assert_close(query.scores(key), expanded, rtol=1e-12, atol=1e-12)
    assert query.expand().shape[-1] == module.feature_count
    torch.testing.assert_close(query.first(3).expand(), query.expand()[:, :, :3], rtol=0, atol=0)
    tripled = query.scaled(torch.tensor(3.0, dtype=torch.float64))
    torch.testing.assert_close(tripled.scores(key), 3 * expanded)
    torch.testing.assert_close(tripled.expand() @ key.expand().mT, 3 * expanded)


@pytest.mark.parametrize("width", [1, 2, 16, 33])
def test_exact_map_is_the_square(width):
    u, w = unit_vectors(20, width, seed=3), unit_vectors(20, width, seed=4)
    module = polynomial("exact", budget=1, width=width)
    assert module.feature_count == width * (width + 1) // 2
    expanded = features(module, u).expand() @ features(module, w).expand().mT
    torch.testing.assert_close(expanded, (u @ w.mT).square(), rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("width", "budget", "blocks", "singles"),
    [
        (64, 384, [11, 11, 11, 11, 10, 10], 0),
        (32, 384, [27], 5),
        (16, 384, [16], 0),
        (8, 20, [5], 3),
    ],
)
def test_block_quadratic_by_hand(width, budget, blocks, singles):
    module = polynomial("block_quadratic", budget=budget, width=width)
    assert isinstance(module, BlockQuadratic)
    assert (module.block_widths, module.singles) == (blocks, singles)
    assert module.feature_count <= budget
    assert module.feature_count == sum(n * (n + 1) // 2 for n in blocks) + singles + 1
    u, w = unit_vectors(11, width, seed=5), unit_vectors(13, width, seed=6)
    rotation = module.state_dict()["rotation_HDD"][0].double()
    torch.testing.assert_close(
        rotation @ rotation.T, torch.eye(width, dtype=torch.float64), rtol=0, atol=1e-6
    )
    y, z = u @ rotation, w @ rotation
    expected, start = torch.full((1, 1, 11, 13), 1e-4, dtype=torch.float64), 0
    for n in [*blocks, *([1] * singles)]:
        span = slice(start, start + n)
        expected += (y[..., span] @ z[..., span].mT).square()
        start += n
    assert start == width
    for scores in (
        features(module, u).scores(features(module, w)),
        features(module, u).expand() @ features(module, w).expand().mT,
    ):
        torch.testing.assert_close(scores, expected, rtol=0, atol=1e-12)
    assert expected.min() > 0


def test_block_quadratic_needs_room():
    with pytest.raises(ConfigError, match="at least 17"):
        polynomial("block_quadratic", budget=16, width=16)


def test_learned_quadratic_by_hand():
    module = polynomial("learned_quadratic", budget=35, width=9, heads=2)
    assert isinstance(module, LearnedQuadratic)
    assert (module.blocks, module.feature_count) == (3, 30)
    draws = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=draws)
    weights = {name: x.detach().double() for name, x in module.named_parameters()}
    u, w = (unit_vectors(6, 9, seed=s).expand(1, 2, -1, -1) for s in (1, 2))
    expected = torch.zeros(1, 2, 6, 6, dtype=torch.float64)
    for head in range(2):
        for g in range(3):
            rows = weights["projection_HGND"][head, 4 * g : 4 * g + 4]
            c = weights["center_HGN"][head, 0, 4 * g : 4 * g + 4]
            y, z = (x[0, head] @ rows.T + c for x in (u, w))
            gates = [
                torch.exp(
                    x[0, head] @ weights["weight_HGD"][head, g] + weights["bias_HG"][head, 0, g]
                )
                for x in (u, w)
            ]
            root = (gates[0][:, None] * gates[1][None]).sqrt()
            # e^{½(a(q)+a(k))·2} of the squared product
            expected[0, head] += root**2 * (y @ z.T).square()
    # E (y·z)² at the start for c = .02 and c = .7: n c² ± √(2 n c²/d) ± √n/d with n = 4, d = 9
    means = [(4 * c * c) ** 2 + 2 * 4 * c * c / 9 + 4 / 81 for c in (0.02, 0.7)]
    expected *= means[0] / means[1]
    ours = features(module, u).scores(features(module, w))
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-9)


def test_centres_far_off_start_flat_and_leave_the_mean():
    """Scores of random directions: their mean is that of x² in blocks, their spread falls."""
    u, w = unit_vectors(400, 32, seed=1), unit_vectors(400, 32, seed=2)
    spreads = []
    for center in (0.02, 0.2, 1.0, 5.0):
        sizes = {"budget": 330, "block_width": 11, "heads": 1, "width": 32, "seed": 0}
        module = LearnedQuadratic(trainable=False, center=center, **sizes)
        scores = features(module, u).scores(features(module, w))
        # 5 blocks of 11 orthonormal rows
        assert float(scores.mean()) == pytest.approx(5 * 11 / 32**2, rel=0.1)
        spreads.append(float(scores.std() / scores.mean()))
    # 5 blocks, each a squared normal variable; at 5 what is left is 2/(n c²) √(2 n c²/d / 5) or so
    assert spreads[0] == pytest.approx((2 / 5) ** 0.5, rel=0.2)
    assert spreads == sorted(spreads, reverse=True)
    assert spreads[-1] == pytest.approx(2 * (2 / (11 * 25 * 32)) ** 0.5, rel=0.8)


def mean_within_four_errors(samples: Tensor, expected: float) -> bool:
    error = samples.std() / math.sqrt(len(samples))
    return bool(abs(samples.mean() - expected) < 4 * error)


def test_anchors_average_to_a_constant_and_twice_the_square():
    """E[(a·q̂)²(a·k̂)²] = (1 + 2x²)/(d(d+2)) for anchors uniform on the sphere."""
    width, count = 6, 200_000
    module = polynomial("anchor", budget=count, width=width)
    assert isinstance(module, Anchor)
    u = unit_vectors(2, width, seed=7)
    phi = features(module, u).expand()[0, 0]
    x = float(u[0, 0, 0] @ u[0, 0, 1])
    expected = (1 + 2 * x**2) / (width * (width + 2))
    assert mean_within_four_errors(phi.prod(0) * count, expected)
    unbiased = POLYNOMIALS["anchor"](
        trainable=False, budget=8, heads=1, width=width, seed=0, anchor_scale="unbiased"
    )
    assert unbiased.scale**2 / Anchor(
        trainable=False, anchor_scale="paper", budget=8, heads=1, width=width, seed=0
    ).scale ** 2 == pytest.approx(width * (width + 2) / 2)


@pytest.mark.parametrize("name", ["random_maclaurin", "tensor_sketch"])
def test_signed_maps_are_unbiased(name):
    u = unit_vectors(2, 6, seed=8)
    x = float(u[0, 0, 0] @ u[0, 0, 1])
    samples = []
    for seed in range(3000):
        phi = features(polynomial(name, budget=4, width=6, seed=seed), u).expand()[0, 0]
        samples.append(phi[0] @ phi[1])
    assert mean_within_four_errors(torch.stack(samples), x**2)


def test_nystrom_is_exact_where_anchors_span_everything():
    """With P ≥ d(d+1)/2 anchors the Nyström kernel is the kernel."""
    module = polynomial("nystrom", budget=30, width=4)
    assert isinstance(module, Nystrom)
    u, w = unit_vectors(9, 4, seed=1), unit_vectors(9, 4, seed=2)
    ours = features(module, u).scores(features(module, w))
    torch.testing.assert_close(ours, (u @ w.mT).square(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["iid", "orthogonal"])
def test_positive_random_features_average_to_the_exponential(kind):
    """E⟨φ(q̂), φ(k̂)⟩ = e^{2sx} at every node (paper, proposition 2)."""
    width, count = 8, 100_000
    nodes, weights = gauss_laguerre(3, 1e-3)
    module = ExponentialFeatures(
        torch.tensor(nodes),
        torch.tensor(weights),
        heads=1,
        features=count,
        width=width,
        kind=kind,
        trainable=False,
        seed=1,
    )
    u = unit_vectors(2, width, seed=9)
    x = float(u[0, 0, 0] @ u[0, 0, 1])
    phi = module.features(u, *module.tensors(torch.float64)).expand()[0, 0]
    for products, s, w in zip((phi.prod(0) * count).chunk(3), nodes, weights, strict=True):
        # orthogonal features depend on each other within a block of `width`: average those first
        samples = (products / w).unflatten(0, (-1, width)).mean(1)
        assert mean_within_four_errors(samples, math.exp(2 * s * x))


def test_orthogonal_directions():
    rows = gaussian_rows("orthogonal", 20, 8, torch.Generator().manual_seed(0)).double()
    for block in (rows[:8], rows[8:16], rows[16:]):
        gram = block @ block.T
        torch.testing.assert_close(gram, gram.diagonal().diag(), rtol=0, atol=1e-5)


def test_exponents_are_held_where_fp32_can_hold_them():
    """A unit vector along the longest ω of a large map overflows without the shift."""
    nodes, weights = gauss_laguerre(12, 1e-3)
    module = ExponentialFeatures(
        torch.tensor(nodes),
        torch.tensor(weights),
        heads=2,
        features=32,
        width=256,
        kind="iid",
        trainable=False,
        seed=0,
    )
    assert module.shift(torch.float32).min() > 0
    omega = module.omega_RHND[-1, 0]
    u = (omega[omega.norm(dim=-1).argmax()] / omega.norm(dim=-1).max()).expand(1, 2, 1, -1)
    phi = module.features(u, *module.tensors(torch.float32))
    assert bool(phi.scores(phi).isfinite().all())
    small = ExponentialFeatures(
        torch.tensor(nodes[:3]),
        torch.tensor(weights[:3]),
        heads=2,
        features=16,
        width=64,
        kind="iid",
        trainable=False,
        seed=0,
    )
    assert not small.shift(torch.float32).any()


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 6])
def test_fitted_quadrature_beats_gauss_laguerre(nodes):
    x = np.linspace(-0.95, 0.9, 300)
    exact = 1 / (2.001 - 2 * x)
    errors = []
    for rule in (gauss_laguerre, fitted_quadrature):
        s, w = rule(nodes, 1e-3)
        assert s.min() > 0
        assert w.min() > 0
        approximate = (w[:, None] * np.exp(2 * s[:, None] * x)).sum(0)
        errors.append(np.sqrt(np.mean((approximate / exact - 1) ** 2)))
    assert errors[1] < (0.9 if nodes == 1 else 0.7) * errors[0]


def test_laplace_identity():
    """x²/(C − 2x) = (C²/4) ∫ e^{−Cs} e^{2sx} ds − C/4 − x/2, the integral by many nodes."""
    x, c = np.linspace(-0.9, 0.7, 50), 2.001
    s, w = gauss_laguerre(60, 1e-3)
    integral = (w[:, None] * np.exp(2 * s[:, None] * x)).sum(0)
    np.testing.assert_allclose(
        x**2 / (c - 2 * x), c**2 / 4 * integral - c / 4 - x / 2, rtol=0, atol=1e-6
    )
