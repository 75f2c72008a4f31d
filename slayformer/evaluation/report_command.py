"""`scripts/report.py`: a report of runs that are there, whoever trained them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from slayformer.cli import quoted
from slayformer.config_commands import ReportConfig
from slayformer.errors import ConfigError, UserError
from slayformer.evaluation.runs import find_runs


def split_arguments(arguments: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Return the folders among the arguments, and the options.

    A baseline may be called `slay, nodes=2`, which Hydra takes in quotes alone.
    """
    folders = [a for a in arguments if not a.startswith("-") and ("=" not in a or Path(a).is_dir())]
    options = [a for a in arguments if a not in folders]
    return [Path(folder) for folder in folders], [
        f"baseline={quoted(a.removeprefix('baseline='))}" if a.startswith("baseline=") else a
        for a in options
    ]


def run(folders: Sequence[Path], config: ReportConfig) -> Path:
    """Report the finished runs in `folders`, print the table, and return where the files are.

    Raises UserError for a folder without runs, and for runs that may not be compared unless
    config.allow_differences.
    """
    from slayformer.evaluation.report import make_report
    from slayformer.evaluation.report_files import write_report
    from slayformer.evaluation.report_table import print_report

    if not folders:
        raise UserError(
            "name run directories, or a folder of them: python scripts/report.py FOLDER..."
        )
    found = find_runs(folders)
    if not found.runs:
        where = f"no finished run in {', '.join(map(str, folders))}"
        if not found.unfinished:
            raise UserError(f"{where}: none of a language model")
        hint = "what started them goes on with run_directory=FOLDER resume=auto (train.py) or "
        hint += "directory=FOLDER (compare.py)"
        raise UserError(f"{where}: unfinished: {', '.join(found.unfinished)}; {hint}")
    notes = [f"Not finished: {', '.join(found.unfinished)}."] if found.unfinished else []
    report = make_report(
        found.runs,
        found.recalls,
        notes,
        baseline=config.baseline,
        allow_differences=config.allow_differences,
    )
    directory = _directory(folders, found.runs[0].folder, config)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        hint = f"cannot be made: {error.strerror}"
        raise ConfigError("directory", directory, hint) from error
    files = write_report(directory, report)
    print_report(report)
    console = Console()
    for note in notes:
        console.print(note, soft_wrap=True)
    for path in files:
        console.print(str(path), soft_wrap=True)
    return directory


def _directory(folders: Sequence[Path], first: Path, config: ReportConfig) -> Path:
    if config.directory is not None:
        return Path(config.directory)
    if len(folders) == 1 and folders[0].resolve() != first:
        return folders[0]
    return Path(time.strftime("reports/%Y-%m-%d_%H-%M-%S"))
