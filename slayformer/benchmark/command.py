"""The runs of bench_attention.py and bench_train.py: measure or read, write, print."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from slayformer.benchmark.attention import measure
from slayformer.benchmark.options import BenchAttentionConfig
from slayformer.benchmark.report import print_report, read_result, write_report
from slayformer.benchmark.update_options import BenchTrainConfig
from slayformer.benchmark.update_plan import check, plan
from slayformer.benchmark.updates import measure_updates
from slayformer.benchmark.updates_report import print_updates, read_updates, write_updates
from slayformer.errors import ConfigError, UserError
from slayformer.evaluation.progress import progress_bar


def run(config: BenchAttentionConfig) -> Path:
    """Measure, or read an earlier run, and return the folder with the report.

    Raises UserError if the device or the folder cannot be used.
    """
    refuse_launcher("bench_attention.py")
    if config.redraw is not None:
        result = read_result(Path(config.redraw))
        directory = Path(config.directory or config.redraw)
        make_directory(directory)
    else:
        directory = Path(config.directory or time.strftime("benchmarks/%Y-%m-%d_%H-%M-%S"))
        make_directory(directory)
        with _progress() as show:
            result = measure(config, show)
    files = write_report(directory, result)
    print_report(result)
    tell_files(files)
    return directory


def run_updates(config: BenchTrainConfig, overrides: Sequence[str]) -> Path:
    """The same for whole updates; `overrides` go to train.yaml."""
    refuse_launcher("bench_train.py")
    if config.redraw is not None:
        result = read_updates(Path(config.redraw))
        directory = Path(config.directory or config.redraw)
        make_directory(directory)
    else:
        plan(check(config), overrides)
        directory = Path(config.directory or time.strftime("benchmarks/%Y-%m-%d_%H-%M-%S"))
        make_directory(directory)
        with _progress() as show:
            result = measure_updates(config, overrides, show)
    files = write_updates(directory, result)
    print_updates(result)
    tell_files(files)
    return directory


def refuse_launcher(script: str) -> None:
    """Raise UserError under a launcher of several processes."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(f"{script} measures one process: run it without a launcher")


def make_directory(directory: Path) -> None:
    """Make the folder of a report; raises ConfigError if that cannot be."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        hint = f"the folder cannot be written: {error.strerror}"
        raise ConfigError("directory", directory, hint) from error


def tell_files(files: list[Path]) -> None:
    """Print where a report is."""
    for path in files:
        Console().print(str(path), soft_wrap=True, highlight=False, markup=False)


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """Show progress; what is given takes (what is done, steps, of how many)."""
    with progress_bar() as bar:
        task = bar.add_task("measuring")
        yield lambda told, done, total: bar.update(
            task, description=told, completed=done, total=total
        )
