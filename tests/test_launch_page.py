"""docs/launch.md: its commands are read by their launchers and dry-run, its table is computed."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slayformer.cli import compose
from slayformer.config_loading import load_config
from slayformer.training.budget import parameter_counts
from slayformer.training.memory import estimate_memory
from slayformer.training.run import run

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "launch.md").read_text(encoding="utf-8")
Parsed = tuple[str, list[str], int]


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


COMMANDS = [line for block in blocks("bash") for line in block.splitlines()]


def of_python(words: list[str], folder: Path) -> Parsed:
    return words[0], words[1:], 1


def of_torchrun(words: list[str], folder: Path) -> Parsed:
    from torch.distributed.run import config_from_args, parse_args

    arguments = parse_args(words)
    settings, _, _ = config_from_args(arguments)
    world_size = settings.max_nodes * settings.nproc_per_node
    return arguments.training_script, arguments.training_script_args, world_size


def of_deepspeed(words: list[str], folder: Path) -> Parsed:
    from deepspeed.launcher.runner import fetch_hostfile, parse_args

    (hosts,) = blocks("hostfile")
    (folder / "hostfile").write_text(hosts)
    arguments = parse_args(words)
    world_size = arguments.num_gpus
    if "--hostfile" in words:
        world_size = sum(fetch_hostfile(str(folder / arguments.hostfile)).values())
    return arguments.user_script, arguments.user_args, world_size


LAUNCHERS: dict[str, Callable[[list[str], Path], Parsed]] = {
    "python": of_python,
    "torchrun": of_torchrun,
    "deepspeed": of_deepspeed,
}


@pytest.mark.slow
def test_commands_are_read_by_their_launchers_and_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    seen = []
    for command in COMMANDS:
        launcher, *words = shlex.split(command)
        script, overrides, world_size = LAUNCHERS[launcher](words, tmp_path)
        assert (ROOT / script).is_file(), command
        config = load_config(compose("train", [*overrides, "dry_run=true"]))
        seen.append((launcher, world_size))
        if script == "train.py":
            monkeypatch.setenv("WORLD_SIZE", str(world_size))
            assert run(config) is None
            assert f"devices {world_size}, ZeRO stage 2" in " ".join(
                capsys.readouterr().out.split()
            )
        else:
            assert config.data.processes == 16
    assert seen == [
        *(("python", 1), ("deepspeed", 8), ("torchrun", 8)),
        *(("deepspeed", 16), ("torchrun", 16), ("python", 1), ("deepspeed", 8)),
    ]


@pytest.mark.slow
def test_the_slurm_script_starts_every_task_and_requeues(tmp_path: Path) -> None:
    """Slurm itself is played: srun starts the first of 16 tasks alone, which has only to plan."""
    (script,) = blocks("sbatch")
    (tmp_path / "train.sbatch").write_text(script)
    (tmp_path / "train.py").symlink_to(ROOT / "train.py")
    programs = tmp_path / "bin"
    programs.mkdir()
    played = {
        "srun": 'shift; SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NTASKS=16 "$@"',
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
