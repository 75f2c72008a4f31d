"""Every registered mechanism keeps the contract of attention/base.py.

The reference is the dense fp64 form: kernel values for all pairs, masked, normalised. For linear
mechanisms the kernel comes from their own expanded features; tests/attention/test_slay.py and its
neighbours prove the features themselves against independent formulas.
"""

from __future__ import annotations

import dataclasses
import sys
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from slayformer.attention.base import Attention
from slayformer.attention.linear import CHUNK, LinearAttention
from slayformer.attention.quadratic import QuadraticAttention
from slayformer.attention.states import map_tensors, tensors_of
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


def build(name: str, *, exact_normaliser: bool = False, width: int = WIDTH) -> Attention:
    """Build mechanism `name` from its YAML; `exact_normaliser` takes δ out of the normaliser."""
    config = (OPTIONS | ON_TORCH)[name]
    if exact_normaliser and hasattr(config, "delta"):
        config = dataclasses.replace(config, delta=1e-30)
    return build_attention(
        config, num_heads=HEADS, head_dim=width, max_sequence_length=8192, seed=11
    )


def clear_caches() -> None:
    """Empty every cache of a function in slayformer.attention that can be emptied."""
    for key, module in list(sys.modules.items()):
        if key.startswith(("slayformer.attention", "slayformer.baselines")):
            for function in list(vars(module).values()):
                if hasattr(function, "cache_clear"):
                    function.cache_clear()


def with_stretches(name: str) -> Attention:
    """Build `name` with near pairs those of one stretch, if it can, and far ones of less weight."""
    attention = build(name)
    if hasattr(attention.config, "local") and attention.positive:
        changed = dataclasses.replace(attention.config, local="chunk")
        attention = build_attention(
            changed, num_heads=HEADS, head_dim=WIDTH, max_sequence_length=8192, seed=11
        )
        for key, parameter in attention.named_parameters():
            if "far" in key:
                parameter.data.fill_(-0.7)
    return attention


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


def relative_rms(x: Tensor, reference: Tensor) -> float:
    """Return ‖x − reference‖/‖reference‖."""
    return float((x.double() - reference).norm() / reference.norm())


def test_every_mechanism_has_a_yaml_of_its_name_and_every_yaml_a_mechanism():
    assert {config.mechanism or config.name for config in OPTIONS.values()} == set(
        load_mechanisms()
    )
    assert all(config.name == name for name, config in OPTIONS.items())
    assert set(load_mechanisms()) <= set(NAMES)


@pytest.mark.parametrize(
    "name", [*NAMES, *(pytest.param(name, marks=pytest.mark.slow) for name in ON_TORCH)]
)
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

    @pytest.mark.parametrize("causal", [True, False])
    @pytest.mark.parametrize("batch", [1, 3])
    def test_left_padding_equals_no_padding(self, name, batch, causal):
        attention = build(name)
        length = 2 * CHUNK + 30
        q, k, v = heads(batch, length, dtype=torch.float32)
        for padding in (0, 3, 7):
            mask = torch.arange(length).expand(batch, -1) >= padding
            y, _ = attention(q, k, v, causal=causal, mask=mask)
            alone, _ = attention(*(x[:, :, padding:] for x in (q, k, v)), causal=causal)
            assert_close(attention, y[:, :, padding:], alone)
            assert bool(y.isfinite().all())

    @pytest.mark.parametrize("padding", [0, 3, 7])
    def test_left_padding_in_prefill_and_cached_steps(self, name, padding):
        attention = build(name)
        q, k, v = heads(3, 40, dtype=torch.float32)
        mask = torch.arange(40) >= torch.tensor([padding, 0, 2])[:, None]
        state = attention.init_state(3)
        y, state = attention(*(x[:, :, :30] for x in (q, k, v)), mask=mask[:, :30], state=state)
        parts = [y]
        for t in range(30, 40):
            y, state = attention(*(x[:, :, t : t + 1] for x in (q, k, v)), state=state)
            parts.append(y)
        together = torch.cat(parts, dim=2)
        for row, start in enumerate((padding, 0, 2)):
            alone, _ = attention(*(x[row : row + 1, :, start:] for x in (q, k, v)))
            assert_close(attention, together[row : row + 1, :, start:], alone)

    def test_segments_of_padding_alone_count_nothing(self, name):
        """Before the first token, between documents and inside one, beside a row of tokens."""
        attention = with_stretches(name)
        mask = torch.ones(2, 150, dtype=torch.bool)
        mask[0, :13] = mask[0, 20:30] = mask[0, 100:110] = False
        ids = (torch.arange(150) // 100).expand(2, -1)
        real = mask[:, None, :, None]
        for dtype in (torch.float32, torch.float64):
            q, k, v = heads(2, 150, dtype=dtype)
            for documents in (None, ids):
                whole, _ = attention(q, k, v, mask=mask, document_ids=documents)
                state, parts = attention.init_state(2), []
                for start, stop in pairwise([0, 1, 9, 13, 14, 20, 25, 30, 100, 110, 150]):
                    span = slice(start, stop)
                    y, state = attention(
                        *(x[:, :, span] for x in (q, k, v)),
                        mask=mask[:, span],
                        document_ids=None if documents is None else documents[:, span],
                        state=state,
                    )
                    parts.append(y)
                counts = [117, 150] if documents is None else [40, 50]
                assert state.place.position_B.tolist() == counts
                together = torch.cat(parts, 2)
                assert bool(together.isfinite().all())
                assert_close(attention, together * real, whole * real)
            alone, _ = attention(*(x[:1, :, 13:20] for x in (q, k, v)))
            assert_close(attention, together[:1, :, 13:20], alone)

    @pytest.mark.parametrize("causal", [True, False])
    def test_packed_documents_equal_each_alone(self, name, causal):
        attention = build(name)
        # cuts inside a chunk, at its end, a document longer than a chunk, one of a single token
        bounds = [0, 5, CHUNK, CHUNK + 1, 2 * CHUNK + 41, 300]
        lengths = torch.tensor(bounds).diff()
        ids = torch.repeat_interleave(torch.arange(len(lengths)), lengths)[None].expand(2, -1)
        weight = heads(2, 300, seed=1, dtype=torch.float32)[0]
        q, k, v = (x.requires_grad_() for x in heads(2, 300, dtype=torch.float32))
        y, _ = attention(q, k, v, causal=causal, document_ids=ids)
        gradients = torch.autograd.grad((y * weight).sum(), (q, k, v))
        for start, stop in pairwise(bounds):
            part = [x[:, :, start:stop].detach().requires_grad_() for x in (q, k, v)]
            alone, _ = attention(*part, causal=causal)
            assert_close(attention, y[:, :, start:stop], alone)
            wanted = torch.autograd.grad((alone * weight[:, :, start:stop]).sum(), part)
            for ours, reference in zip(gradients, wanted, strict=True):
                assert_close(attention, ours[:, :, start:stop], reference, 1e-4)

    def test_packed_documents_across_a_state(self, name):
        attention = build(name)
        q, k, v = heads(1, 50, dtype=torch.float32)
        ids = torch.repeat_interleave(torch.arange(3), torch.tensor([20, 15, 15]))[None]
        whole, _ = attention(q, k, v, document_ids=ids)
        for cut in (10, 20, 28):
            state, parts = attention.init_state(1), []
            for span in (slice(0, cut), slice(cut, 50)):
                y, state = attention(
                    *(x[:, :, span] for x in (q, k, v)), document_ids=ids[:, span], state=state
                )
                parts.append(y)
            assert_close(attention, torch.cat(parts, 2), whole)

    def test_tokens_without_ids_are_of_the_document_before_them_or_of_0(self, name):
        attention = build(name)
        for dtype in (torch.float32, torch.float64):
            q, k, v = heads(2, 50, dtype=dtype)
            ids = torch.repeat_interleave(torch.tensor([0, 4]), torch.tensor([30, 20]))
            ids = ids.expand(2, -1)
            whole, _ = attention(q, k, v, document_ids=ids)
            for named in ((False, True), (True, False, True)):
                bounds = [0, 12, 50] if len(named) == 2 else [0, 6, 25, 50]
                state, parts = attention.init_state(2), []
                for (start, stop), has_ids in zip(pairwise(bounds), named, strict=True):
                    y, state = attention(
                        *(x[:, :, start:stop] for x in (q, k, v)),
                        document_ids=ids[:, start:stop] if has_ids else None,
                        state=state,
                    )
                    parts.append(y)
                assert_close(attention, torch.cat(parts, 2), whole)

    def test_whole_numbers_of_any_width_name_documents(self, name):
        attention = build(name)
        mask = torch.arange(50).expand(2, -1) != 7
        ids = (torch.arange(50) // torch.tensor([[11], [30]])).contiguous()
        for dtype in (torch.float32, torch.float64):
            q, k, v = heads(2, 50, dtype=dtype)
            found = []
            for width in (torch.int64, torch.int32, torch.uint8):
                first, state = attention(
                    *(x[:, :, :20] for x in (q, k, v)),
                    mask=mask[:, :20],
                    document_ids=ids[:, :20].to(width),
                    state=attention.init_state(2),
                )
                rest = (x[:, :, 20:] for x in (q, k, v))
                second, _ = attention(*rest, document_ids=ids[:, 20:].to(width), state=state)
                found.append(torch.cat([first, second], dim=2))
            assert all(torch.equal(y, found[0]) for y in found)

    def test_padding_among_documents_across_a_state(self, name):
        """Padding belongs to what came before it, also where a piece begins with it."""
        attention = build(name)
        q, k, v = heads(2, 50, dtype=torch.float32)
        # cuts in padding and at its ends: before a document, within it, and after it
        mask = torch.ones(2, 50, dtype=torch.bool)
        mask[0, 12:17] = mask[0, 20:24] = mask[1, :3] = mask[1, 33:37] = False
        ids = torch.repeat_interleave(torch.arange(3), torch.tensor([17, 13, 20]))[None]
        ids = ids.expand(2, -1)
        whole, _ = attention(q, k, v, mask=mask, document_ids=ids)
        real = mask[:, None, :, None]
        for cuts in ([0, 2, 3, 12, 13, 16, 17, 20, 22, 33, 34, 36, 37, 50], [0, 5, 50]):
            state, parts = attention.init_state(2), []
            for start, stop in pairwise(cuts):
                span = slice(start, stop)
                y, state = attention(
                    *(x[:, :, span] for x in (q, k, v)),
                    mask=mask[:, span],
                    document_ids=ids[:, span],
                    state=state,
                )
                parts.append(y)
            assert_close(attention, torch.cat(parts, 2) * real, whole * real)

    def test_the_guard_counts_what_a_token_sees_and_tokens_alone(self, name):
        """From all sides: one floor for every token of a document, padding nobody."""
        attention = build(name)
        if not getattr(attention, "guard_floor", 0.0):
            pytest.skip("no normaliser of it can be negative")
        mask = torch.ones(2, 90, dtype=torch.bool)
        mask[0, :20] = mask[1, 60:] = mask[1, 5:9] = False
        ids = (torch.arange(90) // 50).expand(2, -1)
        options: dict[str, Any] = {"causal": False, "mask": mask, "document_ids": ids}
        for dtype in (torch.float32, torch.float64):
            q, k, v = heads(2, 90, dtype=dtype)
            y, _ = attention(q, k, v, **options)
            own = (y == v).all(-1)
            share = own.transpose(1, 2)[mask].to(dtype).mean()
            assert 0 < share < 1
            torch.testing.assert_close(attention.guarded_share, share.float())
            # the same tokens in another order inside each document
            order = torch.cat([torch.randperm(50), 50 + torch.randperm(40)])
            options = {**options, "mask": mask[:, order]}
            other, _ = attention(*(x[:, :, order] for x in (q, k, v)), **options)
            kept = options["mask"][:, None, :, None]
            assert_close(attention, other * kept, y[:, :, order] * kept)
            options = {**options, "mask": mask}

    def test_any_inputs_alone_have_the_gradients_they_have_among_all(self, name):
        attention = build(name)
        if isinstance(attention, LinearAttention):
            attention.chunk = 4
        parameters = list(attention.parameters())
        for dtype in (torch.float32, torch.float64):
            _, state = attention(*heads(1, 9, dtype=dtype), state=attention.init_state(1))
            state = map_tensors(state, lambda x: x.detach())
            of_state = [x for x in tensors_of(state) if x.is_floating_point() and x.numel()]
            q, k, v = heads(1, 11, dtype=dtype)
            groups = [[q], [k], [v], of_state, parameters]
            whole: list[Any] = []
            for chosen in [range(5), *((i,) for i in range(5)), (2, 3), (0, 4), (1, 3)]:
                for number, group in enumerate(groups):
                    for x in group:
                        x.requires_grad_(number in chosen)
                sources = [x for i in chosen for x in groups[i]]
                if not sources:
                    continue
                y, after = attention(q, k, v, state=state)
                total = y.square().sum() + sum(
                    x.double().square().mean() for x in tensors_of(after) if x.requires_grad
                )
                found = iter(torch.autograd.grad(total, sources, materialize_grads=True))
                gradients = [[next(found) for _ in groups[i]] for i in chosen]
                whole = whole or gradients
                for i, ours in zip(chosen, gradients, strict=True):
                    for one, other in zip(ours, whole[i], strict=True):
                        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)

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

    def test_causal_state_is_refused_without_causality(self, name):
        attention = build(name)
        q, k, v = heads(1, 3)
        with pytest.raises(ValueError, match="causal"):
            attention(q, k, v, causal=False, state=attention.init_state(1))

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
