"""Checks of a whole configuration: each value alone, then beside the others."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from slayformer.config import (
    SOURCE_FIELDS,
    DataConfig,
    EngineConfig,
    ModelConfig,
    ScheduleConfig,
    SourceConfig,
    TrainConfig,
)
from slayformer.config_commands import LongContextConfig, LongContextModelConfig, RecallConfig
from slayformer.errors import ConfigError, nearest


def validate(config: Any) -> None:
    """Check every value of a configuration.

    Raises ConfigError for the first that cannot work, alone or beside the others.
    """
    check_fields(config, prefix="")
    if isinstance(config, TrainConfig | RecallConfig | LongContextConfig):
        _validate_model(config.model)
        _validate_schedule(config.schedule)
    if isinstance(config, TrainConfig):
        _validate_train(config)
    if isinstance(config, RecallConfig):
        _validate_recall(config)
    if isinstance(config, LongContextConfig):
        _validate_long_context(config)


def check_fields(config: Any, prefix: str) -> None:
    """Check each field of a dataclass, nested ones too, against what its declaration says."""
    for item in fields(config):
        value, path = getattr(config, item.name), prefix + item.name
        if is_dataclass(value):
            check_fields(value, f"{path}.")
        elif value is not None:
            if isinstance(value, float) and not math.isfinite(value):
                raise ConfigError(path, value, "must be a finite number")
            choices = item.metadata.get("choices")
            if choices is not None and value not in choices:
                raise ConfigError(path, value, nearest(str(value), map(str, choices)))
            if not item.metadata.get("holds", lambda _: True)(value):
                raise ConfigError(path, value, item.metadata["wanted"])


# the option of group budget that sets each amount
BUDGET_OPTIONS = {
    "tokens": "tokens",
    "updates": "updates",
    "samples": "samples",
    "tokens_per_parameter": "chinchilla",
}


def _exactly_one(config: Any, group: str, options: Mapping[str, str | None]) -> None:
    """Check that one of the fields `options` is set; its value is the group's option that does."""
    chosen = [name for name in options if getattr(config, name) is not None]
    if len(chosen) == 1:
        return
    # two are set because one was asked for and the default is the other: tell how to write each
    ways = []
    for name in chosen or options:
        option, value = options[name], getattr(config, name) or "NUMBER"
        others = [f"{group}.{other}=null" for other in chosen if other != name]
        lead = [f"{group}={option}"] if option else others
        ways.append(" ".join([*lead, f"{group}.{name}={value}"]))
    given = " and ".join(chosen) or "nothing"
    raise ConfigError(group, given, f"set exactly one: use {', or '.join(ways)}")


def _validate_model(model: ModelConfig | LongContextModelConfig) -> None:
    if model.width % model.heads:
        divisors = [h for h in range(1, model.width + 1) if model.width % h == 0]
        near = sorted(divisors, key=lambda h: abs(h - model.heads))[:2]
        hint = f"must divide model.width={model.width}; nearest: {sorted(near)}"
        raise ConfigError("model.heads", model.heads, hint)


def _validate_schedule(schedule: ScheduleConfig) -> None:
    _exactly_one(schedule, "schedule", dict.fromkeys(("warmup_updates", "warmup_tokens")))
    if schedule.warmup_tokens is not None and schedule.unit != "tokens":
        hint = "needs schedule.unit=tokens"
        raise ConfigError("schedule.warmup_tokens", schedule.warmup_tokens, hint)


def _validate_train(config: TrainConfig) -> None:
    tokenizer = config.tokenizer
    if tokenizer.name == "bpe":
        if tokenizer.vocabulary_size is None or tokenizer.vocabulary_size < 257:
            hint = "the bpe tokenizer needs at least 257 (256 bytes and end-of-text)"
            raise ConfigError("tokenizer.vocabulary_size", tokenizer.vocabulary_size, hint)
    elif tokenizer.vocabulary_size is not None:
        hint = f"the {tokenizer.name} tokenizer has a fixed size; leave it null or use bpe"
        raise ConfigError("tokenizer.vocabulary_size", tokenizer.vocabulary_size, hint)
    _validate_source(config.data.source, "data.source")
    if config.data.validation_source is not None:
        _validate_source(config.data.validation_source, "data.validation_source")
    _exactly_one(config.budget, "budget", BUDGET_OPTIONS)
    batch_fields = ("samples_per_update", "samples_per_device")
    _exactly_one(config.batch, "batch", dict.fromkeys(batch_fields))
    ramp = config.batch.ramp
    if ramp is not None:
        _exactly_one(ramp, "batch.ramp", dict.fromkeys(("updates", "samples")))
    size = config.batch.samples_per_update or config.batch.samples_per_device
    if ramp is not None and size is not None:
        if ramp.start_samples > size:
            hint = f"must not be above the full batch of {size} samples"
            raise ConfigError("batch.ramp.start_samples", ramp.start_samples, hint)
        if (size - ramp.start_samples) % ramp.increment_samples:
            hint = f"must divide the rise of {size - ramp.start_samples} samples"
            raise ConfigError("batch.ramp.increment_samples", ramp.increment_samples, hint)
    if config.data.validation_source is None and config.data.validation_fraction == 0:
        hint = "must be above 0 unless data.validation_source is set"
        raise ConfigError("data.validation_fraction", 0, hint)
    _validate_parts(config.data)
    if config.run_directory == "":
        raise ConfigError("run_directory", "''", "name a folder, or null for a new one in runs")
    if config.resume == "auto" and config.run_directory is None:
        raise ConfigError("resume", "auto", "needs run_directory, the run to go on with")
    _validate_engine(config.engine)
    if config.attention.redraws():
        # the backward pass and every rank need what the forward pass drew
        for name, off in (("activation_checkpointing", "none"), ("context_parallel", 1)):
            value = getattr(config.engine, name)
            if value != off:
                hint = f"cannot follow draws that change in training; use {off}, or redraw_every=0"
                raise ConfigError(f"engine.{name}", value, hint)


def _validate_source(source: SourceConfig, field: str) -> None:
    taken = SOURCE_FIELDS[source.kind]
    if "path" in taken and not source.path:
        what = "FOLDER_OR_FILE" if source.kind == "text" else "DATASET_OR_FOLDER"
        hint = f"a {source.kind} source needs {field}.path={what}"
        raise ConfigError(f"{field}.path", source.path, hint)
    for item in fields(source):
        value = getattr(source, item.name)
        if item.name not in ("kind", *taken) and value != item.default:
            having = [kind for kind, names in SOURCE_FIELDS.items() if item.name in names]
            hint = f"has no effect with {field}.kind={source.kind}, but with {' or '.join(having)}"
            raise ConfigError(f"{field}.{item.name}", value, hint)


def _validate_parts(data: DataConfig) -> None:
    if data.parts is None and (data.processes > 1 or data.part is not None):
        name, value = ("processes", data.processes) if data.processes > 1 else ("part", data.part)
        hint = "needs data.parts=NUMBER, the parts that are prepared at the same time"
        raise ConfigError(f"data.{name}", value, hint)
    if data.part is not None:
        numbers = re.fullmatch(r"([1-9]\d{0,5})/([1-9]\d{0,5})", data.part)
        if numbers is None or int(numbers[1]) > int(numbers[2]):
            hint = "is written i/n, with i from 1 to n: data.part=2/8"
            raise ConfigError("data.part", data.part, hint)


# settings of DeepSpeed that an option of ours sets, or that would change what an update means
OWN_DEEPSPEED_SETTINGS = {
    "bf16": "it rounds the weights to bf16, and without ZeRO gradients and their norm go wrong; "
    "engine.precision=bf16 keeps them in fp32",
    "bfloat16": "use engine.precision=bf16",
    "amp": "use engine.precision",
    "fp16": "engine.precision=fp16 scales the loss and keeps weights and gradients in fp32",
    "torch_autocast": "it reduces gradients in half precision; use engine.precision",
    "data_types": "gradients are summed in fp32",
    "communication_data_type": "gradients are summed in fp32",
    "optimizer": "use the group optimizer",
    "scheduler": "use the group schedule",
    "gradient_clipping": "use optimizer.gradient_clipping",
    "train_batch_size": "the plan sets it from the group batch",
    "train_micro_batch_size_per_gpu": "use batch.micro_samples",
    "gradient_accumulation_steps": "it follows from the group batch",
    "zero_optimization.stage": "use engine.zero_stage",
    "zero_optimization.offload_optimizer": "use engine.offload_optimizer",
}


def _validate_engine(engine: EngineConfig) -> None:
    if engine.offload_optimizer and engine.zero_stage == 0:
        hint = "DeepSpeed moves the optimizer to the CPU from engine.zero_stage=1 on"
        raise ConfigError("engine.offload_optimizer", True, hint)
    if engine.compile and engine.zero_stage == 3:
        hint = "stage 3 gathers weights around every layer, which breaks every graph: use stage 2"
        raise ConfigError("engine.compile", True, hint)
    if engine.compile and engine.context_parallel > 1:
        hint = "blocks that exchange stretches of a sequence are not compiled; use false"
        raise ConfigError("engine.compile", True, hint)
    for path, reason in OWN_DEEPSPEED_SETTINGS.items():
        found: Any = engine.deepspeed
        for name in path.split("."):
            found = found.get(name) if isinstance(found, dict) else None
        if found is not None:
            raise ConfigError(f"engine.deepspeed.{path}", found, reason)


def _validate_answers(config: RecallConfig | LongContextConfig) -> None:
    """Refuse what the short training on answers does not do."""
    schedule = config.schedule
    if schedule.warmup_tokens is not None:
        hint = "this training counts its warm-up in updates; use schedule.warmup_updates"
        raise ConfigError("schedule.warmup_tokens", schedule.warmup_tokens, hint)
    warmup = schedule.warmup_updates
    if warmup is not None and warmup > config.updates:
        hint = f"longer than the run of {config.updates} updates; use at most {config.updates}"
        raise ConfigError("schedule.warmup_updates", warmup, hint)
    if config.optimizer.z_loss:
        hint = "this training is on the plain cross entropy; use 0"
        raise ConfigError("optimizer.z_loss", config.optimizer.z_loss, hint)


def _validate_recall(config: RecallConfig) -> None:
    _validate_answers(config)
    if not config.pairs or min(config.pairs) < 1:
        raise ConfigError("pairs", config.pairs, "name at least one number, each above 0")
    most = max(config.pairs)
    if most > config.keys:
        raise ConfigError("pairs", most, f"keys of a sequence differ: at most keys={config.keys}")
    if 4 * most > config.model.context_length:
        hint = f"{most} pairs told and asked take {4 * most} tokens: set model.context_length so"
        raise ConfigError("pairs", most, hint)
    if config.tokens_per_update < 4 * most:
        hint = f"a sequence of {most} pairs alone takes {4 * most} tokens"
        raise ConfigError("tokens_per_update", config.tokens_per_update, hint)


def _validate_long_context(config: LongContextConfig) -> None:
    _validate_answers(config)
    if not config.attention or len(set(config.attention)) < len(config.attention):
        raise ConfigError("attention", config.attention, "name at least one, and each once")
    if config.pairs > config.keys:
        hint = f"keys of a haystack differ: at most keys={config.keys}"
        raise ConfigError("pairs", config.pairs, hint)
    for name in ("training_lengths_tokens", "lengths_tokens"):
        lengths = getattr(config, name)
        if not lengths or min(lengths) < 2 * config.pairs:
            hint = f"name at least one; {config.pairs} pairs take {2 * config.pairs} tokens"
            raise ConfigError(name, lengths, hint)
    longest = max(config.training_lengths_tokens) + 2 * config.pairs * config.training_rounds
    if config.tokens_per_update < longest:
        hint = f"the longest haystack with its questions takes {longest} tokens"
        raise ConfigError("tokens_per_update", config.tokens_per_update, hint)
