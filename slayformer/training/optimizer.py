"""AdamW with weight decay on matrices, and by option on embeddings and vectors."""

from __future__ import annotations

import torch
from torch import nn

from slayformer.config import OptimizerConfig


def parameter_groups(model: nn.Module, config: OptimizerConfig) -> list[dict]:
    """Split the trainable parameters by weight decay and learning rate scale.

    Matrices are decayed; embeddings and vectors (norms, biases) as `config` says. A parameter of a
    mechanism may say `no_weight_decay`, and `learning_rate_scale`, which its group carries.
    """
    embeddings = {
        id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)
    }
    groups: dict[tuple[bool, float], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        if getattr(parameter, "no_weight_decay", False):
            decayed = False
        elif id(parameter) in embeddings:
            decayed = config.decay_embeddings
        else:
            decayed = parameter.ndim >= 2 or config.decay_vectors
        scale = getattr(parameter, "learning_rate_scale", 1.0)
        groups.setdefault((decayed, scale), []).append(parameter)
    return [
        {
            "params": parameters,
            "weight_decay": config.weight_decay if decayed else 0.0,
            "learning_rate_scale": scale,
        }
        for (decayed, scale), parameters in groups.items()
    ]


def build_optimizer(
    model: nn.Module, config: OptimizerConfig, device: torch.device
) -> torch.optim.AdamW:
    """Return torch's AdamW over `model`, fused where `device` has it.

    The learning rate is the peak; the loop sets the one of each update.
    """
    return torch.optim.AdamW(
        parameter_groups(model, config),
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        fused=device.type in ("cpu", "cuda"),
    )
