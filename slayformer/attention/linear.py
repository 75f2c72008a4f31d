"""The one normalised linear attention: parallel, chunked and recurrent, in one place.

y_t = Σ_{s≤t} φ(q_t)·φ(k_s) v_s / (Σ_{s≤t} φ(q_t)·φ(k_s) + δ)   (paper, section 2.5)

The state is Σ φ(k) [v, 1]ᵀ, of shape [M, E + 1], whatever the length. A mechanism may score near
pairs by an exact kernel instead (`local`): pairs in the same stretch of `local_size` positions
(`chunk`), or less than `local_size` positions apart (`window`). It then also remembers the last
`local_size` keys and values.

Shape suffixes: B batch, H heads, T positions, D width of q and k, E width of v, M features,
W remembered keys, N = E + 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from slayformer.attention.backends import attend
from slayformer.attention.base import (
    Attention,
    accumulation_dtype,
    following_positions,
    place_after,
    real_document_ids,
    token_positions,
    without_autocast,
)
from slayformer.attention.features import Features
from slayformer.attention.fixed import Fixed, Prepared
from slayformer.attention.linear_state import LinearState, Shape, no_room
from slayformer.attention.near import NearKernel
from slayformer.attention.padding import documents_in_order, in_order, padding_first
from slayformer.attention.projection import Projection
from slayformer.attention.walk import Keys, Walk

CHUNK = 128
# where near pairs make up the chunk, far ones in it cost more than they save
ALIGNED_CHUNK = 64


class LinearAttention(Attention):
    """Base of every linear mechanism: a subclass gives a feature map and its sizes.

    Chunking, decoding, padding, documents and the non-causal form come from here.
    """

    backends = ("auto", "torch", "cpu", "triton")
    # added to the normaliser
    delta: float
    # M, and the summed widths of the factors whose scores are multiplied inside a chunk
    feature_count: int
    score_width: int
    chunk: int = CHUNK
    # `none`, `chunk` or `window`: which pairs `near_kernel` decides, and how far they reach
    local: str = "none"
    local_size: int = 0
    # least normaliser per visible key of a signed map; 0: no guard
    guard_floor: float = 0.0
    # share of the last call's real tokens' rows that the guard replaced
    guarded_share: Tensor | None = None

    def __init__(self, config: Any, **sizes: Any) -> None:
        super().__init__(config, **sizes)
        self._fixed = Fixed()

    def feature_tensors(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return every tensor the feature map and the near scores read, once per forward pass.

        Parameters reach the recomputing backward pass only through here.
        """
        return ()

    def feature_map(
        self, x_BHTD: Tensor, *tensors: Tensor, is_query: bool, positions: Tensor
    ) -> Features:
        """Return φ(x) for `tensors` as `feature_tensors` gave them; `positions` is [B, T]."""
        raise NotImplementedError

    def projection(self, *tensors: Tensor) -> Projection | None:
        """Return the map and the near kernel as activations of one product, if they are that."""
        return None

    def near_kernel(self, q_BHTD: Tensor, k_BHSD: Tensor, *tensors: Tensor) -> NearKernel:
        """Return the exact kernel of near pairs; only with `local` set."""
        raise NotImplementedError

    def near_scores(self, q_BHTD: Tensor, k_BHSD: Tensor, *tensors: Tensor) -> Tensor:
        """Return the exact scores of near pairs, [B, H, T, S]."""
        return self.near_kernel(q_BHTD, k_BHSD, *tensors).scores()

    def normaliser_offset(self, dtype: torch.dtype) -> Tensor | float:
        """Return what is added to the normaliser: δ, on the scale of the features."""
        return self.delta

    def _prepared(self, dtype: torch.dtype) -> Prepared:
        """Return what a call needs of the mechanism's own tensors; of fixed ones it is kept."""

        def prepare() -> Prepared:
            offset = self.normaliser_offset(dtype)
            return Prepared(self.feature_tensors(dtype), offset, self.projection)

        return self._fixed(self, dtype, prepare)

    def feature_flops(self) -> int:
        """Return the FLOPs of one vector's features in one head."""
        raise NotImplementedError

    def init_state(
        self, batch_size: int, device: torch.device | str = "cpu", value_dim: int | None = None
    ) -> LinearState:
        """Return the state before the first token, for v of width `value_dim` (None: D)."""
        return self._first_state(batch_size, device, value_dim or self.head_dim, torch.zeros)

    def _first_state(
        self,
        batch_size: int,
        device: torch.device | str,
        value_dim: int,
        zeros: Callable[..., Tensor],
    ) -> LinearState:
        """Return the state before the first token, its large tensors made by `zeros`."""
        shape = Shape(
            batch_size,
            self.num_heads,
            self.feature_count,
            self.local_size,
            self.head_dim,
            value_dim,
        )
        return LinearState.first(shape, device, zeros)

    def flops_per_token(self, sequence_length: int) -> int:
        """Return features of q and k, scores one by one, the state read and written."""
        walked = sequence_length > 2 * self.chunk
        met = (self.chunk if walked else sequence_length) / 2 + self.local_size
        pair = 2 * (self.score_width + self.head_dim + 1)
        if self.local != "none":
            pair += 2 * self.head_dim
        state = 4 * self.feature_count * (self.head_dim + 1) if walked else 0
        return round(self.num_heads * (2 * self.feature_flops() + met * pair + state))

    def state_bytes(self, sequence_length: int) -> int:
        """Return the bytes of the state: features × (E + 1) and the remembered keys and values."""
        width = self.feature_count * (self.head_dim + 1) + self.local_size * 2 * self.head_dim
        return 4 * self.num_heads * width

    def forward(
        self,
        q_BHTD: Tensor,
        k_BHTD: Tensor,
        v_BHTE: Tensor,
        *,
        causal: bool = True,
        mask: Tensor | None = None,
        document_ids: Tensor | None = None,
        state: LinearState | None = None,
    ) -> tuple[Tensor, LinearState | None]:
        """See `Attention.forward`."""
        if state is not None and not causal:
            raise ValueError("a state carries the past of causal attention; pass causal=True")
        batch_size, _, length, _ = q_BHTD.shape
        before = state
        if before is None:
            zeros = no_room(q_BHTD.device)
            before = self._first_state(batch_size, q_BHTD.device, v_BHTE.shape[-1], zeros)
        documents = real_document_ids(mask, document_ids, before.place.document_B)
        if self.local_size and documents is None and state is not None:
            # the remembered keys may be of another document than the new ones
            documents = before.place.document_B[:, None].expand(-1, length)
        if mask is None and document_ids is None:
            positions = following_positions(length, before.place)
        else:
            positions = token_positions(_real(mask, q_BHTD), documents, before.place)
        with without_autocast(q_BHTD.device.type):
            prepared = self._prepared(accumulation_dtype(q_BHTD.dtype))
            offset = prepared.offset
            continues = state is not None
            whole = causal and self.guard_floor == 0
            result, after = self._walk(
                q_BHTD,
                k_BHTD,
                v_BHTE,
                mask,
                documents,
                positions,
                before,
                prepared,
                continues,
                offset=offset if whole else None,
            )
            if whole:
                return result, after if continues else None
            sums_BHTN, visible_BT = result, positions + 1
            if not causal:
                # the keys after each query: the strict walk over the reversed sequence
                q, k, v = (x.flip(2) for x in (q_BHTD, k_BHTD, v_BHTE))
                turned_mask, turned = (None if x is None else x.flip(1) for x in (mask, documents))
                later_BT = token_positions(_real(turned_mask, q), turned, before.place).flip(1)
                visible_BT = visible_BT + later_BT
                later_BHTN, _ = self._walk(
                    q,
                    k,
                    v,
                    turned_mask,
                    turned,
                    positions.flip(1),
                    before,
                    prepared,
                    False,
                    strict=True,
                )
                sums_BHTN = sums_BHTN + later_BHTN.flip(2)
            normaliser_BHT1 = sums_BHTN[..., -1:] + offset
            if self.guard_floor > 0:
                real_BT = _real(mask, q_BHTD)
                y_BHTE = self._guarded(sums_BHTN, normaliser_BHT1, v_BHTE, visible_BT, real_BT)
            else:
                y_BHTE = sums_BHTN[..., :-1] / normaliser_BHT1
        return y_BHTE.to(v_BHTE.dtype), after if continues else None

    def _guarded(
        self,
        sums_BHTN: Tensor,
        normaliser_BHT1: Tensor,
        v_BHTE: Tensor,
        visible_BT: Tensor,
        real_BT: Tensor,
    ) -> Tensor:
        """Return the quotient where the normaliser is above its floor, else the token's own v.

        The floor is `guard_floor` times the number of visible keys.
        """
        sound = normaliser_BHT1 > self.guard_floor * visible_BT[:, None, :, None]
        share_BT = (~sound).float().mean(dim=(1, 3))
        self.guarded_share = (share_BT * real_BT).sum() / real_BT.sum().clamp_min(1)
        quotient = sums_BHTN[..., :-1] / torch.where(sound, normaliser_BHT1, 1.0)
        return torch.where(sound, quotient, v_BHTE.to(quotient.dtype))

    def is_near(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        """Return which pairs of positions in one document `near_kernel` decides."""
        if self.local == "chunk":
            return query_positions // self.local_size == key_positions // self.local_size
        return (query_positions - key_positions).abs() < self.local_size

    def _walk(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        documents: Tensor | None,
        positions: Tensor,
        before: LinearState,
        prepared: Prepared,
        continues: bool,
        strict: bool = False,
        offset: Tensor | float | None = None,
    ) -> tuple[Tensor, LinearState]:
        """Return Σ score [v, 1] of every query and the state after the last token.

        With `offset` the first is Σ score v / (Σ score + offset) instead, in the dtype of v.
        """
        length = q.shape[2]
        recent = before.recent
        keys = Keys(positions, mask, documents)
        # from the start of one whole sequence the walk's chunks can be those of the near pairs, or
        # several of them where they are short
        aligned = self.local == "chunk" and not (continues or strict)
        aligned = aligned and mask is None and documents is None
        lag = 0 if aligned else self.local_size
        chunk = self.chunk
        if aligned:
            chunk = self.local_size * max(1, ALIGNED_CHUNK // self.local_size)
        if lag:
            real = torch.ones_like(positions, dtype=torch.bool) if mask is None else mask
            if continues:
                k = torch.cat([recent.k_BHWD.to(k.dtype), k], dim=2)
                v = torch.cat([recent.v_BHWE.to(v.dtype), v], dim=2)
            keys = Keys(
                torch.cat([recent.position_BW, positions], dim=1),
                torch.cat([recent.mask_BW, real], dim=1),
                None if documents is None else torch.cat([recent.document_BW, documents], dim=1),
            )
        walked_positions, walked_documents, order = positions, documents, None
        if lag and mask is not None:
            # the lag counts places, and padding is none: its place is before all, where it counts
            # to the document in the state
            assert keys.mask_BS is not None
            order, key_order = padding_first(mask), padding_first(keys.mask_BS)
            of_kv = key_order if continues else order
            q, k, v = in_order(q, order, 2), in_order(k, of_kv, 2), in_order(v, of_kv, 2)
            of_padding = before.memory_document_B
            walked_positions = in_order(positions, order, 1)
            walked_documents = documents_in_order(documents, mask, order, of_padding)
            keys = Keys(
                in_order(keys.positions_BS, key_order, 1),
                in_order(keys.mask_BS, key_order, 1),
                documents_in_order(keys.documents_BS, keys.mask_BS, key_order, of_padding),
            )
        walk = Walk(
            feature_map=self.feature_map,
            projection=prepared.projection,
            near=self.near_kernel if self.local_size else None,
            is_near=self.is_near if lag or (aligned and chunk > self.local_size) else None,
            local=self.local,
            local_size=self.local_size,
            positions_BT=walked_positions,
            documents_BT=walked_documents,
            keys=keys,
            first_document_B=before.memory_document_B,
            lag=lag,
            strict=strict,
            has_past=continues,
            has_future=continues,
            length=length,
            # scores of one larger chunk cost less than a second one's trip through the state
            chunk=chunk if aligned or length > 2 * chunk else length,
        )
        memory = before.memory_BHMN.to(accumulation_dtype(q.dtype))
        result, memory = attend(
            self.config.backend, walk, q, k, v, memory, prepared.tensors, offset
        )
        if order is not None:
            result = in_order(result, order.argsort(dim=1), 2)
        if not continues:
            return result, before
        place = place_after(before.place, positions, documents)
        return result, before.after(memory, place, k, v, keys)


def _real(mask_BT: Tensor | None, q_BHTD: Tensor) -> Tensor:
    """Return which of the tokens of `q_BHTD` are real, [B, T]: without a mask all."""
    if mask_BT is not None:
        return mask_BT
    return torch.ones_like(q_BHTD[:, 0, :, 0], dtype=torch.bool)
