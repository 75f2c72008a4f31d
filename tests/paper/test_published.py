"""The published values agree with one another where they must."""

from __future__ import annotations

import math

import pytest

from slayformer.paper.ablation import LABELS
from slayformer.paper.published import (
    TABLE_2,
    TABLE_4,
    TABLE_5,
    TABLE_6,
    TABLE_7,
    TABLE_8,
    TABLE_8_MECHANISMS,
)
from slayformer.presets import preset_names


def test_losses_and_perplexities() -> None:
    for row in TABLE_5.values():
        assert math.exp(row.loss) == pytest.approx(row.perplexity, rel=2e-3)
    mechanisms = {*TABLE_5, *TABLE_4, *TABLE_8_MECHANISMS}
    assert mechanisms <= set(preset_names())


def test_tasks() -> None:
    tasks = [task for names, _ in TABLE_7.values() for task in names]
    assert len(tasks) == 22
    assert sorted(tasks) == sorted(TABLE_8)
    empty = [task for task, row in TABLE_8.items() if len(row) != len(TABLE_8_MECHANISMS)]
    assert empty == ["bigram"]


def test_ablation() -> None:
    assert {*TABLE_2, *TABLE_6} <= set(LABELS)
    assert all(len(row) == 3 for row in TABLE_6.values())
