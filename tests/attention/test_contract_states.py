"""Every mechanism goes on from a state: pieces equal the whole, and gradients pass through it."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from slayformer.attention.linear import LinearAttention
from slayformer.attention.states import map_tensors, tensors_of
from tests.attention.contract import (
    HEADS,
    LENGTHS,
    WIDTH,
    assert_close,
    build,
    every_mechanism,
    heads,
)
from tests.attention.gradients import alone_and_among_all


@every_mechanism
class TestContract:
    @pytest.mark.parametrize("length", LENGTHS)
    def test_segments_equal_the_whole(self, name, length):
        attention = build(name)
        q, k, v = heads(2, length, dtype=torch.float32)
        whole, _ = attention(q, k, v)
        draws = torch.Generator().manual_seed(length)
        cuts = sorted(set(torch.randint(0, length + 1, (3,), generator=draws).tolist()))
        steps = list(range(length)) if length <= 65 else [*cuts, *range(length - 5, length)]
        for bounds in ([0, *cuts, length], [*sorted({0, *steps}), length]):
            state, parts = attention.init_state(2), []
            for start, stop in pairwise(bounds):
                span = slice(start, stop)
                if start == stop:
                    continue
                y, state = attention(q[:, :, span], k[:, :, span], v[:, :, span], state=state)
                parts.append(y)
            assert_close(attention, torch.cat(parts, 2), whole)

    def test_a_linear_state_has_constant_size(self, name):
        attention = build(name)
        if not isinstance(attention, LinearAttention):
            pytest.skip("a quadratic mechanism keeps every key and value")
        state = attention.init_state(1)
        size = state.memory_BHMN.shape
        assert size == (1, HEADS, attention.feature_count, WIDTH + 1)
        for length in (1, 300):
            q, k, v = heads(1, length, dtype=torch.bfloat16)
            _, state = attention(q, k, v, state=state)
            assert state.memory_BHMN.shape == size
            assert state.memory_BHMN.dtype == torch.float32

    def test_gradcheck_of_the_chunked_walk_with_a_state(self, name):
        attention = build(name).double()
        if not isinstance(attention, LinearAttention):
            pytest.skip("only linear mechanisms are walked in chunks")
        attention.chunk = 4
        if attention.local != "none":
            attention.local_size = 3
        q, k, v = (x.requires_grad_() for x in heads(1, 11))
        # a state of the size that real keys leave, in units that finite differences can see
        _, state = attention(*heads(1, 9, seed=2), state=attention.init_state(1))
        unit = state.memory_BHMN.abs().mean()
        memory = (state.memory_BHMN / unit).requires_grad_()

        def run(q, k, v, memory):
            before = dataclasses.replace(state, memory_BHMN=memory * unit)
            y, after = attention(q, k, v, state=before)
            return y, after.memory_BHMN[..., :3, :] / unit

        assert torch.autograd.gradcheck(run, (q, k, v, memory), atol=1e-4, fast_mode=True)

    def test_any_inputs_alone_have_the_gradients_they_have_among_all(self, name):
        attention = build(name)
        if isinstance(attention, LinearAttention):
            attention.chunk = 4
        parameters: list[Tensor] = list(attention.parameters())
        for dtype in (torch.float32, torch.float64):
            _, state = attention(*heads(1, 9, dtype=dtype), state=attention.init_state(1))
            state = map_tensors(state, lambda x: x.detach())
            of_state = [x for x in tensors_of(state) if x.is_floating_point() and x.numel()]
            q, k, v = heads(1, 11, dtype=dtype)
            groups = [[q], [k], [v], of_state, parameters]
            choices = [range(5), *((i,) for i in range(5)), (2, 3), (0, 4), (1, 3)]

            def total(q=q, k=k, v=v, state=state) -> Tensor:
                y, after = attention(q, k, v, state=state)
                return y.square().sum() + sum(
                    x.double().square().mean() for x in tensors_of(after) if x.requires_grad
                )

            for alone, among_all in alone_and_among_all(groups, choices, total):
                torch.testing.assert_close(alone, among_all, rtol=1e-6, atol=1e-7)

    def test_causal_state_is_refused_without_causality(self, name):
        attention = build(name)
        q, k, v = heads(1, 3)
        with pytest.raises(ValueError, match="causal"):
            attention(q, k, v, causal=False, state=attention.init_state(1))
