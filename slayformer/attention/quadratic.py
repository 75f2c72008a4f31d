"""The one kernel-matrix attention, for exact kernels: tests, baselines and short sequences.

y_t = Σ_{s≤t} k(q_t, k_s) v_s / Σ_{s≤t} k(q_t, k_s). Queries go in blocks whose kernel rows are
recomputed in the backward pass, so memory grows with T × block, not T².

Shape suffixes: B batch, H heads, T query positions, S key positions (past and present),
D width of q and k, E width of v.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from slayformer.attention.base import Attention, accumulation_dtype, real_document_ids

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


@dataclass(frozen=True)
class Context:
    """The keys a call attends to, and which of them each query may see."""

    k_BHSD: Tensor
    v_BHSE: Tensor
    # [B, 1, T, S] or [T, S]; True where the query sees the key; every query sees itself
    visible: Tensor | None
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
    documents = real_document_ids(mask, document_ids)
    past = 0
    new_state = None
    if state is not None:
        past = state.k_BHSD.shape[2]
        ones = torch.ones(batch_size, length, dtype=torch.bool, device=device)
        # without ids the new tokens belong to the document that was current before them
        current = state.document_BS[:, -1:] if past else torch.zeros_like(ones[:, :1]).long()
        new_documents = current.expand(-1, length) if documents is None else documents
        new_state = KeyValueState(
            torch.cat([state.k_BHSD.to(k_BHTD.dtype), k_BHTD], dim=2),
            torch.cat([state.v_BHSE.to(v_BHTE.dtype), v_BHTE], dim=2),
            torch.cat([state.mask_BS, ones if mask is None else mask], dim=1),
            torch.cat([state.document_BS, new_documents], dim=1),
        )
        k_BHTD, v_BHTE = new_state.k_BHSD, new_state.v_BHSE
        mask, documents = new_state.mask_BS, new_state.document_BS
    visible = None
    if causal:
        total = past + length
        visible = torch.ones(length, total, dtype=torch.bool, device=device).tril(past)
    if mask is not None:
        # a padded query sees itself, so that no row is empty
        itself = torch.eye(past + length, dtype=torch.bool, device=device)[past:]
        real = mask[:, None, None, :]
        visible = (real if visible is None else visible & real) | itself
    if documents is not None:
        same = documents[:, None, past:, None] == documents[:, None, None, :]
        visible = same if visible is None else visible & same
    return Context(k_BHTD, v_BHTE, visible, new_state)


class QuadraticAttention(Attention):
    """Base of exact mechanisms normalised by the kernel sum: a subclass gives the kernel."""

    def kernel(self, q_BHTD: Tensor, k_BHSD: Tensor) -> Tensor:
        """Return k(q, k) ≥ 0 for all pairs, [B, H, T, S]."""
        raise NotImplementedError

    def kernel_flops(self) -> int:
        """Return the FLOPs of one kernel value."""
        raise NotImplementedError

    def init_state(self, batch_size: int, device: torch.device | str = "cpu") -> KeyValueState:
        """Return the state before the first token: no keys."""
        nothing = torch.zeros(batch_size, self.num_heads, 0, self.head_dim, device=device)
        mask = torch.zeros(batch_size, 0, dtype=torch.bool, device=device)
        return KeyValueState(nothing, nothing, mask, mask.long())

    def flops_per_token(self, sequence_length: int) -> int:
        """Return kernel values and weighted values over the mean number of visible keys."""
        keys = (sequence_length + 1) / 2
        return round(self.num_heads * keys * (self.kernel_flops() + 2 * self.head_dim))

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
        dtype = accumulation_dtype(q_BHTD.dtype)
        k, v = context.k_BHSD.to(dtype), context.v_BHSE.to(dtype)
        with torch.autocast(q_BHTD.device.type, enabled=False):
            parts = []
            for start in range(0, q_BHTD.shape[2], QUERY_BLOCK):
                span = slice(start, start + QUERY_BLOCK)
                q = q_BHTD[:, :, span].to(dtype)
                visible = None if context.visible is None else context.visible[..., span, :]
                if torch.is_grad_enabled() and q_BHTD.shape[2] > QUERY_BLOCK:
                    part = checkpoint(self._block, q, k, v, visible, use_reentrant=False)
                else:
                    part = self._block(q, k, v, visible)
                parts.append(part)
            y_BHTE = torch.cat(parts, dim=2)
        return y_BHTE.to(v_BHTE.dtype), context.state

    def _block(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
        kernel = self.kernel(q, k)
        if visible is not None:
            kernel = kernel * visible
        return (kernel @ v) / (kernel.sum(-1, keepdim=True) + TINY)
