"""Every item, in the paper's order."""

from __future__ import annotations

from slayformer.paper import (
    ablation,
    context_length,
    extreme_classification,
    kernel_curves,
    language_models,
    normalisers,
    plane,
    properties,
    quadrature,
    reconstruction,
    scaling,
    selectivity,
    sphere,
    synthetic_tasks,
    theory,
)
from slayformer.paper.item import Item

ITEMS: tuple[Item, ...] = (
    properties.ITEM,
    ablation.ITEM,
    theory.ITEM,
    plane.ITEM,
    scaling.ITEM,
    context_length.ITEM,
    synthetic_tasks.ITEM,
    extreme_classification.ITEM,
    language_models.ITEM,
    kernel_curves.ITEM,
    normalisers.ITEM,
    quadrature.ITEM,
    reconstruction.ITEM,
    selectivity.ITEM,
    sphere.ITEM,
)
