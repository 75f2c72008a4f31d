"""The short training of small models on tasks whose answers are in the context."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from torch.nn import functional as F

from slayformer.config import OptimizerConfig, ScheduleConfig
from slayformer.model.gpt2 import GPT2
from slayformer.training.objective import IGNORE_INDEX
from slayformer.training.optimizer import build_optimizer
from slayformer.training.schedule import learning_rate


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
    optimizer_config: OptimizerConfig,
    schedule: ScheduleConfig,
    metrics: Path,
    title: str,
    console: Console,
) -> GPT2:
    """Train `model` on `draw(update)` for each update and return it in evaluation mode.

    Every update leaves a record in `metrics`, JSON a line.
    """
    device = model.token_embedding.weight.device
    optimizer = build_optimizer(model, optimizer_config, device)
    progress = Progress(
        TextColumn(f"{title}: update"),
        MofNCompleteColumn(),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[told]}"),
        TimeRemainingColumn(),
        console=console,
    )
    with progress, metrics.open("w", encoding="utf-8") as records:
        task = progress.add_task("", total=updates, told="")
        for update in range(updates):
            answers = draw(update)
            loss = _loss(model, answers)
            loss.backward()
            if optimizer_config.gradient_clipping:
                torch.nn.utils.clip_grad_norm_(
                    model.parameters(), optimizer_config.gradient_clipping
                )
            rate = learning_rate(
                update, updates, peak=optimizer_config.learning_rate, schedule=schedule
            )
            for group in optimizer.param_groups:
                group["lr"] = rate * group["learning_rate_scale"]
            optimizer.step()
            optimizer.zero_grad()
            record = {"kind": "train", "update": update + 1, **answers.about, "loss": loss.item()}
            records.write(json.dumps(record) + "\n")
            records.flush()
            told = f"loss {record['loss']:.3f} nats/answer at {answers.told}"
            progress.update(task, advance=1, told=told)
    return model.eval()


def _loss(model: GPT2, answers: Answers) -> Tensor:
    """Return the mean cross entropy of the answers in nats."""
    hidden_BTC, _ = model(answers.ids_BT, position_ids_BT=answers.position_ids_BT)
    asked_BT = answers.targets_BT != IGNORE_INDEX
    return F.cross_entropy(model.logits(hidden_BTC[asked_BT]), answers.targets_BT[asked_BT])
