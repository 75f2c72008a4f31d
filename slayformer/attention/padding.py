"""Padding brought to the front, so that what reaches back a few tokens reaches real ones.

Shape suffixes: B batch, T tokens, … whatever else a tensor has.
"""

from __future__ import annotations

from torch import Tensor


def padding_first(mask_BT: Tensor) -> Tensor:
    """Return the order [B, T] in which padding comes before real tokens, both as they stood."""
    return mask_BT.byte().argsort(dim=1, stable=True)


def in_order(x: Tensor, order_BT: Tensor, dim: int) -> Tensor:
    """Return `x` [B, …, T, …], T its dimension `dim`, with each row's tokens in its order."""
    shape = [1] * x.dim()
    shape[0], shape[dim] = order_BT.shape
    return x.take_along_dim(order_BT.view(shape), dim)


def documents_in_order(
    documents_BT: Tensor | None, mask_BT: Tensor, order_BT: Tensor, of_padding_B: Tensor
) -> Tensor | None:
    """Return the tokens' documents in the given order, `of_padding_B` where there is padding."""
    if documents_BT is None:
        return None
    documents_BT = documents_BT.where(mask_BT, of_padding_B[:, None])
    return in_order(documents_BT, order_BT, 1)
