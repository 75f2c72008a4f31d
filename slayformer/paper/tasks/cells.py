"""One cell is a task, a mechanism and a seed: trained once, kept as a file, many at a time."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slayformer.attention.base import generator
from slayformer.config_loading import to_plain
from slayformer.data.shards import write_atomically
from slayformer.paper.tasks import task_named
from slayformer.paper.tasks.model import build_model
from slayformer.presets import load_preset
from slayformer.training.small import answer_loss, count_right, train_small
from slayformer.workers import worker_pool

# held-out sequences: the same for every mechanism and seed
EVALUATION_SEQUENCES = 2048
EVALUATION_SEED = 2**31 - 1
# at a time
EVALUATION_TOKENS = 16_384


@dataclass(frozen=True)
class Cell:
    """A task learned with a mechanism from a seed, in `updates` (None: as many as the task's)."""

    task: str
    mechanism: str
    seed: int
    updates: int | None = None

    @property
    def update_count(self) -> int:
        """How many updates it is trained for."""
        return self.updates or task_named(self.task).training.updates

    def settings(self) -> dict[str, Any]:
        """Return what the result depends on, as JSON holds it."""
        task = task_named(self.task)
        return {
            "task": {"name": task.name, "length": task.length, "vocabulary": task.vocabulary_size},
            "attention": to_plain(load_preset(self.mechanism)),
            "training": {**asdict(task.training), "updates": self.update_count},
            "seed": self.seed,
            "evaluation_sequences": EVALUATION_SEQUENCES,
        }

    def file(self, directory: Path) -> Path:
        """Return where the result is kept."""
        return directory / f"{self.task}-{self.mechanism}-seed{self.seed}.json"

    def result(self, directory: Path) -> dict[str, Any] | None:
        """Return the result kept in `directory`, None if there is none with these settings."""
        try:
            kept = json.loads(self.file(directory).read_text(encoding="utf-8"))
            return kept if kept["settings"] == self.settings() else None
        except (OSError, ValueError, KeyError, TypeError):
            return None


def train_cell(cell: Cell) -> dict[str, Any]:
    """Train and score `cell`; return its settings, accuracy on held-out sequences and seconds."""
    start = time.monotonic()
    task = task_named(cell.task)
    model = build_model(task, load_preset(cell.mechanism), cell.seed)
    draws, updates = generator(cell.seed), cell.update_count

    def loss(update: int) -> Tensor:
        return answer_loss(model, *task.lesson(task.training.samples, draws, update / updates))

    train_small(
        model,
        loss,
        updates=updates,
        optimizer=task.training.optimizer,
        schedule=task.training.schedule,
    )
    return {
        "settings": cell.settings(),
        "accuracy": accuracy(model.eval(), cell.task),
        "seconds": time.monotonic() - start,
    }


def accuracy(model: Any, task_name: str) -> float:
    """Return the share of answers on held-out sequences that the model gets right."""
    task, draws = task_named(task_name), generator(EVALUATION_SEED)
    right = asked = 0
    at_once = max(1, EVALUATION_TOKENS // task.length)
    for start in range(0, EVALUATION_SEQUENCES, at_once):
        samples = min(at_once, EVALUATION_SEQUENCES - start)
        hits, answers = count_right(model, *task.draw(samples, draws))
        right, asked = right + hits, asked + answers
    return right / asked


def train_cells(
    cells: Sequence[Cell],
    directory: Path,
    *,
    processes: int,
    progress: Callable[[float], None] = lambda share: None,
) -> list[dict[str, Any]]:
    """Return the results of `cells` in their order; those not kept in `directory` are trained.

    `progress` is told the share done, 0 to 1, by the tokens to train.
    """
    directory.mkdir(parents=True, exist_ok=True)
    missing = [cell for cell in cells if cell.result(directory) is None]
    total = sum(map(_tokens, missing))
    done = 0
    for cell, result in _train(missing, processes):
        text = json.dumps(result, indent=2).encode()
        write_atomically(cell.file(directory), (text,))
        done += _tokens(cell)
        progress(done / total)
    results = [cell.result(directory) for cell in cells]
    return [result for result in results if result is not None]


def _train(cells: Sequence[Cell], processes: int) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """Yield each cell with its result, as they end."""
    if processes == 1:
        for cell in cells:
            yield cell, train_cell(cell)
        return
    with worker_pool(processes, torch.set_num_threads, 1) as pool:
        # the longest first, so that none is left over when the others have ended
        futures = {
            pool.submit(train_cell, cell): cell for cell in sorted(cells, key=_tokens, reverse=True)
        }
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _tokens(cell: Cell) -> int:
    task = task_named(cell.task)
    return cell.update_count * task.training.samples * task.length
