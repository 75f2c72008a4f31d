"""States of the Triton kernels: into a call and out of it, and from segment to segment within."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from slayformer.attention.states import map_tensors
from tests.attention.accuracy import addends_norms, compare
from tests.attention.gradients import alone_and_among_all, subsets
from tests.attention.triton_cases import (
    check,
    dense,
    draw,
    gradients,
    interpreted,
    make,
    outside,
    run_in_the_interpreter,
)

pytestmark = pytest.mark.usefixtures("small_chunks")


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
    # all, and every other subset
    choices = sorted(subsets(range(5)), key=len, reverse=True)

    def total() -> Tensor:
        y, after = attention(q, k, v, state=state)
        return (y * weight).sum() + after.memory_BHMN.square().mean()

    for alone, among_all in alone_and_among_all(groups, choices, total):
        assert torch.equal(alone, among_all)


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


@outside
@pytest.mark.slow
def test_in_the_interpreter() -> None:
    run_in_the_interpreter(__file__)
