"""The Triton kernels equal the dense form in fp64, run by Triton's interpreter.

The interpreter is chosen when triton is imported, so these tests start this file again in a
process of its own. Kernels on a GPU: tests/gpu.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slayformer.attention.base import Place, real_document_ids, token_positions
from slayformer.attention.linear import LinearAttention
from slayformer.attention.states import map_tensors
from slayformer.presets import make_attention
from tests.attention.accuracy import addends_norms, compare

ROOT = Path(__file__).parents[2]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter's process")
outside = pytest.mark.skipif(INTERPRETED, reason="runs outside of the interpreter's process")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 5e-3}

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


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let short sequences have many chunks, and spare the interpreter repeated preparations."""
    if not INTERPRETED:
        return
    from triton.runtime import interpreter

    from slayformer.attention.backends import triton_pass

    monkeypatch.setattr(triton_pass, "CHUNK", 48)
    monkeypatch.setattr(triton_pass, "ONE_CHUNK", 0)

    def call(function: Any, *arguments: Any, **named: Any) -> Any:
        # a kernel has prepared its language; triton's own modules need it once
        module = function.fn.__module__
        if module.startswith("triton.") and module not in prepared:
            interpreter._patch_lang(function.fn)
            prepared.add(module)
        return function.rewrite()(*arguments, **named)

    monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", call)


prepared: set[str] = set()


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


@interpreted
@pytest.mark.parametrize("case", ["paper", "best"])
@pytest.mark.parametrize("length", [1, 63, 65, 200])
def test_output_and_gradients_equal_the_dense_form(case: str, length: int) -> None:
    check(case, length)


@interpreted
@pytest.mark.parametrize("case", CASES)
def test_every_map_is_covered(case: str) -> None:
    check(case, 110)


@interpreted
@pytest.mark.parametrize("case", ["paper", "best"])
@pytest.mark.parametrize("width", [20, 32, 64, 128])
def test_head_widths(case: str, width: int) -> None:
    check(case, 50, width=width)


@interpreted
@pytest.mark.parametrize("case", ["paper", "best", "window"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(case: str, dtype: torch.dtype) -> None:
    check(case, 130, dtype, width=32)


@interpreted
@pytest.mark.parametrize("case", ["paper", "best", "window", "based"])
def test_padding_documents_and_all_sides(case: str) -> None:
    length = 115
    mask = torch.ones(2, length, dtype=torch.bool)
    mask[0, :20] = mask[1, -9:] = False
    documents = (torch.arange(length) // torch.tensor([[50], [70]])).contiguous()
    for options in (
        {"mask": mask},
        {"document_ids": documents},
        {"mask": mask, "document_ids": documents},
        {"causal": False, "mask": mask, "document_ids": documents},
    ):
        check(case, length, batch=2, **options)


@interpreted
@pytest.mark.parametrize("case", ["paper", "best", "window"])
def test_states_in_and_out(case: str) -> None:
    attention = make(case, heads=2)
    length, lag = 130, attention.local_size
    *heads, weight = draw(length, torch.float32, heads=2)
    # two random places, and one token alone
    first, second = torch.randperm(100)[:2].sort().values.tolist()
    bounds = [0, first + 1, first + 2, second + 20, length]
    exact = [x.clone().requires_grad_() for x in heads]
    y = dense(attention, *exact)
    _, k, v = exact
    entered = slice(0, length - lag)
    positions = torch.arange(length)[None]
    tensors = attention.feature_tensors(torch.float64)
    key = attention.feature_map(k, *tensors, is_query=False, positions=positions).expand()
    values = torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)
    memory = key[:, :, entered].mT @ values[:, :, entered]
    of_memory = torch.randn(memory.shape, dtype=torch.float64) / 10
    more = (memory * of_memory).sum()
    parts = torch.cat([(y * weight).sum(-1).flatten(), more[None]])
    norms = addends_norms(parts, attention.parameters())
    expected = gradients(attention, y, exact, weight, more)
    given = [x.float().requires_grad_() for x in heads]
    state = attention.init_state(1)
    pieces = []
    for start, stop in pairwise(bounds):
        piece, state = attention(*(x[:, :, start:stop] for x in given), state=state)
        pieces.append(piece)
    more = (state.memory_BHMN.double() * of_memory).sum()
    found = gradients(attention, torch.cat(pieces, dim=2), given, weight, more)
    last = state.memory_BHMN.detach()
    compare([*found, last], [*expected, memory.detach()], 1e-5, norms, length)


@interpreted
def test_any_inputs_alone_have_the_gradients_they_have_among_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from slayformer.attention.backends import triton_pass

    monkeypatch.setattr(triton_pass, "CHUNK", 8)
    attention = make("window")
    *heads, weight = draw(10, torch.float32)
    q, k, v = given = [x.float() for x in heads]
    _, state = attention(*given, state=attention.init_state(1))
    memory = state.memory_BHMN.detach()
    state = dataclasses.replace(map_tensors(state, Tensor.detach), memory_BHMN=memory)
    groups = [[q], [k], [v], [memory], list(attention.parameters())]
    whole: list[Any] = []
    # all, and every other subset
    for chosen in sorted(subsets(range(5)), key=len, reverse=True):
        for number, group in enumerate(groups):
            for x in group:
                x.requires_grad_(number in chosen)
        sources = [x for i in chosen for x in groups[i]]
        if not sources:
            continue
        y, after = attention(q, k, v, state=state)
        total = (y * weight).sum() + after.memory_BHMN.square().mean()
        found = iter(torch.autograd.grad(total, sources, materialize_grads=True))
        gradients = [[next(found) for _ in groups[i]] for i in chosen]
        whole = whole or gradients
        for i, ours in zip(chosen, gradients, strict=True):
            assert all(torch.equal(x, z) for x, z in zip(ours, whole[i], strict=True))


def subsets(items: Iterable[int]) -> list[tuple[int, ...]]:
    """Return every subset of `items` in their order."""
    found: list[tuple[int, ...]] = [()]
    for item in items:
        found += [(*one, item) for one in found]
    return found


@interpreted
@pytest.mark.parametrize(
    ("case", "marked"), [("paper", False), ("best", False), *((case, True) for case in CASES)]
)
def test_decoding_token_by_token(case: str, marked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt at once and the rest one by one, in requests of different lengths if `marked`."""
    from slayformer.attention.backends import triton_start, triton_step

    kept, started = triton_start.launch, []

    def launch(kernel: Any, *rest: Any) -> None:
        started.append(kernel)
        kept(kernel, *rest)

    monkeypatch.setattr(triton_start, "launch", launch)
    attention = make(case, heads=2)
    prompt, length = 30, 62
    *heads, _ = draw(length, torch.float32, batch=2, heads=2)
    options: dict[str, Any] = {}
    real = torch.ones(2, length, dtype=torch.bool)
    if marked:
        # padding at the left, and after a request that ended; another document in each
        real[0, :11] = real[1, -5:] = False
        documents = (torch.arange(length) // torch.tensor([[45], [52]])).contiguous()
        options = {"mask": real, "document_ids": documents}
    expected = dense(attention, *heads, **options)
    given = [x.float() for x in heads]
    state = attention.init_state(2)
    pieces = []
    with torch.no_grad():
        for start, stop in [(0, prompt), *((t, t + 1) for t in range(prompt, length))]:
            part = {name: x[:, start:stop] for name, x in options.items()}
            piece, state = attention(*(x[:, :, start:stop] for x in given), state=state, **part)
            pieces.append(piece)
        _, whole = attention(*given, state=attention.init_state(2), **options)
    assert started.count(triton_step.step_forward) == length - prompt
    seen = real[:, None, :, None]
    error = ((torch.cat(pieces, dim=2) - expected) * seen).norm() / (expected * seen).norm()
    assert error <= 1e-5
    for field in ("memory_BHMN", "memory_document_B"):
        torch.testing.assert_close(
            getattr(state, field), getattr(whole, field), rtol=1e-5, atol=1e-5
        )


@interpreted
@pytest.mark.parametrize("case", ["paper", "best"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [20, 64])
def test_decoding_in_half_precision(case: str, dtype: torch.dtype, width: int) -> None:
    attention = make(case, width=width)
    length = 40
    *heads, _ = draw(length, dtype, width=width)
    given = [x.to(dtype) for x in heads]
    with torch.no_grad():
        state = attention.init_state(1)
        pieces = []
        for t in range(length):
            piece, state = attention(*(x[:, :, t : t + 1] for x in given), state=state)
            pieces.append(piece.double())
    assert piece.dtype == dtype
    expected = dense(attention, *heads)
    error = (torch.cat(pieces, dim=2) - expected).norm() / expected.norm()
    assert error <= TOLERANCE[dtype]


@interpreted
def test_a_sequence_is_cut_into_segments_for_more_programs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from slayformer.attention.backends import triton_carry, triton_pass, triton_start

    kept = triton_start.launch
    joined: list[int] = []

    def launch(kernel: Any, grid: Any, arguments: dict[str, Any], *rest: Any) -> None:
        if kernel is triton_carry.join_segments:
            joined.append(arguments["segments"])
        kept(kernel, grid, arguments, *rest)

    monkeypatch.setattr(triton_start, "launch", launch)
    monkeypatch.setattr(triton_pass, "CHUNK", 16)
    monkeypatch.setattr(triton_carry, "PROGRAMS", 10**6)
    documents = (torch.arange(200) // torch.tensor([[90], [150]])).contiguous()
    check("best", 200)
    check("paper", 200, batch=2, document_ids=documents)
    # forward, and in the backward pass both ways
    assert joined == [3] * 6


@interpreted
def test_two_runs_are_bit_equal() -> None:
    attention = make("window")
    *heads, weight = draw(100, torch.float32)
    runs = []
    for _ in range(2):
        given = [x.float().requires_grad_() for x in heads]
        runs.append(gradients(attention, attention(*given)[0], given, weight, torch.zeros(())))
    assert all(torch.equal(x, y) for x, y in zip(*runs, strict=True))


@outside
@pytest.mark.slow
@pytest.mark.parametrize(
    "chosen",
    [
        "dense",
        "map or widths",
        "padding",
        "decoding",
        "(half or states or equal or segments or alone) and not decoding",
    ],
)
def test_in_the_interpreter(chosen: str) -> None:
    """Run this file's other tests where triton interprets."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-qx", "-p", "no:xdist", "-k", chosen, __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert " passed" in run.stdout
