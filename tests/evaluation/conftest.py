"""A small trained run that the tests of evaluation share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory, run_command: Any, text_folder: Path) -> Path:
    """Return the folder of a finished run: bytes tokenizer, context of 32 tokens, `slay`."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    finished = run_command(
        [
            "train.py",
            *("attention=slay", "tokenizer=bytes", "data=text"),
            f"data.source.path={text_folder}",
            f"data.cache_directory={folder.parent / 'cache'}",
            "data.validation_fraction=0.3",
            *("model.layers=1", "model.heads=2", "model.width=16", "model.context_length=32"),
            *("budget=updates", "budget.updates=25", "validation.tokens=2000"),
            f"run_directory={folder}",
        ]
    )
    assert finished.code == 0, finished.stderr
    return folder
