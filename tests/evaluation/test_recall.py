"""Associative recall: the task by its definition, its errors, and a run from end to end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from slayformer.attention.base import generator
from slayformer.cli import compose
from slayformer.config import ModelConfig
from slayformer.config_commands import RecallConfig
from slayformer.config_loading import load_config
from slayformer.errors import ConfigError
from slayformer.evaluation.recall import draw_batch, run
from slayformer.training.budget import parameter_counts
from slayformer.training.objective import IGNORE_INDEX


def config(*overrides: str) -> RecallConfig:
    return load_config(compose("recall", list(overrides)), RecallConfig)


@pytest.mark.parametrize(("pairs", "keys"), [(1, 1), (3, 7), (64, 64)])
def test_every_key_is_told_once_and_asked_once(pairs: int, keys: int) -> None:
    ids, targets = draw_batch(pairs, 5, keys=keys, values=9, draws=generator(1))
    assert ids.shape == targets.shape == (5, 4 * pairs)
    for row, wanted in zip(ids.tolist(), targets.tolist(), strict=True):
        told = dict(zip(row[: 2 * pairs : 2], row[1 : 2 * pairs : 2], strict=True))
        assert len(told) == pairs
        assert all(0 <= key < keys <= value < keys + 9 for key, value in told.items())
        asked = row[2 * pairs :: 2]
        assert sorted(asked) == sorted(told)
        assert row[2 * pairs + 1 :: 2] == wanted[2 * pairs :: 2] == [told[key] for key in asked]
        others = wanted[: 2 * pairs] + wanted[2 * pairs + 1 :: 2]
        assert set(others) == {IGNORE_INDEX}


def test_batches_follow_from_the_draws_alone() -> None:
    first, again, other = (
        draw_batch(8, 4, keys=16, values=16, draws=generator(seed))[0] for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["pairs=[65]", "model.context_length=512"], "pairs=65: .*at most keys=64"),
        (["model.context_length=128"], "pairs=64: .* take 256 tokens"),
        (["pairs=[]"], r"pairs=\[\]: name at least one"),
        (["pairs=[4,0]"], r"pairs=\[4, 0\]: .* above 0"),
        (["tokens_per_update=100"], "tokens_per_update=100: .* takes 256 tokens"),
        (["updates=20"], "schedule.warmup_updates=50"),
        (["model.heads=3"], "model.heads=3: must divide"),
    ],
)
def test_sizes_that_cannot_work_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(config(*overrides))


def test_a_model_learns_to_recall(tmp_path: Path) -> None:
    # one pair: its value was just named, so a few updates are enough
    summary = run(
        config(
            *("attention=softmax", "pairs=[1]", "keys=4", "values=4", "model.context_length=4"),
            *("updates=150", "tokens_per_update=256", "evaluation_samples=500"),
            *("schedule.warmup_updates=10", f"run_directory={tmp_path}"),
        )
    )
    assert summary["accuracy"] == {"1": 1.0}
    # by hand, without the rows that fill the vocabulary of 8 up to 64
    shape = ModelConfig(**summary["config"]["model"])
    convolutions = shape.layers * 3 * shape.width * shape.short_convolution
    assert summary["parameters"] == parameter_counts(shape, 8).total + convolutions
    assert summary == json.loads((tmp_path / "summary.json").read_text())
    losses = [json.loads(line)["loss"] for line in (tmp_path / "metrics.jsonl").open()]
    assert len(losses) == 150
    # ln 8 before anything is learned: four keys and four values
    assert losses[0] == pytest.approx(2.079, abs=0.1)
    assert losses[-1] < 0.1
