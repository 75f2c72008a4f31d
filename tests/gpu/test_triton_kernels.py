"""The Triton kernels on a GPU equal the torch walk in fp64, twice to the bit."""

from __future__ import annotations

import dataclasses
import secrets
from typing import Any

import pytest
import torch
from torch import Tensor

from slayformer.attention import backends
from slayformer.attention.linear import LinearAttention
from slayformer.presets import make_attention
from tests.attention.accuracy import TOLERANCE, addends_norms, compare

pytestmark = pytest.mark.gpu


def make(name: str, width: int, backend: str, **options: Any) -> LinearAttention:
    """Return a mechanism on the GPU, its parameters moved off their starts, the same each time."""
    attention = make_attention(
        name,
        num_heads=2,
        head_dim=width,
        max_sequence_length=5000,
        seed=7,
        backend=backend,
        **options,
    )
    assert isinstance(attention, LinearAttention)
    draws = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draws), alpha=0.1)
    return attention.cuda()


def fresh(length: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    """Return q, k, v and weights of a sum of y, other ones in every run, as `dtype` holds them."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    draws = torch.Generator().manual_seed(seed)
    shape = (2, length, 2, width)
    drawn = (torch.randn(shape, generator=draws).to(dtype).transpose(1, 2) for _ in range(4))
    return [x.cuda() for x in drawn]


def results(
    attention: LinearAttention, tensors: list[Tensor], dtype: torch.dtype, **options: Any
) -> tuple[list[Tensor], Tensor]:
    """Return y and all gradients for a weighted sum of y, and that sum's addends by token."""
    *heads, weight = tensors
    given = [x.to(dtype).requires_grad_() for x in heads]
    y, _ = attention(*given, **options)
    inputs = [*given, *attention.parameters()]
    parts = (y.double() * weight).sum(-1)
    found = torch.autograd.grad(parts.sum(), inputs, retain_graph=True, materialize_grads=True)
    return [y.detach(), *found], parts


def check(
    name: str,
    length: int,
    width: int,
    dtype: torch.dtype,
    changes: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """Compare twice with the reference, and the two runs with each other."""
    tensors = fresh(length, width, dtype)
    reference = make(name, width, "torch", **(changes or {}))
    expected, parts = results(reference, tensors, torch.float64, **options)
    norms = addends_norms(parts, reference.parameters())
    attention = make(name, width, "triton", **(changes or {}))
    one, two = (results(attention, tensors, dtype, **options)[0] for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(one, two, strict=True))
    compare(one, expected, TOLERANCE[dtype], norms, length)


@pytest.mark.parametrize("name", ["slay", "slay_best"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [32, 64, 128])
def test_equals_the_reference(name: str, dtype: torch.dtype, width: int) -> None:
    for length in (1, 65, 1000):
        check(name, length, width, dtype)


@pytest.mark.parametrize(
    "name", ["based", "hedgehog", "performer", "linear_elu", "cosformer", "slay_block_quadratic"]
)
def test_other_maps(name: str) -> None:
    check(name, 700, 64, torch.float32)
    check(name, 700, 64, torch.bfloat16)


def test_documents_padding_windows_and_long_sequences() -> None:
    mask = torch.ones(2, 700, dtype=torch.bool)
    mask[0, -90:] = False
    documents = (torch.arange(700) // torch.tensor([[130], [333]])).contiguous()
    changes = {"local_kernel": "yat", "local_size": 40, "learnable_epsilon": True}
    changes |= {"far_scale": 0.25, "last_far_scale": None}
    packed: dict[str, Any] = {"document_ids": documents.cuda()}
    check("slay_best", 700, 64, torch.float32, changes, **packed)
    check("slay", 700, 64, torch.bfloat16, **packed)
    check("slay_best", 4097, 64, torch.bfloat16)
    attention = make("slay_best", 64, "triton")
    *heads, _ = fresh(700, 64, torch.float32)
    padded, _ = attention(*heads, mask=mask.cuda())
    alone, _ = attention(*(x[:1, :, :610] for x in heads))
    assert torch.allclose(padded[:1, :, :610], alone, atol=1e-5)


def test_states_go_in_and_out() -> None:
    attention = make("slay_best", 64, "triton")
    *heads, _ = fresh(1000, 64, torch.float32)
    whole, _ = attention(*heads)
    state, pieces = attention.init_state(2, "cuda"), []
    for piece in (slice(0, 333), slice(333, 334), slice(334, 1000)):
        y, state = attention(*(x[:, :, piece] for x in heads), state=state)
        pieces.append(y)
    assert torch.allclose(torch.cat(pieces, dim=2), whole, atol=1e-4)


def test_auto_takes_it_in_inference_and_training(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []
    for name, backend in backends.BACKENDS.items():

        def spy(*arguments: Any, name: str = name, apply: Any = backend.apply) -> Any:
            used.append(name)
            return apply(*arguments)

        monkeypatch.setitem(backends.BACKENDS, name, dataclasses.replace(backend, apply=spy))
    attention = make("slay_best", 64, "auto")
    tensors = fresh(300, 64, torch.bfloat16)
    results(attention, tensors, torch.bfloat16)
    with torch.no_grad():
        attention(*tensors[:3])
    assert used == ["triton", "triton"]
