"""The progress bar of an evaluation or a measurement."""

from __future__ import annotations

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from slayformer.progress import PlainProgress
from slayformer.training.distributed import is_main


def progress_bar() -> PlainProgress:
    """Return a display of what is done, the time taken and the time left, shown by rank 0.

    On standard error: standard output is for the numbers.
    """
    return PlainProgress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        shown=is_main(),
    )
