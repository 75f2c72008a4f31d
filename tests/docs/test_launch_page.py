"""docs/launch.md: the Slurm script starts every task, the table is computed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slayformer.cli import compose
from slayformer.config_loading import load_config
from slayformer.training.budget import parameter_counts
from slayformer.training.memory import estimate_memory

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "launch.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_slurm_script_starts_every_task_and_requeues(tmp_path: Path) -> None:
    """Slurm itself is played: srun starts the first of 16 tasks alone, which has only to plan."""
    (script,) = re.findall(r"^```bash train.sbatch\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / "train.sbatch").write_text(script)
    (tmp_path / "train.py").symlink_to(ROOT / "train.py")
    programs = tmp_path / "bin"
    programs.mkdir()
    played = {
        "srun": f'while [[ $1 == --* ]]; do echo "$1" >> {tmp_path}/srun.log; shift; done; '
        'SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NTASKS=16 "$@"',
        "scontrol": f'echo "$@" >> {tmp_path}/scontrol.log; echo node7; echo node8',
        "python": f'env | grep -E "^(RANK|MASTER)" > {tmp_path}/env; {sys.executable} "$@"',
    }
    for name, body in played.items():
        (programs / name).write_text(f"#!/bin/bash\n{body}\n")
        (programs / name).chmod(0o755)
    run_directory = tmp_path / "a run"
    environment: dict[str, Any] = {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "RUN": str(run_directory),
        "SLURM_JOB_ID": "70123",
        "SLURM_JOB_NODELIST": "node[7-8]",
        "SLURM_CPUS_PER_TASK": "1",
    }

    def submit() -> str:
        command = ["bash", "train.sbatch", "attention=softmax", "dry_run=true"]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )
        assert "error" not in done.stderr, done.stderr
        return " ".join(done.stdout.split())

    told = submit()
    assert "devices 16, ZeRO stage 2" in told
    assert "124,439,808 with attention=softmax" in told
    variables = (tmp_path / "env").read_text().split()
    options = (tmp_path / "srun.log").read_text().split()
    assert options == ["--kill-on-bad-exit=1", "--cpus-per-task=1"]
    assert set(variables) == {"RANK=0", "MASTER_ADDR=node7", "MASTER_PORT=30123"}
    # nothing was trained, so there is nothing to go on with
    assert "requeue" not in (tmp_path / "scontrol.log").read_text()
    (run_directory / "checkpoints").mkdir(parents=True)
    submit()
    assert (tmp_path / "scontrol.log").read_text().splitlines()[-1] == "requeue 70123"


def test_the_table_is_what_the_plan_estimates() -> None:
    rows = re.findall(
        r"^\| (\d+) × (\d+).*? \| ([\d.]+) ([MB]) \| `(\w+)` \| `(\w+)` \| (\d+) \| ([\d.]+) \|$",
        PAGE,
        re.MULTILINE,
    )
    assert len(rows) == 6
    for layers, width, count, unit, engine, again, micro, told in rows:
        shape = [
            f"model.layers={layers}",
            f"model.width={width}",
            f"model.heads={int(width) // 64}",
        ]
        overrides = [
            *("experiment=gpt2_small_chinchilla", f"engine={engine}", *shape),
            *(f"engine.activation_checkpointing={again}", f"batch.micro_samples={micro}"),
        ]
        config = load_config(compose("train", overrides))
        parameters = parameter_counts(config.model, 50257).total
        scale = {"M": 1e6, "B": 1e9}[unit]
        last_digit = 10.0 ** -len(count.partition(".")[2])
        assert float(count) == pytest.approx(parameters / scale, abs=0.51 * last_digit)
        memory = estimate_memory(
            config, parameters=parameters, vocabulary_size=50257, world_size=8, on_cpu=False
        )
        assert float(told) == pytest.approx(memory.total / 2**30, abs=0.051), (layers, width)
