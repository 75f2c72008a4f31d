"""The baselines against the formulas of their papers, written out here in fp64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from slayformer.presets import load_preset
from slayformer.registry import build_attention

LENGTH, HEADS, WIDTH, MAXIMUM = 65, 2, 16, 200


def build(name: str, **changes):
    config = load_preset(name, **changes)
    return build_attention(
        config, num_heads=HEADS, head_dim=WIDTH, max_sequence_length=MAXIMUM, seed=3
    )


@pytest.fixture
def qkv() -> tuple[Tensor, ...]:
    draws = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn(2, HEADS, LENGTH, WIDTH, generator=draws, dtype=torch.float64) for _ in range(3)
    )


def normalised(kernel: Tensor, v: Tensor) -> Tensor:
    kernel = kernel.tril()
    return kernel @ v / kernel.sum(-1, keepdim=True)


def assert_same(name: str, expected: Tensor, qkv: tuple[Tensor, ...], **changes) -> None:
    y, _ = build(name, delta=1e-30, **changes).double()(*qkv)
    torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-9)


def test_linear_elu(qkv):
    # Katharopoulos et al., 2020, eq. 7
    q, k, v = qkv
    phi = [torch.where(x > 0, x + 1, x.exp()) for x in (q, k)]
    assert_same("linear_elu", normalised(phi[0] @ phi[1].mT, v), qkv)


def test_performer_relu(qkv):
    # Choromanski et al., 2021: generalised attention, f = ReLU, with its 1e-3 floor
    q, k, v = qkv
    omega = build("performer").state_dict()["omega_HMD"].double()
    phi = [((x / WIDTH**0.25) @ omega.mT).clamp_min(0) + 1e-3 for x in (q, k)]
    assert_same("performer", normalised(phi[0] @ phi[1].mT, v), qkv)


def test_performer_favor(qkv):
    # Choromanski et al., 2021, lemma 1: exp(ωx − ‖x‖²/2)
    q, k, v = qkv
    omega = build("performer_favor").state_dict()["omega_HMD"].double()
    phi = []
    for x in (q, k):
        x = x / WIDTH**0.25
        phi.append(torch.exp(x @ omega.mT - x.square().sum(-1, keepdim=True) / 2))
    assert_same("performer_favor", normalised(phi[0] @ phi[1].mT, v), qkv)


def test_performer_favor_estimates_softmax(qkv):
    q, k, v = (x / 4 for x in qkv)
    exact = normalised(torch.exp(q @ k.mT / math.sqrt(WIDTH)), v)
    errors = []
    for count in (16, 4096):
        y, _ = build("performer_favor", feature_count=count).double()(q, k, v)
        errors.append(float((y - exact).norm() / exact.norm()))
    # Monte Carlo: 256 times the features, a sixteenth of the error
    assert errors[1] < errors[0] / 8
    assert errors[1] < 0.02


def test_performer_directions_are_orthogonal_with_gaussian_lengths():
    omega = build("performer", feature_count=2 * WIDTH).state_dict()["omega_HMD"].double()
    for head in omega:
        for block in head.split(WIDTH):
            gram = block @ block.T
            torch.testing.assert_close(gram, gram.diagonal().diag(), rtol=0, atol=1e-4)
    # E‖ω‖² = D with variance 2D
    mean = omega.square().sum(-1).mean()
    assert abs(float(mean) - WIDTH) < 4 * math.sqrt(2 * WIDTH / (HEADS * 2 * WIDTH))


def test_performer_redraws_on_schedule_and_only_in_training(qkv):
    attention = build("performer", redraw_every=2).double()
    first = attention.omega_HMD.clone()
    drawn = []
    for _ in range(5):
        attention(*qkv)
        drawn.append(attention.omega_HMD.clone())
    assert torch.equal(drawn[1], first)
    assert not torch.equal(drawn[2], first)
    assert torch.equal(drawn[3], drawn[2])
    assert not torch.equal(drawn[4], drawn[2])
    # the same passes lead to the same directions, whatever else was drawn
    other = build("performer", redraw_every=2).double()
    torch.manual_seed(123)
    for _ in range(5):
        other(*qkv)
    assert torch.equal(other.omega_HMD, drawn[4])
    attention.eval()
    for _ in range(5):
        attention(*qkv)
    assert torch.equal(attention.omega_HMD, drawn[4])


def test_cosformer(qkv):
    # Qin et al., 2022, eq. 10
    q, k, v = qkv
    i = torch.arange(LENGTH, dtype=torch.float64)
    weight = torch.cos(math.pi / 2 * (i[:, None] - i[None]) / MAXIMUM)
    kernel = (q.clamp_min(0) @ k.clamp_min(0).mT) * weight
    assert_same("cosformer", normalised(kernel, v), qkv)


def test_cosformer_period_is_the_maximum_not_the_length(qkv):
    attention = build("cosformer").double()
    short, _ = attention(*(x[:, :, :32] for x in qkv))
    longer, _ = attention(*(x[:, :, :64] for x in qkv))
    torch.testing.assert_close(longer[:, :, :32], short, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="maximum length of 200"):
        attention(*(torch.zeros(1, HEADS, MAXIMUM + 1, WIDTH) for _ in range(3)))


def test_hedgehog_starts_as_the_softmax_of_both_signs(qkv):
    # Zhang et al., 2024, section 4.2, with W = I
    q, k, v = qkv
    phi = [torch.cat([x.softmax(-1), (-x).softmax(-1)], -1) for x in (q, k)]
    assert_same("hedgehog", normalised(phi[0] @ phi[1].mT, v), qkv)


def test_based(qkv):
    # Arora et al., 2024, eq. 4: 1 + s + s²/2 far, e^s near
    q, k, v = qkv
    attention = build("based", window=7)
    weights = {name: x.double() for name, x in attention.state_dict().items()}
    scores = (q @ weights["query_map_HDF"]) @ (k @ weights["key_map_HDF"]).mT / math.sqrt(16)
    i = torch.arange(LENGTH)
    near = i[:, None] - i[None] < 7
    kernel = torch.where(near, scores.exp(), 1 + scores + scores**2 / 2)
    assert_same("based", normalised(kernel, v), qkv, window=7)


def test_uniform_is_the_running_mean(qkv):
    y, _ = build("uniform").double()(*qkv)
    steps = torch.arange(1, LENGTH + 1, dtype=torch.float64)
    torch.testing.assert_close(y, qkv[2].cumsum(2) / steps[:, None])


def test_yat_under_both_normalisations(qkv):
    # paper, eq. 1
    q, k, v = qkv
    difference = q[..., :, None, :] - k[..., None, :, :]
    kernel = (q @ k.mT).square() / (difference.square().sum(-1) + 1e-3)
    hidden = torch.ones(LENGTH, LENGTH).triu(1).bool()
    softmax = kernel.masked_fill(hidden, -torch.inf).softmax(-1) @ v
    for normalization, expected in (("softmax", softmax), ("kernel", normalised(kernel, v))):
        y, _ = build("yat", normalization=normalization).double()(*qkv)
        torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-9)


def test_yat_spherical(qkv):
    # paper, eq. 5
    q, k, v = qkv
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-4).sqrt() for x in (q, k))
    x = q @ k.mT
    kernel = x**2 / (2.001 - 2 * x)
    y, _ = build("yat_spherical").double()(*qkv)
    torch.testing.assert_close(y, normalised(kernel, v), rtol=1e-9, atol=1e-9)
    learned = build("yat_spherical", learnable_epsilon=True).double()
    y, _ = learned(*qkv)
    torch.testing.assert_close(y, normalised(kernel, v), rtol=1e-6, atol=1e-6)
    y.sum().backward()
    assert learned.log_epsilon.grad.abs().min() > 0


@pytest.mark.parametrize("local", ["chunk", "window"])
@pytest.mark.parametrize("last", [None, 0.7])
def test_softmax_chunk_factor(qkv, local, last):
    q, k, v = qkv
    options = {"chunk_size": 16, "local": local, "far_factor": 0.3, "last_far_factor": last}
    attention = build("softmax_chunk_factor", **options).double()
    place = torch.arange(LENGTH)
    near = place[:, None] // 16 == place // 16
    if local == "window":
        near = place[:, None] - place < 16
    far = torch.tensor([0.3, last or 0.3], dtype=torch.float64)[:, None, None]
    factor = torch.where(near, 1.0, far)
    kernel = torch.exp(q @ k.mT / math.sqrt(WIDTH)) * factor
    y, _ = attention(*qkv)
    torch.testing.assert_close(y, normalised(kernel, v), rtol=1e-6, atol=1e-6)
