"""The commands people use: launchers, signals, a full disk, a diverging run."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from slayformer.training.checkpoint import find_checkpoint, verify_checkpoint

pytestmark = pytest.mark.slow

LAUNCH_SECONDS = 240
Processes = list[subprocess.Popen[str]]

SHORT = ["batch.samples_per_update=8", "budget=updates", "budget.updates=6"]
# train.py, in which rank 1 fails at its third update and would, as with nccl, wait to say goodbye
RAISING = """
import time
import torch.distributed as dist
from slayformer.cli import entry_point
from slayformer.training.engine import TrainingEngine
from train import main

real, updates = TrainingEngine.step, []

def step(self, rate, **options):
    updates.append(rate)
    if dist.get_rank() == 1 and len(updates) == 3:
        raise RuntimeError("out of memory")
    return real(self, rate, **options)

TrainingEngine.step = step
TrainingEngine.close = dist.destroy_process_group = lambda *_: time.sleep(600)
entry_point(main)
"""
ENDLESS = ["batch.samples_per_update=8", "budget=updates", "budget.updates=100000"]


def test_deepspeed_command_leaves_one_run(
    run_command: Any,
    tiny: list[str],
    metrics: Any,
    free_port: int,
    tmp_path: Path,
) -> None:
    launcher = ["deepspeed", "--num_accelerators", "2", "--master_port", str(free_port)]
    command = [*launcher, "train.py", *tiny, *SHORT, "checkpoint.every_updates=3"]
    finished = run_command(command, cwd=tmp_path, timeout_s=LAUNCH_SECONDS)
    assert finished.code == 0, finished.stdout[-2000:] + finished.stderr[-4000:]
    (directory,) = (tmp_path / "runs").iterdir()
    assert [path.name for path in tmp_path.rglob("metrics.jsonl")] == ["metrics.jsonl"]
    assert metrics(directory, "update") == [1, 2, 3, 4, 5, 6]
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["finished"] is True
    assert summary["updates"] == 6
    plan = json.loads((directory / "plan.json").read_text())
    assert plan["world_size"] == 2
    # rank 0 alone talks
    assert finished.stdout.count("update 6/6") == 1
    newest = find_checkpoint(directory)
    assert newest.name == "update_0000006"
    assert {"rng_rank_00000.safetensors", "rng_rank_00001.safetensors"} <= set(
        verify_checkpoint(newest)["files"]
    )


def wait_for_records(directory: Path, records: int, processes: Processes) -> None:
    """Return once the run in `directory` has written so many records."""
    deadline = time.monotonic() + LAUNCH_SECONDS
    while time.monotonic() < deadline:
        assert all(process.poll() is None for process in processes), "ended too early"
        told = directory / "metrics.jsonl"
        if told.exists() and told.read_text().count("\n") >= records:
            return
        time.sleep(0.01)
    raise TimeoutError(f"no {records} records in {directory}")


def ends(processes: Processes) -> list[tuple[int, str]]:
    """Wait for all processes; return exit code and output of each."""
    outputs = [process.communicate(timeout=LAUNCH_SECONDS)[0] for process in processes]
    return [(process.returncode, out) for process, out in zip(processes, outputs, strict=True)]


def test_asked_to_stop_it_saves_and_goes_on_bit_for_bit(
    launch: Any, start_ranks: Any, metrics: Any, make_gate: Any, tmp_path: Path
) -> None:
    world_size, stopped, case = launch.world_size, tmp_path / "stopped", launch.cases["whole-2-4"]
    gate = make_gate(stopped)
    processes = start_ranks([*case, f"run_directory={stopped}"], world_size)
    # eight updates and a validation: now it waits
    wait_for_records(stopped, 9, processes)
    if world_size == 1:
        again = [*case, "resume=auto", f"run_directory={stopped}"]
        ((code, message),) = ends(start_ranks(again, 1))
        assert code == 2
        assert f"error: run_directory={stopped}: process {processes[0].pid} on " in message
    # Ctrl-C for one process; a cluster may tell any rank that it will take the machines away
    processes[-1].send_signal(signal.SIGINT if world_size == 1 else signal.SIGUSR1)
    gate.open()
    told = ends(processes)
    assert [code for code, _ in told] == [0] * world_size, told[0][1]
    (done,) = re.findall(r"stopped and saved after update (\d+) of 12", told[0][1])
    # another rank may have told already that it goes on with the ninth
    assert int(done) in (9, 10)
    assert find_checkpoint(stopped).name == f"update_{int(done):07d}"
    assert not (stopped / "summary.json").exists()

    (command,) = re.findall(r"resume with: (.+)", told[0][1])
    arguments = shlex.split(command)
    arguments = arguments[arguments.index("train.py") + 1 :]
    # these two alone stand for all that the run was started with
    assert arguments == [f"run_directory={stopped}", "resume=auto"]
    told = ends(start_ranks(arguments, world_size))
    assert [code for code, _ in told] == [0] * world_size, told[0][1]
    for key in ("update", "loss", "gradient_norm"):
        assert metrics(stopped, key) == launch.metrics("whole-2-4", key)
    summary = json.loads((stopped / "summary.json").read_text())
    assert summary["finished"] is True


def test_a_rank_that_dies_or_stops_ends_the_other(
    tiny: list[str], start_ranks: Any, tmp_path: Path
) -> None:
    # at once, for they mostly wait
    overrides = [*tiny, *ENDLESS, "engine.timeout_seconds=8"]
    runs = [tmp_path / name for name in ("killed", "stopped0", "stopped1")]
    killed, *stopped = (start_ranks([*overrides, f"run_directory={run}"], 2) for run in runs)
    for run, processes in zip(runs, (killed, *stopped), strict=True):
        wait_for_records(run, 3, processes)

    killed[1].kill()
    before = time.monotonic()
    for rank, processes in enumerate(stopped):
        processes[rank].send_signal(signal.SIGSTOP)
    (code, told), _ = ends(killed)
    assert time.monotonic() - before < 60
    assert code == 2
    assert "error: another process of this run has died" in told
    assert f"run_directory={runs[0]} resume=auto" in told
    assert "Traceback" not in told

    for rank, processes in enumerate(stopped):
        ((code, told),) = ends([processes[1 - rank]])
        assert code == 2
        (error,) = [line for line in told.splitlines() if "error" in line]
        assert f"waited 8 s (engine.timeout_seconds) in vain for rank {rank} (" in error
        assert re.search(rf"run_directory={runs[1 + rank]} resume=auto$", error)
        assert "Traceback" not in told
        # still stopped: nobody else ended it
        assert processes[rank].poll() is None


def test_a_rank_that_raises_ends_the_other(
    tiny: list[str], start_ranks: Any, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    arguments = [*tiny, *ENDLESS, f"run_directory={run}"]
    (code, told), (failed, traceback) = ends(start_ranks(arguments, 2, program=("-c", RAISING)))
    assert (code, failed) == (2, 1)
    assert "RuntimeError: out of memory" in traceback
    assert "error: another process of this run has died" in told
    assert told.rstrip().endswith(f"run_directory={run} resume=auto")
    assert "Traceback" not in told


def test_full_disk_keeps_the_earlier_checkpoint_on_all_ranks(
    launch: Any, start_ranks: Any, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(launch.folder / "whole-2-4", run)
    before = sorted(path.name for path in (run / "checkpoints").iterdir())
    case = [*launch.cases["whole-2-4"], f"run_directory={run}"]
    # it would go on for long, but the save in the background tells all that it has failed
    longer = [*case, "budget.updates=100000", "checkpoint.every_updates=13"]
    # files may not grow beyond this: the shards of the optimizer do, the metrics do not
    started = start_ranks([*longer, "resume=auto"], launch.world_size, file_limit_bytes=50_000)
    told = ends(started)
    assert [code for code, _ in told] == [2] * launch.world_size, told[0][1]
    assert re.search(r"error: no checkpoint could be saved in .* could not be written", told[0][1])
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == before
    newest = find_checkpoint(run)
    assert newest.name == "update_0000012"
    verify_checkpoint(newest)


def test_a_diverging_run_stops_and_names_the_samples(
    run_command: Any, tiny: list[str], tmp_path: Path
) -> None:
    finished = run_command(
        [
            *("train.py", *tiny, *SHORT, "checkpoint.every_updates=1"),
            *("optimizer.learning_rate=1e30", f"run_directory={tmp_path}/run"),
        ]
    )
    assert finished.code == 2
    (error,) = [line for line in finished.stderr.splitlines() if "error" in line]
    found = re.search(r"in update (\d) \(samples (\d+) to (\d+)\).*checkpoint: update (\d)", error)
    assert found, error
    update, first, last, saved = map(int, found.groups())
    assert (first, last, saved) == (8 * update - 8, 8 * update - 1, update - 1)
    assert find_checkpoint(tmp_path / "run").name == f"update_{saved:07d}"
    assert not (tmp_path / "run" / "summary.json").exists()


def test_mistakes_are_one_line(run_command: Any, tiny: list[str], tmp_path: Path) -> None:
    """Two of them through the whole command; the rest are tested where they are found."""
    (tmp_path / "file").write_text("")
    for override, message in {
        f"run_directory={tmp_path}/file/run": "run_directory=.*cannot be made",
        f"resume={tmp_path}/nowhere": "no checkpoint at .*nowhere",
    }.items():
        finished = run_command(["train.py", *tiny, *SHORT, override])
        assert finished.code == 2
        (line,) = [text for text in finished.stderr.splitlines() if text.startswith("error:")]
        assert re.search(message, line)
