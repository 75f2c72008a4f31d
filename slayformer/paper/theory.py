"""The theorems as numbers: what each says, what was measured, with its standard error.

Everything is fp64 and comes from the functions that the mechanisms use.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from slayformer.attention.base import generator
from slayformer.attention.kernels import (
    gauss_laguerre,
    spherical_yat,
    spherical_yat_derivative,
)
from slayformer.attention.polynomial import POLYNOMIALS
from slayformer.attention.positive_features import ExponentialFeatures
from slayformer.paper.item import FAILS, HOLDS, HOLDS_AT, Claim, Data, Item, Request, Table
from slayformer.paper.mechanisms import direction_scores, one_head
from slayformer.paper.quadrature import relative_error

EPSILON, NODES, WIDTH = 1e-3, 3, 64
EPSILONS = (1e-1, 1e-2, 1e-3, 1e-6)
# draws of random features at a time
FEATURES = 20_000
# standard errors within which a mean counts as the value it should have
MOST_ERRORS = 4.0


def unit_pairs(cosines: Tensor, width: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return unit vectors q and k [N, width] in random planes, one pair for each cosine."""
    shape = (2, len(cosines), width)
    first, other = torch.randn(shape, generator=generator(seed), dtype=torch.float64)
    first = first / first.norm(dim=-1, keepdim=True)
    other = other - (other * first).sum(-1, keepdim=True) * first
    other = other / other.norm(dim=-1, keepdim=True)
    x = cosines[:, None]
    return first, x * first + (1 - x.square()).clamp_min(0).sqrt() * other


def exponential_means(features: int, blocks: int) -> list[dict[str, float]]:
    """Return mean and standard error of ⟨φ(q), φ(k)⟩ of the positive random features.

    One row a node of R = 3 and cosine; the statistics are over `features` × `blocks` draws.
    """
    cosines = torch.tensor([-0.8, -0.4, 0.0, 0.4], dtype=torch.float64)
    q, k = unit_pairs(cosines, WIDTH, 0)
    nodes, _ = gauss_laguerre(NODES, EPSILON)
    rows = []
    for node in nodes:
        products = []
        for block in range(blocks):
            # √w is 1: the features of e^{2sx} alone
            feature_map = ExponentialFeatures(
                torch.tensor([node]),
                torch.ones(1, dtype=torch.float64),
                heads=1,
                features=features,
                width=WIDTH,
                kind="iid",
                trainable=False,
                seed=block,
            )
            tensors = feature_map.tensors(torch.float64)
            phi_q, phi_k = (feature_map.features(u[None, None], *tensors).phi_BHTM for u in (q, k))
            # each feature is √(1/N): times N a product is one draw of the estimator
            products.append((phi_q * phi_k)[0, 0] * features)
        draws = torch.cat(products, dim=-1)
        for cosine, values in zip(cosines.tolist(), draws, strict=True):
            # E of the square: the variance is known, and a sample's own misses its heavy tail
            target = math.exp(2 * node * cosine)
            variance = math.exp(4 * node * (1 + 2 * cosine)) - target**2
            rows.append(
                {
                    "node": float(node),
                    "cosine": cosine,
                    "target": target,
                    "mean": float(values.mean()),
                    "error": math.sqrt(variance / draws.shape[-1]),
                }
            )
    return rows


def anchor_means(draws: int) -> list[dict[str, float]]:
    """Return mean and standard error of the anchors' ⟨φ(q), φ(k)⟩, one row a cosine."""
    cosines = torch.linspace(-1, 1, 5, dtype=torch.float64)
    q, k = unit_pairs(cosines, WIDTH, 1)
    feature_map = POLYNOMIALS["anchor"](
        budget=draws, heads=1, width=WIDTH, seed=0, trainable=False, anchor_scale="paper"
    )
    tensors = feature_map.tensors(torch.float64)
    phi_q, phi_k = (feature_map.features(u, *tensors).phi_BHTM for u in (q, k))
    products = phi_q * phi_k * draws
    return [
        {
            "cosine": cosine,
            "target": (1 + 2 * cosine**2) / (WIDTH * (WIDTH + 2)),
            "mean": float(values.mean()),
            "error": float(values.std() / math.sqrt(draws)),
        }
        for cosine, values in zip(cosines.tolist(), products, strict=True)
    ]


def bounds() -> list[dict[str, float]]:
    """Return for several ε the largest kernel value, slope and gradient over [−1, 1]."""
    rows = []
    for epsilon in EPSILONS:
        near = 1 - torch.logspace(-12, 0, 4001, dtype=torch.float64)
        x = torch.cat([torch.linspace(-1, 1, 20001, dtype=torch.float64), near])
        slope = spherical_yat_derivative(x, epsilon).abs()
        # the Jacobian of q/‖q‖ takes the part along q away and leaves the sine
        gradient = slope * (1 - x.square()).clamp_min(0).sqrt()
        rows.append(
            {
                "epsilon": epsilon,
                "largest": float(spherical_yat(x, epsilon).max()),
                "bound": 1 / epsilon,
                "slope": float(slope.max()),
                "slope_bound": 2 * (1 + epsilon) / epsilon**2,
                "gradient": float(gradient.max()),
            }
        )
    return rows


def autograd_gradient(count: int) -> float:
    """Return the largest ‖∇_q k‖ ‖q‖ by automatic differentiation over random near pairs."""
    cosines = 1 - torch.logspace(-8, 0, count, dtype=torch.float64)
    q, k = unit_pairs(cosines, WIDTH, 2)
    length = 3.0
    q = (length * q).requires_grad_()
    x = (q / q.norm(dim=-1, keepdim=True) * k).sum(-1)
    (gradient,) = torch.autograd.grad(spherical_yat(x, EPSILON).sum(), q)
    return float(gradient.norm(dim=-1).max()) * length


def smallest_eigenvalues(points: int) -> list[dict[str, float]]:
    """Return smallest and largest eigenvalue of the kernel's Gram matrix of random directions."""
    rows = []
    for width in (2, 3, 16, 64):
        vectors = torch.randn(points, width, generator=generator(width), dtype=torch.float64)
        vectors = vectors / vectors.norm(dim=-1, keepdim=True)
        gram = spherical_yat(vectors @ vectors.mT, EPSILON)
        values = torch.linalg.eigvalsh(gram)
        rows.append({"width": width, "smallest": float(values[0]), "largest": float(values[-1])})
    return rows


@torch.no_grad()
def smallest_scores(pairs: int, seeds: int) -> dict[str, float]:
    """Return the smallest score of SLAY's features over random, opposite and orthogonal pairs."""
    found = {}
    for name in ("slay", "slay_exact_poly", "slay_block_quadratic"):
        lowest = math.inf
        for seed in range(seeds):
            keys = torch.randn(pairs, WIDTH, generator=generator(seed), dtype=torch.float64)
            keys = keys / keys.norm(dim=-1, keepdim=True)
            queries = torch.cat([keys[:50], -keys[:50], torch.eye(WIDTH, dtype=torch.float64)])
            scores = direction_scores(one_head(name, WIDTH, seed), queries, keys)
            lowest = min(lowest, float(scores.min()))
        found[name] = lowest
    return found


def compute(request: Request) -> Data:
    """Return every measurement."""
    blocks = request.choose(quick=20, full=200)
    data: Data = {"draws": FEATURES * blocks}
    parts = {
        "exponentials": lambda: exponential_means(FEATURES, blocks),
        "anchors": lambda: anchor_means(request.choose(quick=200_000, full=2_000_000)),
        "bounds": bounds,
        "gradient": lambda: autograd_gradient(2000),
        "eigenvalues": lambda: smallest_eigenvalues(400),
        "scores": lambda: smallest_scores(1000, request.seed_count(quick=10, full=50)),
        "quadrature": lambda: [
            {"cosine": x, "nodes": count, "error": relative_error(x, count, "gauss_laguerre")}
            for x in (0.5, 0.8, 0.9, 0.99, 1.0)
            for count in (3, 8, 16, 32)
        ],
    }
    for number, (name, measure) in enumerate(parts.items()):
        data[name] = measure()
        request.progress((number + 1) / len(parts))
    return data


def _within(row: dict[str, float]) -> bool:
    return abs(row["mean"] - row["target"]) <= MOST_ERRORS * row["error"]


def _verdicts(data: Data) -> Iterator[tuple[str, str, str, str]]:
    """Yield what is said, where, what was measured, and the verdict."""
    informative = [row for row in data["exponentials"] if row["error"] < 0.2 * row["target"]]
    blind = len(data["exponentials"]) - len(informative)
    z = max(abs(row["mean"] - row["target"]) / row["error"] for row in informative)
    yield (
        "Positive random features are unbiased: E⟨φ(q), φ(k)⟩ = e^{2sx}",
        "Proposition 2",
        f"largest deviation {z:.1f} standard errors over {len(informative)} pairs of node and "
        f"cosine, {data['draws']:,} draws each; for {blind} more the standard error is above "
        "20 % even so",
        HOLDS if all(map(_within, informative)) else FAILS,
    )
    spread = {
        row["node"]: row["error"] / row["target"] * math.sqrt(data["draws"] / 16)
        for row in data["exponentials"]
        if row["cosine"] == 0
    }
    yield (
        "16 positive random features of a node are a usable estimate",
        "Table 9 (implied)",
        "standard deviation ÷ mean at x = 0: "
        + ", ".join(f"{value:.2g} at s = {node:.2f}" for node, value in spread.items()),
        f"{HOLDS_AT} the first node" if min(spread.values()) < 1 < max(spread.values()) else HOLDS,
    )
    z = max(abs(row["mean"] - row["target"]) / row["error"] for row in data["anchors"])
    yield (
        "Anchor features are biased for x²",
        "Table 1",
        f"their mean is (1 + 2x²)/(d(d + 2)), within {z:.1f} standard errors: a constant that does "
        "not fall with more anchors, and 2x²",
        HOLDS if all(map(_within, data["anchors"])) else FAILS,
    )
    lowest = ", ".join(f"{name} {value:.1e}" for name, value in data["scores"].items())
    yield (
        "Scores of SLAY's features are never negative",
        "Section 2.4, Appendix",
        f"smallest score: {lowest}; 0 is reached where x² is exact",
        HOLDS if min(data["scores"].values()) >= 0 else FAILS,
    )
    bounded = all(row["largest"] <= row["bound"] * (1 + 1e-9) for row in data["bounds"])
    yield (
        "0 ≤ kernel ≤ 1/ε",
        "Proposition 3",
        ", ".join(f"{row['largest']:.4g} at ε = {row['epsilon']:g}" for row in data["bounds"]),
        HOLDS if bounded else FAILS,
    )
    slopes = all(row["slope"] <= row["slope_bound"] * (1 + 1e-9) for row in data["bounds"])
    third = next(row for row in data["bounds"] if row["epsilon"] == EPSILON)
    yield (
        "The gradient is bounded: |k'| ≤ k'(1) = 2(1 + ε)/ε²",
        "Proposition 4",
        f"slope {third['slope']:.3g} of {third['slope_bound']:.3g} at ε = 0.001; in q itself, "
        f"‖∇k‖‖q‖ is at most {data['gradient']:.3g} (autograd), "
        f"{third['slope_bound'] / data['gradient']:.0f} times less, as the slope is largest where "
        "the direction cannot change it",
        HOLDS if slopes and data["gradient"] <= third["gradient"] * 1.01 else FAILS,
    )
    smallest = min(row["smallest"] / row["largest"] for row in data["eigenvalues"])
    yield (
        "The kernel is positive definite on the sphere",
        "Theorem 2",
        "smallest ÷ largest eigenvalue of 400 random directions: "
        + ", ".join(
            f"{row['smallest'] / row['largest']:.1e} (d = {row['width']:.0f})"
            for row in data["eigenvalues"]
        ),
        HOLDS if smallest > -1e-12 else FAILS,
    )
    errors = {(row["cosine"], row["nodes"]): row["error"] for row in data["quadrature"]}
    converges = all(abs(errors[x, 32]) < 0.01 for x in (0.5, 0.8, 0.9))
    near = abs(errors[1.0, 32]) > 0.5
    yield (
        "Gauss–Laguerre quadrature converges",
        "Section L.3",
        "; ".join(
            f"x = {x:g}: "
            + ", ".join(f"{100 * errors[x, count]:+.3g} % (R = {count})" for count in (3, 8, 32))
            for x in (0.5, 0.9, 0.99, 1.0)
        ),
        f"{HOLDS_AT} x ≤ 0.9, not near 1" if converges and near else HOLDS if converges else FAILS,
    )


def tables(data: Data) -> list[Table]:
    """Return the statements with verdicts, and every mean with its standard error."""
    statements = Table(
        "theory",
        "Theorems, measured",
        ["statement", "source", "measured", "verdict"],
        [list(row) for row in _verdicts(data)],
        f"fp64, head width {WIDTH}, ε = 0.001 unless said.",
    )
    rows = []
    for row in data["exponentials"]:
        deviation = abs(row["mean"] - row["target"]) / row["error"]
        rows.append(
            [
                f"exponential, s = {row['node']:.3f}",
                f"{row['cosine']:+.1f}",
                f"{row['target']:.4g}",
                f"{row['mean']:.4g}",
                f"{row['error']:.1e}",
                f"{deviation:.1f}",
            ]
        )
    for row in data["anchors"]:
        deviation = abs(row["mean"] - row["target"]) / row["error"]
        rows.append(
            [
                "anchors, (1 + 2x²)/(d(d + 2))",
                f"{row['cosine']:+.1f}",
                f"{row['target']:.4g}",
                f"{row['mean']:.4g}",
                f"{row['error']:.1e}",
                f"{deviation:.1f}",
            ]
        )
    columns = ["features", "cosine x", "expected", "mean", "standard error", "deviation (errors)"]
    note = (
        f"Exponentials: {data['draws']:,} draws, standard error from the estimator's known "
        "variance, e^{4s(1 + 2x)} − e^{4sx}; means of heavy tails lie below it in most draws."
    )
    means = Table("unbiasedness", "Means of random features", columns, rows, note)
    return [statements, means]


def claims(data: Data) -> list[Claim]:
    """Return the statements as claims."""
    return [Claim(*row) for row in _verdicts(data)]


ITEM = Item(
    name="theory",
    title="the theorems as numbers",
    sources=("Proposition 2", "Proposition 3", "Proposition 4", "Theorem 2"),
    minutes=0.6,
    compute=compute,
    published="unbiased and positive features, a bounded kernel with a bounded gradient that is "
    "positive definite on the sphere, and a quadrature that converges",
    tables=tables,
    claims=claims,
)
