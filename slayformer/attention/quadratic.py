"""The one attention over explicit pairs: exact kernels, softmax-like scores, baselines.

`kernel` normalisation: y_t = Σ k(q_t, k_s) v_s / Σ k(q_t, k_s). `softmax` normalisation puts a
softmax over the scores. Queries go in blocks whose rows are recomputed in the backward pass, so
memory grows with T × block, not T².

Shape suffixes: B batch, H heads, T query positions, S key positions (past and present),
D width of q and k, E width of v.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from slayformer.attention.base import (
    Attention,
    Place,
    accumulation_dtype,
    place_after,
    real_document_ids,
    token_positions,
    without_autocast,
)

QUERY_BLOCK = 256
# keeps 0/0 finite where every kernel value is zero; far below any sum that means something
TINY = 1e-20


@dataclass(frozen=True)
class KeyValueState:
    """Keys and values of every token so far; grows with the length."""

    k_BHSD: Tensor
    v_BHSE: Tensor
    mask_BS: Tensor
    document_BS: Tensor
    position_BS: Tensor
    place: Place


@dataclass(frozen=True)
class Context:
    """The keys a call attends to, and which of them each query may see."""

    k_BHSD: Tensor
    v_BHSE: Tensor
    # [B, 1, T, S] or [T, S]; True where the query sees the key; every query sees itself
    visible: Tensor | None
    query_positions_BT: Tensor
    key_positions_BS: Tensor
    state: KeyValueState | None


def gather_context(
    k_BHTD: Tensor,
    v_BHTE: Tensor,
    *,
    causal: bool,
    mask: Tensor | None,
    document_ids: Tensor | None,
    state: KeyValueState | None,
) -> Context:
    """Append the new keys to `state` and work out what each query sees (None: everything)."""
    if state is not None and not causal:
        raise ValueError("a state carries the past of causal attention; pass causal=True")
    batch_size, _, length, _ = k_BHTD.shape
    device = k_BHTD.device
    place = Place.start(batch_size, device) if state is None else state.place
    documents = real_document_ids(mask, document_ids, place.document_B)
    real = torch.ones(batch_size, length, dtype=torch.bool, device=device) if mask is None else mask
    positions = key_positions = token_positions(real, documents, place)
    past = 0
    if state is not None:
        past = state.k_BHSD.shape[2]
        if documents is None:
            # without ids the new tokens belong to the document that was current before them
            documents = place.document_B[:, None].expand(-1, length)
        key_positions = torch.cat([state.position_BS, positions], dim=1)
        state = KeyValueState(
            torch.cat([state.k_BHSD.to(k_BHTD.dtype), k_BHTD], dim=2),
            torch.cat([state.v_BHSE.to(v_BHTE.dtype), v_BHTE], dim=2),
            torch.cat([state.mask_BS, real], dim=1),
            torch.cat([state.document_BS, documents], dim=1),
            key_positions,
            place_after(place, positions, documents),
        )
        k_BHTD, v_BHTE = state.k_BHSD, state.v_BHSE
        mask, documents = state.mask_BS, state.document_BS
    visible = None
    if causal:
        total = past + length
        visible = torch.ones(length, total, dtype=torch.bool, device=device).tril(past)
    if mask is not None:
        # a padded query sees itself, so that no row is empty
        own = past + torch.arange(length, device=device)[:, None]
        itself = torch.arange(past + length, device=device) == own
        seen = mask[:, None, None, :]
        visible = (seen if visible is None else visible & seen) | itself
    if documents is not None:
        same = documents[:, None, past:, None] == documents[:, None, None, :]
        visible = same if visible is None else visible & same
    return Context(k_BHTD, v_BHTE, visible, positions, key_positions, state)


class QuadraticAttention(Attention):
    """Base of mechanisms over explicit pairs: a subclass gives the scores.

    Under `kernel` normalisation the scores are kernel values ≥ 0.
    """

    normalization: str = "kernel"

    def scores(self, q_BHTD: Tensor, k_BHSD: Tensor) -> Tensor:
        """Return the score of all pairs, [B, H, T, S]."""
        raise NotImplementedError

    def position_scores(self, query_positions: Tensor, key_positions: Tensor) -> Tensor | None:
        """Return what positions [B, T, 1] and [B, 1, S] add to the scores, [B, H, T, S]."""
        return None

    def score_flops(self) -> int:
        """Return the FLOPs of one score."""
        raise NotImplementedError

    def init_state(self, batch_size: int, device: torch.device | str = "cpu") -> KeyValueState:
        """Return the state before the first token: no keys."""
        nothing = torch.zeros(batch_size, self.num_heads, 0, self.head_dim, device=device)
        slots = torch.zeros(batch_size, 0, dtype=torch.long, device=device)
        place = Place.start(batch_size, device)
        return KeyValueState(nothing, nothing, slots.bool(), slots, slots, place)

    def flops_per_token(self, sequence_length: int) -> int:
        """Return scores and weighted values over the mean number of visible keys."""
        keys = (sequence_length + 1) / 2
        return round(self.num_heads * keys * (self.score_flops() + 2 * self.head_dim))

    def state_bytes(self, sequence_length: int) -> int:
        """Return the bytes of every key and value."""
        return 4 * self.num_heads * sequence_length * 2 * self.head_dim

    def forward(
        self,
        q_BHTD: Tensor,
        k_BHTD: Tensor,
        v_BHTE: Tensor,
        *,
        causal: bool = True,
        mask: Tensor | None = None,
        document_ids: Tensor | None = None,
        state: KeyValueState | None = None,
    ) -> tuple[Tensor, KeyValueState | None]:
        """See `Attention.forward`."""
        context = gather_context(
            k_BHTD, v_BHTE, causal=causal, mask=mask, document_ids=document_ids, state=state
        )
        length = q_BHTD.shape[2]
        with without_autocast(q_BHTD.device.type):
            parts = []
            for start in range(0, length, QUERY_BLOCK):
                span = slice(start, start + QUERY_BLOCK)
                if torch.is_grad_enabled() and length > QUERY_BLOCK:
                    part = checkpoint(self._block, q_BHTD, context, span, use_reentrant=False)
                else:
                    part = self._block(q_BHTD, context, span)
                parts.append(part)
            y_BHTE = torch.cat(parts, dim=2)
        return y_BHTE.to(v_BHTE.dtype), context.state

    def _block(self, q_BHTD: Tensor, context: Context, span: slice) -> Tensor:
        """Return the outputs of the queries in `span`."""
        dtype = accumulation_dtype(q_BHTD.dtype)
        k, v = context.k_BHSD.to(dtype), context.v_BHSE.to(dtype)
        scores = self.scores(q_BHTD[:, :, span].to(dtype), k)
        added = self.position_scores(
            context.query_positions_BT[:, span, None], context.key_positions_BS[:, None]
        )
        if added is not None:
            scores = scores + added
        visible = None if context.visible is None else context.visible[..., span, :]
        if self.normalization == "softmax":
            if visible is not None:
                scores = scores.masked_fill(~visible, -torch.inf)
            return scores.softmax(-1) @ v
        if visible is not None:
            scores = scores * visible
        return (scores @ v) / (scores.sum(-1, keepdim=True) + TINY)
