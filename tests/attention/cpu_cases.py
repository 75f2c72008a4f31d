"""What the tests of the compiled CPU backend share: mechanisms, inputs, and the fp64 torch walk."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from slayformer.attention.linear import LinearAttention
from slayformer.presets import load_preset
from slayformer.registry import build_attention
from tests.attention.accuracy import TOLERANCE

HEADS, WIDTH = 2, 16

# by name: the YAML and what is changed in it
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "paper": ("slay", {}),
    "best": ("slay_best", {"far_scale": 0.7}),
    "Yat near": (
        "slay_best",
        {"local_kernel": "yat", "local_size": 24, "learnable_epsilon": True}
        | {"far_scale": 0.25, "last_far_scale": None},
    ),
    "based": ("based", {}),
}
MORE_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "trainable paper": ("slay", {"trainable": True, "local": "chunk", "far_scale": 1.3}),
    "learned ⊗ exponentials": (
        "slay",
        {"polynomial": "learned_quadratic", "block_width": 3, "polynomial_features": 18},
    ),
    "one ε": ("slay_best", {"local_kernel": "yat", "local_size": 4, "epsilon": 0.1}),
    "wide blocks": ("slay_best", {"block_width": 16, "polynomial_features": 136}),
    "flat": ("slay_best", {"block_center": 1.0, "far_scale": 0.7}),
    "block_quadratic": ("slay_block_quadratic", {"local": "window", "local_size": 5}),
    "rotated exponentials": ("slay", {"polynomial": "block_quadratic", "polynomial_features": 17}),
    "exact": ("slay_exact_poly", {}),
    "hadamard": ("slay_hadamard", {"local": "chunk"}),
    "laplace": ("slay_laplace", {"local": "chunk", "local_size": 16}),
    "softmax in chunks": ("slay_best", {"local": "chunk", "local_size": 20}),
    "softmax beside ⊗": ("slay", {"local": "window", "local_kernel": "softmax", "local_size": 9}),
    # softmax's far share would be so small here that its scale's gradient cancels in fp32
    "long stretches": (
        "slay_best",
        {"local_kernel": "yat", "local_size": 100, "far_scale": 0.25},
    ),
    "linear_elu": ("linear_elu", {}),
    "performer": ("performer", {}),
    "performer_favor": ("performer_favor", {}),
    "cosformer": ("cosformer", {}),
    "hedgehog": ("hedgehog", {}),
}


def make(case: str, backend: str, **sizes: int) -> LinearAttention:
    """Return the mechanism of a case, its parameters moved off their starts."""
    name, changes = (CASES | MORE_CASES)[case]
    config = load_preset(name, backend=backend, **changes)
    heads, width = sizes.get("num_heads", HEADS), sizes.get("head_dim", WIDTH)
    attention = build_attention(
        config, num_heads=heads, head_dim=width, max_sequence_length=70_000, seed=7
    )
    assert isinstance(attention, LinearAttention)
    draws = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draws), alpha=0.1)
    return attention


def draw(
    *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, count: int = 4
) -> list[Tensor]:
    """Return `count` tensors as fp64 that `dtype` can hold; heads stride as a model's do."""
    draws = torch.Generator().manual_seed(seed)
    batch, heads, length, width = shape
    drawn = (torch.randn(batch, length, heads, width, generator=draws) for _ in range(count))
    return [x.to(dtype).double().transpose(1, 2) for x in drawn]


def results(
    attention: LinearAttention, dtype: torch.dtype, tensors: list[Tensor], **options: Any
) -> list[Tensor]:
    """Return y and the gradients of q, k, v and of the parameters for a weighted sum of y."""
    *heads, weight = tensors
    q, k, v = (x.to(dtype).requires_grad_() for x in heads)
    y, _ = attention(q, k, v, **options)
    assert y.dtype == dtype
    parameters = list(attention.parameters())
    found = torch.autograd.grad(
        (y.double() * weight).sum(), (q, k, v, *parameters), materialize_grads=True
    )
    return [y.detach(), *found]


def stepwise(
    attention: LinearAttention, dtype: torch.dtype, tensors: list[Tensor], cuts: list[int]
) -> list[Tensor]:
    """Return what `results` does for calls on pieces, the last state's gradient taken too."""
    *heads, weight = tensors
    q, k, v = (x.to(dtype).requires_grad_() for x in heads)
    state = attention.init_state(q.shape[0], value_dim=v.shape[-1])
    pieces, bounds = [], [0, *cuts, q.shape[2]]
    for start, stop in pairwise(bounds):
        y, state = attention(*(x[:, :, start:stop] for x in (q, k, v)), state=state)
        pieces.append(y)
    y, memory = torch.cat(pieces, dim=2), state.memory_BHMN
    draws = torch.Generator().manual_seed(5)
    of_memory = torch.randn(memory.shape, generator=draws, dtype=torch.float64)
    total = (y.double() * weight).sum() + (memory.double() * of_memory).sum() / 100
    parameters = list(attention.parameters())
    found = torch.autograd.grad(total, (q, k, v, *parameters), materialize_grads=True)
    return [y.detach(), *found, memory.detach()]


def errors(found: list[Tensor], reference: list[Tensor], floor: float) -> list[float]:
    """Return relative RMS errors; sizes below `floor` times that of dv count as that."""
    least = floor * float(reference[3].norm()) / reference[3].numel() ** 0.5
    assert all(torch.isfinite(x).all() for x in found)
    return [
        float((x.double() - y).norm()) / max(float(y.norm()), least * y.numel() ** 0.5)
        for x, y in zip(found, reference, strict=True)
    ]


def compare(
    case: str,
    run: Callable[[LinearAttention, torch.dtype], list[Tensor]],
    dtype: torch.dtype = torch.float32,
    floor: float = 0.1,
    **sizes: int,
) -> None:
    """Compare what `run` finds with the compiled walk in `dtype` and with torch in fp64."""
    reference = run(make(case, "torch", **sizes), torch.float64)
    found = errors(run(make(case, "cpu", **sizes), dtype), reference, floor)
    for number, error in enumerate(found):
        assert error <= TOLERANCE[dtype], f"result {number}: {error:.1e}"
