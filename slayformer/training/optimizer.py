"""AdamW with weight decay on matrices only."""

from __future__ import annotations

import torch
from torch import nn

from slayformer.config import OptimizerConfig


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Split the trainable parameters: matrices are decayed, vectors (norms, biases) are not."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(
    model: nn.Module, config: OptimizerConfig, device: torch.device
) -> torch.optim.AdamW:
    """Return torch's AdamW over `model`, fused where `device` has it.

    The learning rate is the peak; the loop sets the one of each update.
    """
    return torch.optim.AdamW(
        parameter_groups(model, config.weight_decay),
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        fused=device.type in ("cpu", "cuda"),
    )
