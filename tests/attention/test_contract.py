"""Every registered mechanism keeps the contract of attention/base.py: what it gives one sequence.

The rest of the contract is in the test_contract_*.py beside this file.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slayformer.attention.linear import CHUNK
from slayformer.registry import load_mechanisms
from tests.attention.contract import (
    LENGTHS,
    NAMES,
    OPTIONS,
    WIDTH,
    assert_close,
    build,
    dense,
    every_mechanism,
    heads,
    slack,
)


def relative_rms(x: Tensor, reference: Tensor) -> float:
    """Return ‖x − reference‖/‖reference‖."""
    return float((x.double() - reference).norm() / reference.norm())


def test_every_mechanism_has_a_yaml_of_its_name_and_every_yaml_a_mechanism():
    assert {config.mechanism or config.name for config in OPTIONS.values()} == set(
        load_mechanisms()
    )
    assert all(config.name == name for name, config in OPTIONS.items())
    assert set(load_mechanisms()) <= set(NAMES)


@every_mechanism
class TestContract:
    @pytest.mark.parametrize("causal", [True, False])
    @pytest.mark.parametrize("length", LENGTHS)
    def test_output_and_gradients_equal_the_dense_form(self, name, length, causal):
        attention = build(name)
        visible = torch.ones(length, length, dtype=torch.bool)
        visible = visible.tril() if causal else visible
        weight = heads(1, length, seed=1)[0]
        results = {}
        for kind in ("dense", "fp64", "fp32"):
            dtype = torch.float32 if kind == "fp32" else torch.float64
            q, k, v = (x.requires_grad_() for x in heads(1, length, dtype=dtype))
            if kind == "dense":
                y = dense(attention, q, k, v, visible)
            else:
                y, state = attention(q, k, v, causal=causal)
                assert state is None
                assert y.dtype == dtype
            gradients = torch.autograd.grad((y * weight.to(dtype)).sum(), (q, k, v))
            results[kind] = [y.detach(), *gradients]
        for kind, tolerance in (("fp64", 1e-11), ("fp32", 1e-5)):
            tolerance *= slack(attention)
            scale = results["dense"][3].norm()
            for what, ours, reference in zip(
                ("y", "dq", "dk", "dv"), results[kind], results["dense"], strict=True
            ):
                # dq and dk nearly vanish for one or two keys: then on the scale of dv
                size = torch.maximum(reference.norm(), (0.1 if length <= 2 else 0.01) * scale)
                assert (ours - reference).norm() < tolerance * size, (kind, what)

    @pytest.mark.parametrize("length", [1, 5])
    def test_gradcheck(self, name, length):
        attention = build(name).double()
        q, k, v = (x.requires_grad_() for x in heads(1, length))
        assert torch.autograd.gradcheck(lambda *qkv: attention(*qkv)[0], (q, k, v))

    @pytest.mark.parametrize("length", [9, 2 * CHUNK + 40])
    def test_the_future_changes_nothing(self, name, length):
        attention = build(name)
        q, k, v = heads(2, length, dtype=torch.float32)
        for first in (1, length // 2, length - 1):
            changed = [x.clone() for x in (q, k, v)]
            other = heads(2, length, seed=first, dtype=torch.float32, scale=5.0)
            for x, new in zip(changed, other, strict=True):
                x[:, :, first:] = new[:, :, first:]
            before, after = attention(q, k, v)[0], attention(*changed)[0]
            assert torch.equal(before[:, :, :first], after[:, :, :first])
            assert not torch.equal(before[:, :, first:], after[:, :, first:])

    @pytest.mark.parametrize("length", [1, 65, 1000])
    def test_rows_sum_to_one(self, name, length):
        attention = build(name, exact_normaliser=True)
        q, k, v = heads(1, length, dtype=torch.float32)
        y, _ = attention(q, k, torch.ones_like(v))
        # a small difference of large sums, in a compiled walk not rounded as the values' sums are
        atol = 1e-5 if attention.positive else 1e-4
        torch.testing.assert_close(y, torch.ones_like(y), rtol=0, atol=atol)

    @pytest.mark.parametrize("length", [9, 2 * CHUNK + 9])
    def test_values_may_have_another_width(self, name, length):
        attention = build(name)
        q, k, v = heads(1, length, dtype=torch.float32)
        whole, _ = attention(q, k, torch.cat([v, -v[..., :5]], dim=-1))
        narrow, _ = attention(q, k, v[..., :3])
        reference, _ = attention(q, k, v)
        assert_close(attention, whole[..., :WIDTH], reference)
        if attention.positive:
            assert_close(attention, whole[..., WIDTH:], -reference[..., :5])
        assert_close(attention, narrow, reference[..., :3])

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
    def test_half_precision_at_six_sigma(self, name, dtype):
        attention = build(name)
        q, k, v = (x.requires_grad_() for x in heads(1, 1024, dtype=dtype, scale=6.0))
        y, _ = attention(q, k, v)
        gradients = torch.autograd.grad(y.float().square().mean(), (q, k, v))
        assert y.dtype == dtype
        assert all(bool(x.isfinite().all()) for x in (y, *gradients))
        visible = torch.ones(1024, 1024, dtype=torch.bool).tril()
        exact = [x.detach().double() for x in (q, k, v)]
        reference = dense(attention, exact[0], exact[1], exact[2], visible)
        assert relative_rms(y.detach(), reference) < 2e-2

    def test_autocast_changes_only_rounding(self, name):
        attention = build(name)
        q, k, v = (x.requires_grad_() for x in heads(1, 2 * CHUNK + 44, dtype=torch.float32))
        plain, _ = attention(q, k, v)
        reference = torch.autograd.grad(plain.square().sum(), (q, k, v))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y, _ = attention(q, k, v)
        gradients = torch.autograd.grad(y.float().square().sum(), (q, k, v))
        tolerance = 2e-2 if name == "softmax" else 1e-6
        assert relative_rms(y.detach(), plain.detach().double()) < tolerance
        for ours, wanted in zip(gradients, reference, strict=True):
            assert (ours - wanted).norm() <= tolerance * wanted.norm()

    def test_zero_vectors(self, name):
        attention = build(name)
        for zero in range(3):
            qkv = [x.requires_grad_() for x in heads(1, 70, dtype=torch.float32)]
            qkv[zero] = torch.zeros_like(qkv[zero]).requires_grad_()
            y, _ = attention(*qkv)
            gradients = torch.autograd.grad(y.square().sum(), qkv)
            assert all(bool(x.isfinite().all()) for x in (y, *gradients))
