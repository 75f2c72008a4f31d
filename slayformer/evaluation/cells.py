"""Runs as processes of their own: started, watched, and never twice in one folder."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil  # type: ignore[import-untyped]
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column

from slayformer.cli import EXIT_INTERRUPTED, LAUNCHER_VARIABLES, compose, quoted
from slayformer.config import TrainConfig
from slayformer.config_commands import RecallConfig
from slayformer.config_loading import load_config
from slayformer.data.tokenizer import vocabulary_size
from slayformer.evaluation.runs import is_finished
from slayformer.finite import with_nan
from slayformer.training.budget import make_plan
from slayformer.training.schedule import check_schedule

ROOT = Path(__file__).resolve().parents[2]
TRAIN, RECALL = ROOT / "train.py", ROOT / "scripts" / "recall.py"
POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Cell:
    """One run: `overrides` are what `script` is given, `config` and `updates` what they mean.

    `title` is what a person reads. Of more than one of `processes` DeepSpeed's launcher starts
    them, one a GPU.
    """

    folder: Path
    title: str
    overrides: list[str]
    config: TrainConfig | RecallConfig
    updates: int
    script: Path = TRAIN
    processes: int = 1

    @property
    def log(self) -> Path:
        """The file with the output of the run."""
        return self.folder.with_name(f"{self.folder.name}.log")

    def command(self) -> list[str]:
        """Return the command line of the run."""
        start = [sys.executable]
        if self.processes > 1:
            start += ["-m", "deepspeed.launcher.runner", "--master_port", str(_free_port())]
            start += ["--num_accelerators", str(self.processes)]
        return [*start, str(self.script), *self.overrides]


def training_cell(folder: Path, title: str, overrides: list[str], processes: int = 1) -> Cell:
    """Return the cell that trains with `overrides` in `folder`, or goes on with what is there.

    Raises UserError for what train.py would refuse.
    """
    # without a checkpoint in it, resume=auto starts anew
    given = [*overrides, f"run_directory={quoted(str(folder))}", "resume=auto"]
    config = load_config(compose("train", given))
    plan = make_plan(config, vocabulary_size(config.tokenizer), world_size=processes)
    check_schedule(config.schedule, plan.updates, plan.tokens_at)
    return Cell(folder, title, given, config, plan.updates, processes=processes)


def train_cells(
    cells: Sequence[Cell], *, jobs: int, threads: int | None, console: Console, directory: str
) -> list[Cell]:
    """Train the unfinished cells, `jobs` at a time; return those that did not finish.

    `threads` None leaves the number of CPU threads as it is for this process. `directory` is the
    option that leads a later call to these cells.
    """
    waiting = []
    for cell in cells:
        if is_finished(cell.folder):
            console.print(f"{cell.title}: finished before, not run again")
        else:
            waiting.append(cell)
    failed: list[Cell] = []
    running: list[RunningCell] = []
    progress = display(console)
    count, done = len(waiting), 0
    with interruptible(running, directory), progress:
        overall = progress.add_task("all runs", total=count, status=f"0 of {count} runs")
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(RunningCell(waiting.pop(0), progress))
            for one in list(running):
                if not one.step(threads):
                    continue
                running.remove(one)
                one.close()
                done += 1
                if not _tell_end(one, console):
                    failed.append(one.cell)
            status = f"{done} of {count} runs"
            progress.update(
                overall, completed=done + sum(one.fraction() for one in running), status=status
            )
            time.sleep(POLL_SECONDS if running else 0)
    return failed


def display(console: Console) -> Progress:
    """Return the lines of all runs and of each under way; where it is narrow a long title wraps."""

    def whole(width: int) -> Column:
        return Column(no_wrap=True, min_width=width)

    return Progress(
        TextColumn("{task.description}", table_column=Column()),
        BarColumn(bar_width=12),
        TextColumn("{task.fields[status]}"),
        TimeElapsedColumn(table_column=whole(len("0:00:00"))),
        TextColumn("left", table_column=whole(len("left"))),
        TimeRemainingColumn(table_column=whole(len("0:00:00"))),
        console=console,
        # the pace of the last hour, not of the last few seconds
        speed_estimate_period=3600,
    )


class RunningCell:
    """A cell under way: first waiting for its log, then a process."""

    def __init__(self, cell: Cell, progress: Progress) -> None:
        self.cell = cell
        self.progress = progress
        self.task: TaskID = progress.add_task(cell.title, total=cell.updates, status="starting")
        self.process: subprocess.Popen[bytes] | None = None
        # the log is the lock: train.py inherits it as its output, so should this process be killed
        # the lock stays, and nobody trains into the same folder
        self.log: IO[bytes] = cell.log.open("ab")

    def step(self, threads: int | None) -> bool:
        """Start or watch the process; return whether the cell has ended, finished or not."""
        if self.process is None and self._take_lock():
            if is_finished(self.cell.folder):
                return True
            self.process = self._start(threads)
        if self.process is not None:
            self._show()
            return self.process.poll() is not None
        return False

    def close(self) -> None:
        """Let go of the log and leave the progress display."""
        self.log.close()
        self.progress.remove_task(self.task)

    def ask_to_stop(self) -> None:
        """Let the run finish its update, save a checkpoint and end."""
        if self.process is None or self.process.poll() is not None:
            return
        if self.cell.processes == 1:
            self.process.terminate()
            return
        # the launcher passes a signal on and kills those that take long to save; told themselves,
        # they end by their own and the launcher after them
        for rank in _ranks(self.process.pid):
            with suppress(psutil.Error):
                rank.send_signal(signal.SIGUSR1)

    def kill(self) -> None:
        """End the run at once, with every process it has started."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def fraction(self) -> float:
        """Return how much of the cell is done, 0 to 1."""
        task = self.progress.tasks[self.progress.task_ids.index(self.task)]
        return task.completed / self.cell.updates

    def _take_lock(self) -> bool:
        try:
            fcntl.flock(self.log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.progress.update(self.task, status="waiting for the process that trains it already")
            return False
        return True

    def _start(self, threads: int | None) -> subprocess.Popen[bytes]:
        # a run is a launch of its own, whatever has launched the comparison
        env = {name: x for name, x in os.environ.items() if name not in LAUNCHER_VARIABLES}
        if threads is not None:
            env["OMP_NUM_THREADS"] = str(threads)
        return subprocess.Popen(
            self.cell.command(),
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            env=env,
            # Ctrl-C reaches it from here only, so that it is told to stop once
            start_new_session=True,
        )

    def _show(self) -> None:
        try:
            with (self.cell.folder / "metrics.jsonl").open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
                lines = file.read().decode().splitlines()
            # the first line of the piece may lack its beginning
            records = [with_nan(json.loads(line)) for line in lines if line.startswith("{")]
            train = [record for record in records if record["kind"] == "train"]
        except (OSError, ValueError):
            # not written yet, or half a line: the next look will do
            return
        if train:
            update, loss = train[-1]["update"], train[-1]["loss"]
            status = f"update {update}/{self.cell.updates}, loss {loss:.3f} nats/token"
            self.progress.update(self.task, completed=update, status=status)


def _tell_end(ended: RunningCell, console: Console) -> bool:
    """Print how a cell ended; return whether it finished."""
    cell = ended.cell
    if is_finished(cell.folder):
        summary = json.loads((cell.folder / "summary.json").read_text(encoding="utf-8"))
        if cell.script == RECALL:
            pairs, share = list(summary["accuracy"].items())[-1]
            told = f"{100 * share:.1f} % of {pairs} pairs recalled"
        else:
            told = f"validation loss {summary['validation_loss']:.4f} nats/token"
        console.print(f"{cell.title}: {told}, {summary['seconds']:.0f} s")
        return True
    code = ended.process.returncode if ended.process else None
    last = cell.log.read_text(encoding="utf-8", errors="replace").splitlines()[-10:]
    told = f"{cell.title}: did not finish (exit code {code}); the end of {cell.log}:"
    console.print(told, soft_wrap=True)
    for line in last:
        console.print(f"    {line}", markup=False, highlight=False, soft_wrap=True)
    return False


@contextmanager
def interruptible(running: list[RunningCell], directory: str) -> Iterator[None]:
    """On Ctrl-C, SIGTERM, SIGHUP or an error let the running cells save and stop, then leave.

    What is told has `directory`, the option that leads a later call to the same cells.
    """

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, interrupt) for number in signals}
    try:
        yield
    except BaseException as error:
        told = f"stopping: each run saves a checkpoint; to go on, the same command with {directory}"
        print(told, file=sys.stderr)
        try:
            for one in running:
                one.ask_to_stop()
            for one in running:
                if one.process is not None:
                    one.process.wait()
        except KeyboardInterrupt:
            for one in running:
                one.kill()
        if isinstance(error, KeyboardInterrupt):
            sys.exit(EXIT_INTERRUPTED)
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ranks(launcher: int) -> list[psutil.Process]:
    """Return the processes that train, among those that process `launcher` has started."""
    ranks = []
    with suppress(psutil.Error):
        for process in psutil.Process(launcher).children(recursive=True):
            with suppress(psutil.Error):
                # what a rank starts inherits its number
                if "RANK" in process.environ() and "RANK" not in process.parent().environ():
                    ranks.append(process)
    return ranks


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]
