"""Every item, in the paper's order."""

from __future__ import annotations

from slayformer.paper.item import Item

ITEMS: tuple[Item, ...] = ()
