"""What a linear mechanism remembers of a sequence.

Shape suffixes: B batch, H heads, T positions, D width of q and k, E width of v, M features,
W remembered keys, S = W + T, N = E + 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from slayformer.attention.base import Place
from slayformer.attention.walk import Keys


@dataclass(frozen=True)
class RecentKeys:
    """The last W keys, which have not entered the state yet; slots not filled are masked out."""

    k_BHWD: Tensor
    v_BHWE: Tensor
    mask_BW: Tensor
    document_BW: Tensor
    position_BW: Tensor


@dataclass(frozen=True)
class Shape:
    """The sizes of a state: W remembered keys, D the width of k, E that of v."""

    batch: int
    heads: int
    features: int
    remembered: int
    key_width: int
    value_width: int


@dataclass(frozen=True)
class LinearState:
    """Everything a linear mechanism remembers; its size does not depend on the length."""

    # Σ φ(k) [v, 1]ᵀ over one document, fp32, and that document's id
    memory_BHMN: Tensor
    memory_document_B: Tensor
    place: Place
    recent: RecentKeys

    @staticmethod
    def first(
        shape: Shape, device: torch.device | str, zeros: Callable[..., Tensor]
    ) -> LinearState:
        """Return the state before the first token, its large tensors made by `zeros`."""
        rows = (shape.batch, shape.heads)
        slots = torch.zeros(shape.batch, shape.remembered, dtype=torch.long, device=device)
        place = Place.start(shape.batch, device)
        return LinearState(
            memory_BHMN=zeros((*rows, shape.features, shape.value_width + 1), device=device),
            memory_document_B=place.document_B,
            place=place,
            recent=RecentKeys(
                k_BHWD=zeros((*rows, shape.remembered, shape.key_width), device=device),
                v_BHWE=zeros((*rows, shape.remembered, shape.value_width), device=device),
                mask_BW=slots.bool(),
                document_BW=slots - 1,
                position_BW=slots,
            ),
        )

    def after(
        self, memory_BHMN: Tensor, place: Place, k_BHSD: Tensor, v_BHSE: Tensor, keys: Keys
    ) -> LinearState:
        """Return the state after a walk over `k` and `v`, the remembered ones before them."""
        remembered = self.recent.mask_BW.shape[1]
        length = keys.positions_BS.shape[1] - remembered
        memory_document = self.memory_document_B
        if keys.documents_BS is not None:
            memory_document = keys.documents_BS[:, length - 1]
        recent = self.recent
        if remembered:
            assert keys.mask_BS is not None
            kept = slice(length, None)
            recent = RecentKeys(
                # copies, or the state of a prompt would keep all of its keys and values alive
                k_BHWD=k_BHSD[:, :, kept].clone(),
                v_BHWE=v_BHSE[:, :, kept].clone(),
                mask_BW=keys.mask_BS[:, kept],
                document_BW=recent.document_BW
                if keys.documents_BS is None
                else keys.documents_BS[:, kept],
                position_BW=keys.positions_BS[:, kept],
            )
        return LinearState(memory_BHMN, memory_document, place, recent)


def no_room(device: torch.device | str) -> Callable[..., Tensor]:
    """Return what makes zeros that take no room and are only read."""
    zero = torch.zeros((), device=device)
    return lambda shape, device: zero.expand(shape)
