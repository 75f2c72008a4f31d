from __future__ import annotations

import io
import re
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

from slayformer.progress import PlainProgress

ROOT = Path(__file__).resolve().parent.parent


class Clock:
    """Seconds that pass when a test says so."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def display(clock: Clock, *, terminal: bool = False, **options: bool) -> PlainProgress:
    # `options` go to the display
    console = Console(file=io.StringIO(), force_terminal=terminal, width=30)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    return PlainProgress(*columns, TimeElapsedColumn(), console=console, get_time=clock, **options)


def written(progress: PlainProgress) -> str:
    file = progress.console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_a_log_gets_whole_lines_at_the_beginning_now_and_then_and_at_the_end() -> None:
    clock = Clock()
    with display(clock) as progress:
        task = progress.add_task("measuring", total=40)
        progress.update(task, description="a mechanism with a long name, reading", completed=0)
        first = "a mechanism with a long name, reading 0/40 0:00:00"
        # before the first step is done
        assert written(progress) == first + "\n"
        for _ in range(39):
            clock.now_s += 1
            progress.advance(task)
        progress.update(task, description="another", completed=40)
    lines = written(progress).splitlines()
    assert [re.sub(r".* +(\d+/40)", r"\1", line) for line in lines] == [
        *("0/40 0:00:00", "10/40 0:00:10", "20/40 0:00:20", "30/40 0:00:30"),
        "40/40 0:00:39",
    ]
    # no bar, no control codes
    assert written(progress).isascii()
    assert written(progress).replace("\n", "").isprintable()


def test_the_time_left_is_told_where_steps_are_long() -> None:
    clock = Clock()
    console = Console(file=io.StringIO())
    with PlainProgress(console=console, get_time=clock) as progress:
        task = progress.add_task("training", total=10)
        for _ in range(3):
            clock.now_s += 60
            progress.advance(task)
    assert written(progress).splitlines()[-1] == "training 30% left 0:07:00"


def test_a_day_does_not_fill_a_log() -> None:
    clock = Clock()
    with display(clock) as progress:
        task = progress.add_task("training", total=24 * 3600)
        for _ in range(24 * 60):
            clock.now_s += 60
            progress.update(task, advance=60)
    lines = written(progress).splitlines()
    assert 50 < len(lines) < 150
    assert "86400/86400 1 day" in lines[-1] or "86400/86400 24:00:00" in lines[-1]


def test_the_end_is_told_once_and_of_every_task_that_shows() -> None:
    clock = Clock()
    with display(clock) as progress:
        done, hidden, idle = (progress.add_task(name, total=1) for name in ("a", "b", "c"))
        progress.advance(done)
        progress.update(hidden, completed=1, visible=False)
        # as where a run fails: nothing new to tell
        clock.now_s += 5
    assert written(progress) == "a 1/1 0:00:00\n"
    assert not progress.tasks[idle].finished


def test_a_terminal_gets_the_bar_and_whoever_is_silent_nothing() -> None:
    with display(Clock(), terminal=True) as progress:
        progress.advance(progress.add_task("measuring", total=2))
    assert "━" in written(progress)
    assert "\x1b[" in written(progress)
    for terminal in (True, False):
        with display(Clock(), terminal=terminal, shown=False) as progress:
            progress.advance(progress.add_task("measuring", total=2))
        assert written(progress) == ""


def test_every_long_step_can_be_followed_without_a_terminal() -> None:
    """Nothing shows a bar of `rich` alone, which is empty there, but what prints own lines too."""
    bars = re.compile(r"[^\w]Progress\(|[^.]\btrack\(")
    scripts = [*ROOT.glob("scripts/*.py"), *ROOT.glob("slayformer/**/*.py")]
    found = {path.relative_to(ROOT).as_posix() for path in scripts if bars.search(path.read_text())}
    assert found == {
        "slayformer/training/logging.py",
        "slayformer/evaluation/cells.py",
    }
