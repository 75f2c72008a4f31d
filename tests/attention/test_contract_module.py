"""Every mechanism is a sound module: saved, seeded, compiled, and trained after inference."""

from __future__ import annotations

import sys

import pytest
import torch

from slayformer.attention.linear import CHUNK, LinearAttention
from slayformer.registry import build_attention
from tests.attention.contract import HEADS, WIDTH, assert_close, build, every_mechanism, heads


def clear_caches() -> None:
    """Empty every cache of a function in slayformer.attention that can be emptied."""
    for key, module in list(sys.modules.items()):
        if key.startswith(("slayformer.attention", "slayformer.baselines")):
            for function in list(vars(module).values()):
                if hasattr(function, "cache_clear"):
                    function.cache_clear()


@every_mechanism
class TestContract:
    def test_state_dict_carries_everything_random(self, name):
        attention = build(name)
        other = build_attention(
            attention.config, num_heads=HEADS, head_dim=WIDTH, max_sequence_length=8192, seed=99
        )
        q, k, v = heads(1, 70, dtype=torch.float32)
        weights, others = attention.state_dict(), other.state_dict()
        if any(not torch.equal(weights[key], others[key]) for key in weights):
            assert not torch.equal(other(q, k, v)[0], attention(q, k, v)[0])
        other.load_state_dict(attention.state_dict())
        assert torch.equal(other(q, k, v)[0], attention(q, k, v)[0])
        floats = [x.dtype for x in weights.values() if x.is_floating_point()]
        assert set(floats) <= {torch.float32}

    def test_the_seed_decides_and_nothing_else(self, name):
        torch.manual_seed(1)
        first = build(name).state_dict()
        torch.manual_seed(2)
        second = build(name).state_dict()
        assert all(torch.equal(first[key], second[key]) for key in first)

    def test_inference_first_leaves_training_as_it_is(self, name):
        """Nothing that is kept from call to call was made for inference alone."""
        for dtype in (torch.float32, torch.float64):
            attention, other = build(name), build(name)
            clear_caches()
            runs = []
            for module in (attention, other):
                # a length of its own: in one chunk, in several, and with a state
                for length in (9, 2 * CHUNK + 9):
                    qkv = heads(1, length, dtype=dtype)
                    if module is attention:
                        with torch.inference_mode():
                            module(*qkv, state=module.init_state(1))
                            module(*qkv)
                    qkv = [x.requires_grad_() for x in qkv]
                    y, _ = module(*qkv)
                    sources = [*qkv, *(p for p in module.parameters() if p.requires_grad)]
                    total = y.square().sum()
                    runs.append([y, *torch.autograd.grad(total, sources, materialize_grads=True)])
                clear_caches()
            for one, two in zip(runs[:2], runs[2:], strict=True):
                assert all(torch.equal(x, y) for x, y in zip(one, two, strict=True))

    def test_flops_grow_as_the_mechanism_says(self, name):
        attention = build(name)
        short, long = attention.flops_per_token(4096), attention.flops_per_token(8192)
        assert 0 < attention.flops_per_token(1) <= short
        if isinstance(attention, LinearAttention):
            assert long == short
        else:
            assert 1.9 < long / short < 2.1

    @pytest.mark.slow
    def test_compiled_equals_eager(self, name):
        attention = build(name)
        compiled = torch.compile(attention)
        weight = heads(1, 2 * CHUNK + 9, seed=1, dtype=torch.float32)[0]
        results = []
        for module in (attention, compiled):
            q, k, v = (x.requires_grad_() for x in heads(1, 2 * CHUNK + 9, dtype=torch.float32))
            y, _ = module(q, k, v)
            results.append([y, *torch.autograd.grad((y * weight).sum(), (q, k, v))])
        for eager, other in zip(*results, strict=True):
            assert_close(attention, other, eager)
