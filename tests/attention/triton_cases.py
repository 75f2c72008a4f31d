"""What the tests of the Triton kernels share: mechanisms, the dense form, and the interpreter.

The interpreter is chosen when triton is imported, so each of their files has one test that starts
the file again in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slayformer.attention.base import Place, real_document_ids, token_positions
from slayformer.attention.linear import LinearAttention
from slayformer.presets import make_attention
from tests.attention.accuracy import TOLERANCE, addends_norms, compare

ROOT = Path(__file__).parents[2]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter's process")
outside = pytest.mark.skipif(INTERPRETED, reason="runs outside of the interpreter's process")

# by name: the preset and what makes it small
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "paper": ("slay", {"polynomial_features": 4, "exponential_features": 8}),
    "best": ("slay_best", {"polynomial_features": 60, "block_width": 5, "far_scale": 0.7}),
    "window": (
        "slay_best",
        {
            "polynomial_features": 30,
            "block_width": 5,
            "local_kernel": "yat",
            "local_size": 24,
            "learnable_epsilon": True,
            "far_scale": 0.25,
            "last_far_scale": None,
        },
    ),
    "flat": (
        "slay_best",
        {"polynomial_features": 60, "block_width": 5, "block_center": 1.0, "far_scale": 0.7},
    ),
    "learned ⊗ exponentials": (
        "slay",
        {
            "polynomial": "learned_quadratic",
            "polynomial_features": 18,
            "block_width": 3,
            "exponential_features": 4,
            "trainable": True,
        },
    ),
    "softmax in chunks": (
        "slay_best",
        {"polynomial_features": 30, "block_width": 5, "local": "chunk", "local_size": 20},
    ),
    "block_quadratic": ("slay_block_quadratic", {"polynomial_features": 40}),
    "laplace": ("slay_laplace", {"exponential_features": 8, "local": "chunk", "local_size": 16}),
    "based": ("based", {"projected_width": 4, "window": 20}),
    "performer": ("performer", {"feature_count": 150}),
    "linear_elu": ("linear_elu", {}),
    "cosformer": ("cosformer", {}),
    "hedgehog": ("hedgehog", {}),
}


def make(case: str, heads: int = 1, width: int = 16) -> LinearAttention:
    """Return the mechanism of a case, its parameters moved off their starts."""
    name, options = CASES[case]
    attention = make_attention(
        name,
        num_heads=heads,
        head_dim=width,
        max_sequence_length=1000,
        seed=7,
        backend="triton",
        **options,
    )
    assert isinstance(attention, LinearAttention)
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=0.1)
    return attention


def draw(length: int, dtype: torch.dtype, batch: int = 1, heads: int = 1, width: int = 16):
    """Return q, k, v and weights of a sum of y, as fp64 that `dtype` can hold."""
    drawn = (torch.randn(batch, length, heads, width) for _ in range(4))
    return [x.to(dtype).double().transpose(1, 2) for x in drawn]


def dense(
    attention: LinearAttention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = True,
    mask: Tensor | None = None,
    document_ids: Tensor | None = None,
) -> Tensor:
    """Return y from the matrix of all scores."""
    batch, _, length, _ = q.shape
    real = torch.ones(batch, length, dtype=torch.bool) if mask is None else mask
    documents = real_document_ids(mask, document_ids)
    positions = token_positions(real, documents, Place.start(batch, "cpu"))
    tensors = attention.feature_tensors(torch.float64)
    query = attention.feature_map(q, *tensors, is_query=True, positions=positions)
    key = attention.feature_map(k, *tensors, is_query=False, positions=positions)
    scores = query.expand() @ key.expand().mT
    if attention.local_size:
        near = attention.is_near(positions[:, :, None], positions[:, None, :])[:, None]
        scores = torch.where(near, attention.near_scores(q, k, *tensors), scores)
    seen = real[:, None, None, :].expand_as(scores)
    if documents is not None:
        seen = seen & (documents[:, None, :, None] == documents[:, None, None, :])
    if causal:
        seen = seen & torch.ones(length, length, dtype=torch.bool).tril()
    scores = scores * seen
    offset = attention.normaliser_offset(torch.float64)
    return scores @ v / (scores.sum(-1, keepdim=True) + offset)


def gradients(
    attention: LinearAttention, y: Tensor, inputs: list[Tensor], weight: Tensor, more: Tensor
) -> list[Tensor]:
    """Return y and the gradients of `inputs` and of the parameters for Σ weight · y + more."""
    parameters = list(attention.parameters())
    total = (y.double() * weight).sum() + more
    found = torch.autograd.grad(total, [*inputs, *parameters], materialize_grads=True)
    return [y.detach(), *found]


def check(
    case: str, length: int, dtype: torch.dtype = torch.float32, batch: int = 1, **options: Any
) -> None:
    """Compare y and all gradients for one batch with the dense form."""
    sizes = {name: options.pop(name) for name in ("heads", "width") if name in options}
    attention = make(case, **sizes)
    *heads, weight = draw(length, dtype, batch, **sizes)
    real = options["mask"][:, None, :, None] if "mask" in options else torch.ones(1)
    nothing = torch.zeros(())
    exact = [x.clone().requires_grad_() for x in heads]
    y = dense(attention, *exact, **options) * real
    norms = addends_norms((y * weight).sum(-1), attention.parameters())
    expected = gradients(attention, y, exact, weight, nothing)
    given = [x.to(dtype).requires_grad_() for x in heads]
    y, _ = attention(*given, **options)
    assert y.dtype == dtype
    found = gradients(attention, y * real, given, weight, nothing)
    compare(found, expected, TOLERANCE[dtype], norms, length)


def run_in_the_interpreter(file: str, chosen: str = "") -> None:
    """Run the other tests of a file, or those `chosen` of them, where triton interprets."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-qx", "-p", "no:xdist", "-k", chosen, file]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert " passed" in run.stdout
