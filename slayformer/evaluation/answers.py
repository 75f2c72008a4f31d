"""The short training of small models on tasks whose answers are in the context."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from torch import Tensor

from slayformer.config import OptimizerConfig, ScheduleConfig
from slayformer.model.gpt2 import GPT2
from slayformer.progress import PlainProgress
from slayformer.training.small import answer_loss, train_small


@dataclass(frozen=True)
class Answers:
    """A batch: targets are IGNORE_INDEX but where a question is asked.

    `about` goes into the record of the update, `told` into the progress bar.
    """

    ids_BT: Tensor
    targets_BT: Tensor
    about: dict[str, Any]
    told: str
    position_ids_BT: Tensor | None = None


def train_on_answers(
    model: GPT2,
    draw: Callable[[int], Answers],
    *,
    updates: int,
    optimizer: OptimizerConfig,
    schedule: ScheduleConfig,
    metrics: Path,
    title: str,
    console: Console,
) -> GPT2:
    """Train `model` on `draw(update)` for each update and return it in evaluation mode.

    Every update leaves a record in `metrics`, JSON a line.
    """
    progress = PlainProgress(
        TextColumn(f"{title}: update"),
        MofNCompleteColumn(),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[told]}"),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
    )
    current: list[Answers] = []

    def loss(update: int) -> Tensor:
        current[:] = [draw(update)]
        ids_BT, targets_BT = current[0].ids_BT, current[0].targets_BT
        return answer_loss(model, ids_BT, targets_BT, position_ids_BT=current[0].position_ids_BT)

    with progress, metrics.open("w", encoding="utf-8") as records:
        task = progress.add_task("", total=updates, told="")

        def told(update: int, loss: float) -> None:
            record = {"kind": "train", "update": update, **current[0].about, "loss": loss}
            records.write(json.dumps(record) + "\n")
            records.flush()
            said = f"loss {loss:.3f} nats/answer at {current[0].told}"
            progress.update(task, advance=1, told=said)

        train_small(
            model,
            loss,
            updates=updates,
            optimizer=optimizer,
            schedule=schedule,
            told=told,
        )
    return model.eval()
