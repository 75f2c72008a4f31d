"""Training a small model on one device: a loop without an engine, for tasks of minutes.

A model here gives hidden states by `model(ids)` and, of those asked for, `model.logits(hidden)`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slayformer.config import OptimizerConfig, ScheduleConfig
from slayformer.training.objective import IGNORE_INDEX
from slayformer.training.optimizer import build_optimizer
from slayformer.training.schedule import learning_rate


def train_small(
    model: nn.Module,
    loss: Callable[[int], Tensor],
    *,
    updates: int,
    optimizer: OptimizerConfig,
    schedule: ScheduleConfig,
    told: Callable[[int, float], None] = lambda update, loss: None,
) -> None:
    """Train `model` in place on `loss`, which is given the number of the update, from 0.

    `told` is called after each update with its number, from 1, and its loss.
    """
    device = next(model.parameters()).device
    adamw = build_optimizer(model, optimizer, device)
    model.train()
    for update in range(updates):
        value = loss(update)
        value.backward()
        if optimizer.gradient_clipping:
            torch.nn.utils.clip_grad_norm_(model.parameters(), optimizer.gradient_clipping)
        rate = learning_rate(update, updates, peak=optimizer.learning_rate, schedule=schedule)
        for group in adamw.param_groups:
            group["lr"] = rate * group["learning_rate_scale"]
        adamw.step()
        adamw.zero_grad()
        told(update + 1, value.item())


def answer_loss(model: Any, ids_BT: Tensor, targets_BT: Tensor, **inputs: Any) -> Tensor:
    """Return the mean cross entropy of the answers in nats; none is asked for at IGNORE_INDEX.

    `inputs` are more arguments of the model.
    """
    hidden_BTC, _ = model(ids_BT, **inputs)
    asked_BT = targets_BT != IGNORE_INDEX
    return F.cross_entropy(model.logits(hidden_BTC[asked_BT]), targets_BT[asked_BT])


@torch.no_grad()
def count_right(model: Any, ids_BT: Tensor, targets_BT: Tensor) -> tuple[int, int]:
    """Return how many answers the model's most likely token gets right, and how many there are."""
    hidden_BTC, _ = model(ids_BT)
    asked_BT = targets_BT != IGNORE_INDEX
    answers = model.logits(hidden_BTC[asked_BT]).argmax(dim=-1)
    return int((answers == targets_BT[asked_BT]).sum()), answers.numel()
