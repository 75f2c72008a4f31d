"""The script for a GPU machine takes its whole path on a CPU, and says what it cannot do."""

from __future__ import annotations

import json
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

SCRIPT = str(Path(__file__).parents[2] / "scripts" / "gpu_session.sh")
STEPS = ["environment", "tests", "decode", "attention", "updates", "engine", "race"]
STEPS += ["text_cuda_graph_false"]


@pytest.mark.slow
def test_dry_run_takes_every_step(tmp_path: Path, run_command: Any) -> None:
    finished = run_command(
        ["bash", SCRIPT, "--dry-run", "out"],
        cwd=tmp_path,
        env={"PYTHON": sys.executable},
        timeout_s=3000,
    )
    assert finished.code == 0, finished.stdout + finished.stderr
    # the folder is that of the caller
    out = tmp_path / "out"
    summary = (out / "summary.txt").read_text().splitlines()
    assert [line.partition(",")[0] for line in summary] == [f"{s}: exit code 0" for s in STEPS]
    with tarfile.open(out / "results.tar.gz") as archive:
        names = set(archive.getnames())
    wanted = ["decode/bench_attention.md", "attention/bench_attention.json"]
    wanted += ["updates/bench_train.json", "engine/bench_train.csv", "race/comparison.md"]
    assert {f"./{name}" for name in (*wanted, "environment.log", "summary.txt")} <= names
    assert not any("checkpoints" in name for name in names)
    record = json.loads((out / "engine" / "bench_train.json").read_text())
    assert [cell["loop"] for cell in record["cells"]] == ["plain", "zero1"]


def test_without_a_gpu_it_stops_at_once(tmp_path: Path, run_command: Any) -> None:
    environment = {"PYTHON": sys.executable}
    refused = run_command(["bash", SCRIPT, "out"], cwd=tmp_path, env=environment)
    assert refused.code == 2
    assert refused.stderr.startswith("error: torch finds no CUDA GPU here")
    assert len(refused.stderr.splitlines()) == 1
    wrong = run_command(["bash", SCRIPT, "--dryrun"], cwd=tmp_path, env=environment)
    assert wrong.code == 2
    assert wrong.stderr.startswith("usage: ")
