"""engine.compile: the losses of the same run without it, or one line that says what is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

SMALL = [
    *("model.layers=1", "batch.samples_per_update=4", "batch.micro_samples=4"),
    *("budget=updates", "budget.updates=4", "schedule.warmup_updates=1", "validation.tokens=64"),
    *("validation.every_updates=0", "engine.zero_stage=1"),
]


def test_compiled_blocks_give_the_same_losses(
    run_command: Any, tiny: list[str], metrics: Any, tmp_path: Path
) -> None:
    for compiled in ("false", "true"):
        run = [f"engine.compile={compiled}", f"run_directory={tmp_path / compiled}"]
        finished = run_command(
            ["train.py", *tiny, *SMALL, *run],
            env={"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")},
            timeout_s=900,
        )
        assert finished.code == 0, finished.stderr[-2000:]
    assert list((tmp_path / "inductor").rglob("*.so"))
    for key in ("loss", "gradient_norm"):
        plain = metrics(tmp_path / "false", key)
        assert metrics(tmp_path / "true", key) == pytest.approx(plain, rel=1e-4, abs=1e-5)
        assert len(plain) == 4
    told = [(tmp_path / one / "samples.txt").read_text() for one in ("false", "true")]
    assert told[0] == told[1]


def test_without_a_compiler_one_line_says_so(
    run_command: Any, tiny: list[str], tmp_path: Path
) -> None:
    finished = run_command(
        ["train.py", *tiny, *SMALL, "engine.compile=true", f"run_directory={tmp_path / 'run'}"],
        env={"CXX": str(tmp_path / "none"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")},
    )
    assert finished.code == 2, finished.stderr[-2000:]
    (error,) = [line for line in finished.stderr.splitlines() if "error" in line.lower()]
    assert error.startswith("error: engine.compile=true: torch.compile does not work here (")
    assert "install g++ or set CXX" in error
