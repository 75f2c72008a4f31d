"""The plan of a run as a table: everything derived, before anything is trained."""

from __future__ import annotations

import math

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from slayformer.config import TrainConfig
from slayformer.model.gpt2 import GPT2
from slayformer.training.budget import Plan
from slayformer.training.devices import found_device, known_devices, named_device
from slayformer.training.memory import Memory, estimate_memory
from slayformer.training.meters import BACKWARD_PER_FORWARD
from slayformer.training.schedule import learning_rate

_FP32_REST = "matrix products; weights, gradients, their sums and AdamW in fp32"
_PRECISIONS = {
    "fp32": "fp32",
    "bf16": f"bf16 {_FP32_REST}",
    "fp16": f"fp16 {_FP32_REST}; dynamic loss scaling",
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
    parameters, forward = own_parameters(model), model.flops_per_token(plan.context_length)
    batch = plan.segments[-1]
    last = len(plan.samples_of(plan.updates - 1))
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
    table.add_row("learning rate", _schedule(plan, config))
    backward = BACKWARD_PER_FORWARD * forward
    table.add_row("compute", f"{forward:,} FLOPs per token forward, {backward:,} backward")
    table.add_row("precision", _PRECISIONS[config.engine.precision])
    table.add_row("devices", f"{plan.world_size:,}, ZeRO stage {config.engine.zero_stage}{note}")
    if plan.context_parallel > 1:
        most = math.ceil(plan.context_length / plan.context_parallel)
        table.add_row(
            "",
            f"{plan.context_parallel:,} share a sequence, at most {most:,} of its tokens each; "
            f"such groups with samples of their own: {plan.data_parallel:,}",
        )
    memory = estimate_memory(
        config,
        parameters=parameters,
        vocabulary_size=vocabulary_size,
        world_size=plan.world_size,
        on_cpu=config.engine.planned_device is None and not torch.cuda.is_available(),
        state_bytes=model.state_bytes(plan.context_length),
    )
    for label, told in _memory(memory).items():
        table.add_row(label, told)
    table.add_row("time", _time(plan, config, forward + backward))
    console.print(table, highlight=False)


def _budget_origin(config: TrainConfig) -> str:
    budget = config.budget
    if budget.tokens_per_parameter is None:
        return ""
    counted = budget.parameters.replace("_", "-")
    return f" ({budget.tokens_per_parameter:g} per {counted} parameter)"


def _schedule(plan: Plan, config: TrainConfig) -> str:
    schedule, peak = config.schedule, config.optimizer.learning_rate
    final = learning_rate(
        plan.updates - 1, plan.updates, peak=peak, schedule=schedule, tokens_at=plan.tokens_at
    )
    if schedule.warmup_tokens is None:
        warmup = f"{schedule.warmup_updates:,} updates"
    else:
        warmup = f"{schedule.warmup_tokens:,} tokens"
    decay = schedule.decay
    if decay == "wsd":
        decay = f"constant, then linear over the last {100 * schedule.decay_share:g} %"
    return (
        f"peak {peak:.2e} after {warmup} of warm-up, then {decay}, {final:.2e} in the last update, "
        f"by {schedule.unit}"
    )


def _memory(memory: Memory) -> dict[str, str]:
    """Return rows of the table by their labels."""

    def mib(size: int) -> str:
        return f"{size / 2**20:,.0f} MiB"

    rows = {
        "memory": f"about {mib(memory.total)} per device: weights {mib(memory.weights)}, gradients "
        f"{mib(memory.gradients)}, AdamW {mib(memory.optimizer)}, activations "
        f"{mib(memory.activations)}"
    }
    if memory.host:
        rows["host memory"] = f"about {mib(memory.host)} per device: AdamW"
    return rows


def _time(plan: Plan, config: TrainConfig, flops_per_token: int) -> str:
    """Return how long the updates take, without data, validation and saving."""
    engine = config.engine
    device = found_device(engine.precision)
    if engine.planned_device is not None:
        device = named_device(engine.planned_device, engine.precision)
    flops = plan.samples * plan.context_length * flops_per_token
    if device.peak_flops is None:
        return (
            f"{flops:.3g} FLOPs; no estimate of hours: the peak of {device.name} is not known; set "
            f"engine.planned_device to one of {known_devices()}"
        )
    peak = plan.world_size * device.peak_flops
    hours = flops / (peak * engine.planned_utilisation) / 3600
    return (
        f"about {hours:,.2f} hours on {plan.world_size} x {device.name} for {flops:.3g} FLOPs, "
        f"assuming {100 * engine.planned_utilisation:g} % of {device.peak_flops / 1e12:g} TFLOP/s "
        f"each (engine.planned_utilisation)"
    )
