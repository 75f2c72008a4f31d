"""Every mechanism gives a document what it has alone, padded or packed, at once or in pieces."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import pytest
import torch

from slayformer.attention.base import Attention
from slayformer.attention.linear import CHUNK
from slayformer.registry import build_attention
from tests.attention.contract import HEADS, WIDTH, assert_close, build, every_mechanism, heads


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


@every_mechanism
class TestContract:
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
