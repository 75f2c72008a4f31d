"""`scripts/tasks.py`: chosen tasks, mechanisms and seeds, trained and written as tables."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from slayformer.config import positive, seed_numbers
from slayformer.cores import usable_cores
from slayformer.errors import ConfigError
from slayformer.paper.files import write_picture, write_table
from slayformer.paper.render import markdown
from slayformer.paper.synthetic_tasks import draw, measure, tables
from slayformer.paper.tasks import TASKS, task_named
from slayformer.presets import load_preset
from slayformer.progress import PlainProgress


@dataclass
class TasksConfig:
    """Everything `scripts/tasks.py` is told."""

    mechanisms: list[str]
    seeds: list[int] = seed_numbers()  # noqa: RUF009, it gives a field
    # null: all
    tasks: list[str] | None = None
    # null: as many as each task's own
    updates: int | None = positive(None)
    # null: one a core
    processes: int | None = positive(None)
    directory: str = "tasks_results"


def run(config: TasksConfig) -> None:
    """Train what the directory does not keep, write tables and picture, and print them.

    Raises ConfigError for a task or mechanism that does not exist.
    """
    for key in ("mechanisms", "seeds", "tasks"):
        values = getattr(config, key)
        if values is not None and (not values or len(set(values)) < len(values)):
            raise ConfigError(key, values, "name at least one, and each once")
    for name in config.mechanisms:
        load_preset(name)
    chosen = [*TASKS] if config.tasks is None else [task_named(name).name for name in config.tasks]
    for name in chosen:
        warmup = TASKS[name].training.schedule.warmup_updates or 0
        if config.updates is not None and config.updates < warmup:
            hint = f"{name} warms up for {warmup}; use at least as many, or leave {name} out"
            raise ConfigError("updates", config.updates, hint)
    directory, console = Path(config.directory), Console()
    with PlainProgress(console=console) as bar:
        task = bar.add_task("training", total=1.0)
        data = measure(
            chosen,
            config.mechanisms,
            config.seeds,
            directory / "cells",
            processes=config.processes or usable_cores(),
            updates=config.updates,
            progress=lambda share: bar.update(task, completed=share),
        )
    for table in tables(data):
        write_table(directory, table)
        console.print(markdown(table), soft_wrap=True, highlight=False, markup=False)
    for picture in draw(data):
        write_picture(directory, picture)
    console.print(str(directory), soft_wrap=True, highlight=False, markup=False)
