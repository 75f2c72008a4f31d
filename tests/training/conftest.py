"""Small configurations, composed as the command line composes them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from slayformer.cli import compose
from slayformer.config import TrainConfig
from slayformer.config_loading import load_config

TrainConfigs = Callable[..., TrainConfig]

TINY = [
    *("tokenizer=bytes", "data=text", "data.validation_fraction=0.3"),
    *("model.layers=2", "model.heads=2", "model.width=32", "model.context_length=16"),
    *("batch.samples_per_update=8", "batch.micro_samples=4"),
    *("budget=updates", "budget.updates=4", "schedule.warmup_updates=2"),
    *("validation.tokens=160", "logging.every_updates=1", "logging.sample_tokens=4"),
]


@pytest.fixture(scope="session")
def train_config(text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainConfigs:
    """Return `make(*overrides)`: a tiny run on the shared documents, not to be changed."""
    cache = tmp_path_factory.mktemp("cache")

    @functools.cache
    def make(*overrides: str) -> TrainConfig:
        here = [f"data.source.path={text_folder}", f"data.cache_directory={cache}"]
        return load_config(compose("train", [*TINY, *here, *overrides]))

    return make
