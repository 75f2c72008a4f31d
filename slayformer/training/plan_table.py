"""The plan of a run as a table: everything derived, before anything is trained."""

from __future__ import annotations

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from slayformer.config import TrainConfig
from slayformer.model.gpt2 import GPT2
from slayformer.training.budget import Plan, memory_per_device_bytes
from slayformer.training.schedule import learning_rate

_PRECISIONS = {
    "fp32": "fp32",
    "bf16": "bf16 matrix products; weights, gradients, their sums and AdamW in fp32",
}


def own_parameters(model: GPT2) -> int:
    """Return the parameters of `model`, without the rows that pad its vocabulary."""
    padding = model.padded_vocabulary_size - model.vocabulary_size
    # a parameter that ZeRO stage 3 has sharded is empty, but knows its size
    elements = (
        getattr(parameter, "ds_numel", parameter.numel()) for parameter in model.parameters()
    )
    return sum(elements) - padding * model.model.width


def print_plan(
    console: Console, plan: Plan, config: TrainConfig, vocabulary_size: int, note: str = ""
) -> None:
    """Print everything `plan` derives, with parameters and FLOPs of the mechanism as it is."""
    with torch.device("meta"):
        model = GPT2(
            config.model, config.attention, vocabulary_size=vocabulary_size, seed=config.seed
        )
    parameters, flops_per_token = own_parameters(model), model.flops_per_token(plan.context_length)
    batch, stage = plan.segments[-1], config.engine.zero_stage
    last = len(plan.samples_of(plan.updates - 1))
    memory = memory_per_device_bytes(parameters, stage, plan.world_size)
    final = learning_rate(
        plan.updates - 1,
        plan.updates,
        peak=config.optimizer.learning_rate,
        schedule=config.schedule,
    )
    table = Table("", "", show_header=False, box=SIMPLE)
    table.add_row(
        "parameters",
        f"{plan.parameters.total:,} in the softmax model of this shape, "
        f"{plan.parameters.non_embedding:,} of them outside embeddings",
    )
    table.add_row("", f"{parameters:,} with attention={config.attention.name}")
    table.add_row("training", f"{plan.tokens:,} tokens{_budget_origin(config)}")
    table.add_row("", f"{plan.samples:,} samples of {plan.context_length:,} tokens")
    table.add_row("", f"{plan.updates:,} updates")
    for segment in plan.segments:
        first = segment.first_update + 1
        table.add_row(
            f"updates {first:,} to {segment.first_update + segment.updates:,}",
            f"{segment.samples_per_update:,} samples "
            f"({segment.samples_per_update * plan.context_length:,} tokens) each; forward passes "
            f"per device: {segment.accumulation:,} of at most {plan.micro_samples:,} samples",
        )
    if last != batch.samples_per_update:
        table.add_row("last update", f"{last:,} samples ({last * plan.context_length:,} tokens)")
    table.add_row(
        "learning rate",
        f"peak {config.optimizer.learning_rate:.2e} after {config.schedule.warmup_updates:,} "
        f"updates of warm-up, then {config.schedule.decay}, {final:.2e} in the last update",
    )
    table.add_row("forward pass", f"{flops_per_token:,} FLOPs per token")
    table.add_row("precision", _PRECISIONS[config.engine.precision])
    table.add_row("devices", f"{plan.world_size:,}, ZeRO stage {stage}{note}")
    table.add_row(
        "memory",
        f"about {memory / 2**20:,.0f} MiB per device for weights, gradients and AdamW, "
        f"without activations",
    )
    console.print(table, highlight=False)


def _budget_origin(config: TrainConfig) -> str:
    budget = config.budget
    if budget.tokens_per_parameter is None:
        return ""
    counted = budget.parameters.replace("_", "-")
    return f" ({budget.tokens_per_parameter:g} per {counted} parameter)"
