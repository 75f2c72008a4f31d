"""Every item, in the paper's order."""

from __future__ import annotations

from slayformer.paper import (
    ablation,
    kernel_curves,
    normalisers,
    plane,
    quadrature,
    reconstruction,
    selectivity,
    sphere,
)
from slayformer.paper.item import Item

ITEMS: tuple[Item, ...] = (
    ablation.ITEM,
    plane.ITEM,
    kernel_curves.ITEM,
    normalisers.ITEM,
    quadrature.ITEM,
    reconstruction.ITEM,
    selectivity.ITEM,
    sphere.ITEM,
)
