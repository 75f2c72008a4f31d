"""SLAY against the paper's formulas, written out naively in fp64 and independent of the code."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from slayformer.attention.slay import SlayAttention, SlayConfig

PAPER = SlayConfig(
    nodes=3, polynomial_features=8, exponential_features=16, epsilon=1e-3, delta=1e-6
)


def build(config: SlayConfig = PAPER, *, heads: int = 2, width: int = 32, seed: int = 5):
    return SlayAttention(
        config, num_heads=heads, head_dim=width, max_sequence_length=4096, seed=seed
    )


def naive_features(attention: SlayAttention, x: Tensor) -> Tensor:
    """Return √w_r φ_anc(x̂) ⊗ φ_PRF(x̂; s_r), concatenated over r (paper, sections 2.4.2–2.4.3)."""
    config = attention.config
    t, alpha = np.polynomial.laguerre.laggauss(config.nodes)
    c = 2 + config.epsilon
    u = x / (x.square().sum(-1, keepdim=True) + 1e-4).sqrt()
    anchors = attention.anchors_PD.double()
    anchor = (u @ anchors.T) ** 2 / math.sqrt(config.polynomial_features)
    parts = []
    for r in range(config.nodes):
        s, w = t[r] / c, alpha[r] / c
        omega = attention.omega_RHND[r].double()
        projected = torch.einsum("bhtd,hnd->bhtn", u, omega)
        prf = torch.exp(math.sqrt(2 * s) * projected - s) / math.sqrt(config.exponential_features)
        parts.append(math.sqrt(w) * torch.einsum("bhtp,bhtn->bhtpn", anchor, prf).flatten(-2))
    return torch.cat(parts, dim=-1)


def naive_attention(attention: SlayAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return N/(z + δ) from running sums over every key (paper, section 2.5)."""
    phi_q, phi_k = naive_features(attention, q), naive_features(attention, k)
    kernel = (phi_q @ phi_k.mT).tril()
    return kernel @ v / (kernel.sum(-1, keepdim=True) + attention.config.delta)


@pytest.mark.parametrize("length", [1, 63, 65, 1000])
@pytest.mark.parametrize(
    "config",
    [
        PAPER,
        SlayConfig(nodes=1, polynomial_features=3, exponential_features=5, epsilon=0.1, delta=1e-4),
    ],
    ids=["paper", "small"],
)
def test_output_and_gradients_equal_the_naive_form(length, config):
    attention = build(config)
    draws = torch.Generator().manual_seed(length)
    *inputs, weight = torch.randn(4, 2, 2, length, 32, generator=draws, dtype=torch.float64)
    results = []
    for function, dtype in (
        (lambda q, k, v: naive_attention(attention, q, k, v), torch.float64),
        (lambda q, k, v: attention(q, k, v)[0], torch.float32),
    ):
        q, k, v = (x.to(dtype).requires_grad_() for x in inputs)
        y = function(q, k, v)
        gradients = torch.autograd.grad((y * weight.to(dtype)).sum(), (q, k, v))
        results.append([x.detach().double() for x in (y, *gradients)])
    for reference, ours in zip(*results, strict=True):
        # one key alone: dq and dk come from δ only, so they are compared on the scale of dv
        floor = results[0][3].norm() if length == 1 else reference.norm()
        assert (ours - reference).norm() <= 1e-5 * torch.maximum(floor, reference.norm())


def test_paper_sizes_and_draws():
    attention = build()
    assert attention.feature_count == 384
    assert attention.omega_RHND.shape == (3, 2, 16, 32)
    assert attention.anchors_PD.shape == (8, 32)
    torch.testing.assert_close(attention.anchors_PD.norm(dim=-1), torch.ones(8))
    # nodes and heads draw their own projections
    assert len({float(x) for x in attention.omega_RHND[:, :, 0, 0].flatten()}) == 6
    assert not torch.equal(attention.omega_RHND, build(seed=6).omega_RHND)


def test_denominators_are_strictly_positive():
    for seed in range(20):
        attention = build(seed=seed)
        x = torch.randn(2, 2, 100, 32, generator=torch.Generator().manual_seed(seed))
        phi = attention.feature_map(
            x, *attention.feature_tensors(torch.float32), is_query=True, positions=torch.empty(0)
        )
        assert bool((phi.expand() >= 0).all())
        assert bool((phi.scores(phi) > 0).all())


def test_positive_random_features_estimate_the_exponential():
    """E⟨φ(q̂), φ(k̂)⟩ = e^{2sx} (paper, proposition 2), within 4 standard errors."""
    config = SlayConfig(
        nodes=3, polynomial_features=1, exponential_features=200_000, epsilon=1e-3, delta=1e-6
    )
    attention = build(config, heads=1, width=8)
    projection, bias = (x[..., 1:] for x in attention.feature_tensors(torch.float64))
    bias = attention.feature_tensors(torch.float64)[1]
    points = torch.randn(2, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    points = points / points.norm(dim=-1, keepdim=True)
    x = float(points[0] @ points[1])
    products = torch.exp(points @ projection[0] + bias).prod(0) * config.exponential_features
    for products_r, s, w in zip(
        products.chunk(3), attention.nodes_R, attention.weights_R, strict=True
    ):
        samples = products_r / w
        error = samples.std() / math.sqrt(len(samples))
        assert abs(samples.mean() - math.exp(2 * s * x)) < 4 * error


def test_anchor_features_average_to_a_constant_and_twice_the_square():
    """E[(a·q̂)²(a·k̂)²] = (1 + 2x²)/(d(d+2)) for anchors uniform on the sphere."""
    config = SlayConfig(
        nodes=1, polynomial_features=200_000, exponential_features=1, epsilon=1e-3, delta=1e-6
    )
    anchors = build(config, heads=1, width=6).anchors_PD.double()
    q, k = torch.randn(2, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    q, k = q / q.norm(), k / k.norm()
    samples = (anchors @ q).square() * (anchors @ k).square()
    expected = (1 + 2 * float(q @ k) ** 2) / (6 * 8)
    error = samples.std() / math.sqrt(len(samples))
    assert abs(samples.mean() - expected) < 4 * error


MEMORY_PROBE = """
import sys, torch
from slayformer.attention.slay import SlayAttention, SlayConfig
torch.set_num_threads(1)
length, backward = int(sys.argv[1]), sys.argv[2] == "backward"
attention = SlayAttention(SlayConfig(nodes=3, polynomial_features=8, exponential_features=16, epsilon=1e-3,
    delta=1e-6), num_heads=8, head_dim=32, max_sequence_length=length, seed=0)
def peak_kib():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
def run(length):
    q, k, v = (torch.randn(1, 8, length, 32, requires_grad=backward) for _ in range(3))
    dy = torch.ones_like(v) if backward else None
    # the peak counts from here
    open("/proc/self/clear_refs", "w").write("5")
    before = peak_kib()
    y = attention(q, k, v)[0]
    if backward:
        y.backward(dy)
    return peak_kib() - before
run(1024)
print(run(length))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads Linux's peak memory")
def test_memory_grows_with_the_output_not_with_features():
    """The features of q or k alone would take 16,384 × 8 × 384 × 4 bytes, 12 times the output."""
    length = 16_384
    output_kib = length * 8 * 32 * 4 / 1024
    # what a backward pass returns, dq, dk and dv, comes on top
    for mode, limit in (("forward", 4), ("backward", 4 + 3)):
        command = [sys.executable, "-c", MEMORY_PROBE, str(length), mode]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        extra = float(done.stdout) / output_kib
        print(f"{mode}: {extra:.2f} times the output")
        assert 0.9 < extra < limit, mode
