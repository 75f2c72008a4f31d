"""What the tests of the contract share: every mechanism, inputs, and the form they are held to.

The reference is the dense fp64 form: kernel values for all pairs, masked, normalised. For linear
mechanisms the kernel comes from their own expanded features; tests/attention/test_slay.py and its
neighbours prove the features themselves against independent formulas.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from slayformer.attention.base import Attention
from slayformer.attention.linear import LinearAttention
from slayformer.attention.quadratic import QuadraticAttention
from slayformer.presets import load_preset, preset_names
from slayformer.registry import build_attention, load_mechanisms

LENGTHS: list[Any] = [1, 2, 7, 8, 15, 17, 63, 64, 65, 127, 129, 257]
LENGTHS += [pytest.param(1000, marks=pytest.mark.slow)]
HEADS, WIDTH = 2, 16
NAMES = preset_names()
OPTIONS: dict[str, Any] = {name: load_preset(name) for name in NAMES}
# where there is a compiler, `auto` takes its engine in half precision and fp32: then all of it on
# the walk of torch too
ON_TORCH = {
    f"{name} on torch": dataclasses.replace(config, backend="torch")
    for name, config in OPTIONS.items()
    if "cpu" in load_mechanisms()[config.mechanism or name].attention.backends
}
every_mechanism = pytest.mark.parametrize(
    "name", [*NAMES, *(pytest.param(name, marks=pytest.mark.slow) for name in ON_TORCH)]
)


def build(name: str, *, exact_normaliser: bool = False, width: int = WIDTH) -> Attention:
    """Build mechanism `name` from its YAML; `exact_normaliser` takes δ out of the normaliser."""
    config = (OPTIONS | ON_TORCH)[name]
    if exact_normaliser and hasattr(config, "delta"):
        config = dataclasses.replace(config, delta=1e-30)
    return build_attention(
        config, num_heads=HEADS, head_dim=width, max_sequence_length=8192, seed=11
    )


def heads(batch: int, length: int, *, seed: int = 0, dtype=torch.float64, scale: float = 1.0):
    """Return q, k, v of shape [batch, HEADS, length, WIDTH]."""
    draws = torch.Generator().manual_seed(seed)
    shape = (batch, HEADS, length, WIDTH)
    return tuple(
        (scale * torch.randn(shape, generator=draws, dtype=torch.float64)).to(dtype)
        for _ in range(3)
    )


def dense(attention: Attention, q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Return the dense fp64 form for a boolean [T, T] `visible`."""
    positions = torch.arange(q.shape[2]).expand(q.shape[0], -1)
    if isinstance(attention, QuadraticAttention):
        scores = attention.scores(q, k)
        added = attention.position_scores(positions[:, :, None], positions[:, None])
        scores = scores if added is None else scores + added
        if attention.normalization == "softmax":
            return scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v
        kernel = torch.where(visible, scores, 0.0)
        return kernel @ v / kernel.sum(-1, keepdim=True)
    assert isinstance(attention, LinearAttention)
    tensors = attention.feature_tensors(torch.float64)
    phi_q, phi_k = (
        attention.feature_map(x, *tensors, is_query=is_query, positions=positions).expand()
        for x, is_query in ((q, True), (k, False))
    )
    kernel = phi_q @ phi_k.mT
    if attention.local != "none":
        near = attention.is_near(positions[:, :, None], positions[:, None])[:, None]
        kernel = torch.where(near, attention.near_scores(q, k, *tensors), kernel)
    kernel = torch.where(visible, kernel, 0.0)
    normaliser = kernel.sum(-1, keepdim=True) + attention.normaliser_offset(torch.float64)
    if attention.guard_floor:
        keys = visible.sum(-1, keepdim=True)
        sound = normaliser > attention.guard_floor * keys
        return torch.where(sound, kernel @ v / torch.where(sound, normaliser, 1.0), v)
    return kernel @ v / normaliser


def slack(attention: Attention) -> float:
    """Return how much less exact a mechanism may be.

    Normalisers of signed maps are small differences of large sums; so is x² from its d(d+1)/2
    features, while scores square x itself.
    """
    if attention.config.name == "slay_exact_poly":
        return 10.0
    return 1.0 if attention.positive else 1e3


def assert_close(attention: Attention, ours: Tensor, reference: Tensor, tolerance: float = 1e-5):
    """Assert equality up to rounding."""
    tolerance *= slack(attention)
    torch.testing.assert_close(ours, reference, rtol=tolerance, atol=tolerance)
