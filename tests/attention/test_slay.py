"""SLAY against the paper's formulas, written out naively in fp64 and independent of the code."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from slayformer.attention.slay import SlayAttention, SlayConfig
from slayformer.presets import load_preset

PAPER: Any = load_preset("slay")


def build(config: SlayConfig = PAPER, *, heads: int = 2, width: int = 32, seed: int = 5):
    return SlayAttention(
        config, num_heads=heads, head_dim=width, max_sequence_length=4096, seed=seed
    )


def naive_features(attention: SlayAttention, x: Tensor) -> Tensor:
    """Return √w_r φ_anc(x̂) ⊗ φ_PRF(x̂; s_r), concatenated over r (paper, sections 2.4.2–2.4.3)."""
    config, draws = attention.config, attention.state_dict()
    t, alpha = np.polynomial.laguerre.laggauss(config.nodes)
    c = 2 + config.epsilon
    u = x / (x.square().sum(-1, keepdim=True) + 1e-4).sqrt()
    anchor = (u @ draws["polynomial.anchors_PD"].double().T) ** 2
    anchor = anchor / math.sqrt(config.polynomial_features)
    parts = []
    for r in range(config.nodes):
        s, w = t[r] / c, alpha[r] / c
        omega = draws["exponential.omega_RHND"][r].double()
        projected = torch.einsum("bhtd,hnd->bhtn", u, omega)
        prf = torch.exp(math.sqrt(2 * s) * projected - s) / math.sqrt(config.exponential_features)
        parts.append(math.sqrt(w) * torch.einsum("bhtp,bhtn->bhtpn", anchor, prf).flatten(-2))
    return torch.cat(parts, dim=-1)


def naive_attention(attention: SlayAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return N/(z + δ) from running sums over every key (paper, section 2.5)."""
    phi_q, phi_k = naive_features(attention, q), naive_features(attention, k)
    kernel = (phi_q @ phi_k.mT).tril()
    return kernel @ v / (kernel.sum(-1, keepdim=True) + attention.config.delta)


SMALL: Any = load_preset(
    "slay", nodes=1, polynomial_features=3, exponential_features=5, epsilon=0.1, delta=1e-4
)


@pytest.mark.parametrize("length", [1, 63, 65, 1000])
@pytest.mark.parametrize(
    "config",
    [PAPER, SMALL],
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
    draws = attention.state_dict()
    omega, anchors = draws["exponential.omega_RHND"], draws["polynomial.anchors_PD"]
    assert omega.shape == (3, 2, 16, 32)
    assert anchors.shape == (8, 32)
    torch.testing.assert_close(anchors.norm(dim=-1), torch.ones(8))
    # nodes and heads draw their own projections
    assert len({float(x) for x in omega[:, :, 0, 0].flatten()}) == 6
    assert not torch.equal(omega, build(seed=6).state_dict()["exponential.omega_RHND"])


MEMORY_PROBE = """
import json, sys, torch
from slayformer.config_loading import load_attention_config
from slayformer.registry import build_attention
torch.set_num_threads(1)
length, backward = int(sys.argv[1]), sys.argv[2] == "backward"
config = load_attention_config(json.loads(sys.argv[3]))
attention = build_attention(config, num_heads=8, head_dim=32, max_sequence_length=length, seed=0)
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
        plain = json.dumps(dataclasses.asdict(PAPER))
        command = [sys.executable, "-c", MEMORY_PROBE, str(length), mode, plain]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        extra = float(done.stdout) / output_kib
        print(f"{mode}: {extra:.2f} times the output")
        assert 0.9 < extra < limit, mode
