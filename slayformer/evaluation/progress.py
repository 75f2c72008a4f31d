"""The progress bar of an evaluation."""

from __future__ import annotations

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from slayformer.training.distributed import is_main


def progress_bar() -> Progress:
    """Return a bar with what is done, the time taken and the time left, shown by rank 0.

    On standard error, and only to a terminal: standard output is for the numbers.
    """
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not (console.is_terminal and is_main()),
    )
