"""How far a long step is: a bar on a terminal; in a file or a pipe now and then a plain line."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import Progress, ProgressColumn, TaskID, TextColumn
from rich.text import Text

# between two lines of a task; later a share of its time so far, for a day must not fill a log
LINES_APART_S = 10
LINES_APART_SHARE = 0.05


class PlainProgress(Progress):
    """A `rich` display that can be followed without a terminal too.

    There it prints its columns, without the bar, as a line: as soon as a task is told something,
    now and then while it goes on, and at the end. `shown=False` shows nothing anywhere.
    """

    def __init__(
        self, *columns: ProgressColumn, console: Console, shown: bool = True, **options: Any
    ) -> None:
        terminal = console.is_terminal
        # the pace of the last hour: of rich's half minute nothing is left where a step takes longer
        options.setdefault("speed_estimate_period", 3600)
        super().__init__(*columns, console=console, disable=not (terminal and shown), **options)
        self._in_lines = shown and not terminal
        # what was done at the last line of each task, and the seconds after which it came
        self._told: dict[TaskID, tuple[float, float]] = {}

    @classmethod
    def get_default_columns(cls) -> tuple[ProgressColumn, ...]:
        """Return those of `rich`, and what the time at their end means."""
        *columns, remaining = super().get_default_columns()
        return *columns, TextColumn("left"), remaining

    def update(self, task_id: TaskID, *arguments: Any, **fields: Any) -> None:
        """Update the task as `rich` does, and print a line if it is time."""
        super().update(task_id, *arguments, **fields)
        self._tell(task_id)

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        """Advance the task as `rich` does, and print a line if it is time."""
        super().advance(task_id, advance)
        self._tell(task_id)

    def stop(self) -> None:
        """End the display; lines end with how far each task has come."""
        super().stop()
        for task_id in list(self._told):
            self._tell(task_id, last=True)
        self._told.clear()

    def _tell(self, task_id: TaskID, *, last: bool = False) -> None:
        task = self._tasks.get(task_id)
        if not self._in_lines or task is None or not task.visible:
            return
        now = task.elapsed or 0.0
        done, then = self._told.get(task_id, (-1.0, -float("inf")))
        if last and task.completed == done:
            return
        if not last and now - then < max(LINES_APART_S, LINES_APART_SHARE * now):
            return
        cells = [column(task) for column in self.columns if isinstance(column, ProgressColumn)]
        words = [cell.plain.strip() for cell in cells if isinstance(cell, Text)]
        line = " ".join(filter(None, words))
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)
        self._told[task_id] = (task.completed, now)
