"""The runs of a comparison: none is lost or repeated, and one that dies leaves the others."""

from __future__ import annotations

import csv
import fcntl
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
from rich.console import Console

from slayformer.evaluation.cells import display, interruptible
from slayformer.evaluation.document_losses import read_document_losses

ROOT = Path(__file__).resolve().parents[2]
WAIT_SECONDS = 400


class Comparison:
    """`mechanisms` on a small text, by the command line, in `directory`."""

    def __init__(self, directory: Path, text_folder: Path, mechanisms: Sequence[str]) -> None:
        self.directory = directory
        self.arguments = [
            *(f"attention=[{','.join(mechanisms)}]", "threads=1", f"directory={directory}"),
            *("tokenizer=bytes", "data=text", f"data.source.path={text_folder}"),
            f"data.cache_directory={directory.parent / 'cache'}",
            "data.validation_fraction=0.3",
            *("model.layers=1", "model.heads=2", "model.width=8", "model.context_length=16"),
            *("budget=updates", "budget.updates=40", "validation.tokens=7000"),
            *("validation.every_updates=20", "logging.sample_tokens=1"),
        ]

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start the command; its output goes to a file beside the folder."""
        command = [sys.executable, str(ROOT / "scripts" / "compare.py"), *self.arguments]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
        # as under a launcher, whose variables are none of the runs' business
        environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        with self.directory.with_name("output.txt").open("ab") as output:
            return subprocess.Popen(
                [*command, *arguments],
                cwd=self.directory.parent,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def output(self) -> str:
        """Return everything printed so far."""
        return self.directory.with_name("output.txt").read_text()

    def wait_for(self, process: subprocess.Popen[bytes], cell: str, file: str) -> None:
        """Return as soon as `file` of a cell has content, while `process` runs."""
        path = self.directory / cell / file
        deadline = time.monotonic() + WAIT_SECONDS
        while not (path.exists() and path.stat().st_size):
            assert process.poll() is None, self.output()
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.02)

    def wait_for_stop(self, process: subprocess.Popen[bytes], cell: str) -> None:
        """Return as soon as the run of a cell has been told to stop."""
        deadline = time.monotonic() + WAIT_SECONDS
        while "stopping after" not in (self.directory / f"{cell}.log").read_text():
            assert process.poll() is None, self.output()
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.02)

    def starts(self, cell: str) -> int:
        """Return how often the cell has been trained, according to its log."""
        return (self.directory / f"{cell}.log").read_text().count("run directory: ")


def test_an_interruption_tells_how_to_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left, interruptible([], "directory=comparisons/now"):
        raise KeyboardInterrupt
    assert left.value.code == 130
    assert capsys.readouterr().err.endswith("the same command with directory=comparisons/now\n")


@pytest.mark.parametrize("width", [80, 120])
def test_the_display_shows_its_times_whole(width: int) -> None:
    console = Console(file=io.StringIO(), width=width)
    progress = display(console)
    status = "update 3000/3000, loss 3.315 nats/token"
    progress.add_task("slay_block_quadratic seed 1", total=9, status=status)
    console.print(progress.get_renderable())
    line = console.file.getvalue().splitlines()[0]  # type: ignore[attr-defined]
    assert line.rstrip().endswith(f"{status} 0:00:00 left -:--:--")


@pytest.mark.slow
def test_kills_and_interruptions_lose_and_repeat_nothing(
    tmp_path: Path, text_folder: Path, make_gate: Any
) -> None:
    mechanisms = ["softmax", "linear_elu", "slay", "uniform"]
    comparison = Comparison(tmp_path / "comparison", text_folder, mechanisms)
    options = ("seeds=[1,2]", "logging.every_updates=100")
    ended = ("softmax-seed1", "softmax-seed2", "linear_elu-seed2")
    gates = {cell: make_gate(comparison.directory / cell) for cell in ended}
    summary = comparison.directory / "linear_elu-seed1" / "summary.json"

    # a run dies: the others go on. Then the comparison itself is killed in the middle of a run
    process = comparison.start(*options)
    comparison.wait_for(process, "softmax-seed1", "metrics.jsonl")
    (run_process,) = psutil.Process(process.pid).children()
    run_process.kill()
    gates["softmax-seed1"].open()
    comparison.wait_for(process, "softmax-seed2", "metrics.jsonl")
    before = (
        summary.stat().st_mtime_ns,
        (comparison.directory / "linear_elu-seed1.log").read_bytes(),
    )
    process.kill()
    process.wait()
    # the orphan keeps its folder to itself
    orphan_log = comparison.directory / "softmax-seed2.log"
    with orphan_log.open("ab") as log, pytest.raises(BlockingIOError):
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert "softmax seed 1: did not finish (exit code -9)" in comparison.output()
    assert not (comparison.directory / "softmax-seed2" / "summary.json").exists()

    # its run is not started again; later the comparison is asked to stop
    process = comparison.start(*options)
    gates["softmax-seed2"].open()
    comparison.wait_for(process, "linear_elu-seed2", "metrics.jsonl")
    process.terminate()
    comparison.wait_for_stop(process, "linear_elu-seed2")
    gates["linear_elu-seed2"].open()
    assert process.wait(timeout=WAIT_SECONDS) == 130
    told = f"to go on, the same command with directory={comparison.directory}\n"
    assert told in comparison.output()
    assert (comparison.directory / "linear_elu-seed2" / "checkpoints" / "latest").exists()
    assert not (comparison.directory / "linear_elu-seed2" / "summary.json").exists()

    process = comparison.start(*options)
    assert process.wait(timeout=WAIT_SECONDS) == 0, comparison.output()
    log_after = (comparison.directory / "linear_elu-seed1.log").read_bytes()
    assert (summary.stat().st_mtime_ns, log_after) == before
    # the one that died and the one that was stopped; no other was run twice
    names = [f"{mechanism}-seed{seed}" for mechanism in mechanisms for seed in (1, 2)]
    starts = {name: comparison.starts(name) for name in names}
    assert starts == dict.fromkeys(names, 1) | {"softmax-seed1": 2, "linear_elu-seed2": 2}
    assert "going on after update" in (comparison.directory / "linear_elu-seed2.log").read_text()

    with (comparison.directory / "comparison.csv").open(encoding="utf-8") as file:
        rows = {row["mechanism"]: row for row in csv.DictReader(file)}
    assert set(rows) == set(mechanisms)
    for mechanism, row in rows.items():
        folders = [comparison.directory / f"{mechanism}-seed{seed}" for seed in (1, 2)]
        summaries = [json.loads((folder / "summary.json").read_text()) for folder in folders]
        losses = [one["validation_loss"] for one in summaries]
        assert row["seeds"] == "1 2"
        assert float(row["loss"]) == pytest.approx(sum(losses) / 2)
        assert float(row["loss_std"]) == pytest.approx(abs(losses[0] - losses[1]) / 2**0.5)
        for folder in folders:
            updates = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
            assert [u["update"] for u in updates if u["kind"] == "train"] == [*range(1, 41)]
        covers = "" if mechanism == "softmax" else "seeds and documents"
        assert (row["difference_covers"], row["baseline"]) == (covers, "softmax")
    assert (comparison.directory / "curves.png").stat().st_size > 10_000


@pytest.mark.slow
def test_a_run_that_cannot_start_leaves_the_others(tmp_path: Path, text_folder: Path) -> None:
    comparison = Comparison(tmp_path / "comparison", text_folder, ["softmax", "linear_elu"])
    comparison.directory.mkdir()
    (comparison.directory / "softmax-seed3").write_text("in the way")
    process = comparison.start("seeds=[3]", "budget.updates=20", "jobs=2")
    assert process.wait(timeout=WAIT_SECONDS) == 1, comparison.output()
    assert "softmax seed 3: did not finish (exit code 2)" in comparison.output()
    assert "there is a file of that name" in comparison.output()
    report = (comparison.directory / "comparison.md").read_text()
    assert "Did not finish: softmax seed 3." in report
    assert "| linear_elu | " in report
    assert "(1 seed)" in report
    assert (comparison.directory / "softmax-seed3").read_text() == "in the way"

    # what joins stands in one table with what was there
    (comparison.directory / "softmax-seed3").unlink()
    joining = ("attention=[softmax]", "baseline=linear_elu")
    process = comparison.start("seeds=[3]", "budget.updates=20", *joining)
    assert process.wait(timeout=WAIT_SECONDS) == 0, comparison.output()
    report = (comparison.directory / "comparison.md").read_text()
    assert "| linear_elu | " in report
    assert "| softmax | " in report
    assert "difference to linear_elu" in report
    assert "Did not finish" not in report


@pytest.mark.slow
def test_runs_of_several_processes_stop_and_go_on(
    tmp_path: Path, text_folder: Path, make_gate: Any
) -> None:
    comparison = Comparison(tmp_path / "comparison", text_folder, ["slay"])
    options = ("seeds=[1]", "processes=2")
    folder = comparison.directory / "slay-seed1"
    gate = make_gate(folder)

    process = comparison.start(*options)
    comparison.wait_for(process, "slay-seed1", "metrics.jsonl")
    started = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    comparison.wait_for_stop(process, "slay-seed1")
    gate.open()
    assert process.wait(timeout=WAIT_SECONDS) == 130, comparison.output()
    # both processes saved by themselves, and nothing is left of the launcher
    assert (folder / "checkpoints" / "latest").exists()
    assert not (folder / "summary.json").exists()
    assert not [one for one in started if one.is_running() and one.status() != "zombie"]
    log = (comparison.directory / "slay-seed1.log").read_text()
    assert "stopped and saved after update" in log

    process = comparison.start(*options)
    assert process.wait(timeout=WAIT_SECONDS) == 0, comparison.output()
    assert "going on after update" in (comparison.directory / "slay-seed1.log").read_text()
    assert json.loads((folder / "plan.json").read_text())["world_size"] == 2
    updates = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    assert [u["update"] for u in updates if u["kind"] == "train"] == [*range(1, 41)]
    losses = read_document_losses(folder)
    assert losses is not None
    summary = json.loads((folder / "summary.json").read_text())
    mean = losses.nats_D.sum() / losses.tokens_D.sum()
    assert mean == pytest.approx(summary["validation_loss"], rel=1e-12)
