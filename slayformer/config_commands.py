"""What the commands beside train.py are told: schemas as in config.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from slayformer.config import (
    ModelConfig,
    OptimizerConfig,
    ScheduleConfig,
    convolution_width,
    one_of,
    positive,
    seed_number,
)


@dataclass
class EvalSourceConfig:
    """What `eval.py` reads otherwise than the file in configs/data says that `data` names.

    A `path` comes without that file's dataset name.
    """

    path: str | None = None
    name: str | None = None
    split: str | None = None
    text_field: str | None = None
    document_start: str | None = None


@dataclass
class EvalConfig:
    """Everything `eval.py` is told. `checkpoint` is one path (or name of the hub) or a list.

    `data` null: the validation tokens of the run that made the checkpoint. A file or folder of
    text, a folder of Parquet files, or the name of a file in configs/data: its documents, with
    the run's tokenizer.
    """

    checkpoint: Any
    data: str | None = None
    source: EvalSourceConfig = field(default_factory=EvalSourceConfig)
    # null: the context the model was trained with
    context_length: int | None = positive(None)
    # which position embedding a token beyond the trained context gets (null: none, an error)
    positions: str | None = one_of("repeat", "interpolate", default=None)
    # new tokens a window scores, the others being their context (null: windows side by side)
    stride: int | None = positive(None)
    # most tokens to score (null: as validation in training did, or all of `data`)
    tokens: int | None = positive(None)
    batch_samples: int = positive(8)
    # write the numbers here as well, and draw the loss by position in the context
    json: str | None = None
    figure: str | None = None


@dataclass
class RecallConfig:
    """Everything `scripts/recall.py` is told: a model, how it is trained, and the task's sizes."""

    attention: Any
    model: ModelConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    # numbers of key-value pairs in a sequence
    pairs: list[int]
    # different keys and values
    keys: int = positive()
    values: int = positive()
    updates: int = positive()
    tokens_per_update: int = positive()
    # held-out sequences for each number of pairs
    evaluation_samples: int = positive()
    seed: int = seed_number(0)
    # null: runs/recall-<mechanism>-<time>
    run_directory: str | None = None


@dataclass
class CompareConfig:
    """Everything `scripts/compare.py` is told for itself; all else goes to each run."""

    attention: list[str]
    seeds: list[int]
    # null: comparisons/<time>; an existing one goes on where it stopped
    directory: str | None = None
    # differences are to this mechanism (null: softmax, if it is one of them)
    baseline: str | None = None
    # measure associative recall as well, as scripts/recall.py does
    recall: bool = False
    # processes of a run, one a GPU, started by DeepSpeed's launcher
    processes: int = positive(1)
    # runs at a time
    jobs: int = positive(1)
    # CPU threads of a process (null: the usable cores divided by the processes at a time)
    threads: int | None = positive(None)


@dataclass
class ReportConfig:
    """Everything `scripts/report.py` is told beside the folders."""

    # null: the folder of runs, if there is one alone; reports/<time> otherwise
    directory: str | None = None
    # differences are to this mechanism (null: softmax, if it is one of them)
    baseline: str | None = None
    # show in red what makes the comparison unfair, instead of refusing it
    allow_differences: bool = False


@dataclass
class LongContextModelConfig:
    """Shape of the models of `scripts/long_context.py`, which have no context of a fixed length."""

    layers: int = positive()
    heads: int = positive()
    width: int = positive()
    mlp_ratio: int = positive(4)
    short_convolution: int = convolution_width(0)


@dataclass
class LongContextConfig:
    """Everything `scripts/long_context.py` is told."""

    attention: list[str]
    model: LongContextModelConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    # lengths of the haystacks that are trained on and measured
    training_lengths_tokens: list[int]
    lengths_tokens: list[int]
    # key-value pairs in a haystack, and how many different keys, values and filler tokens there are
    pairs: int = positive()
    keys: int = positive()
    values: int = positive()
    fillers: int = positive()
    # how often training asks for each pair; measuring asks once
    training_rounds: int = positive()
    updates: int = positive()
    tokens_per_update: int = positive()
    # haystacks of each length, and the most tokens that are read of one length: fewer haystacks
    samples: int = positive()
    read_tokens: int = positive()
    # the same for mechanisms whose state does not grow
    constant_state_read_tokens: int = positive()
    # tokens read at once
    segment_tokens: int = positive()
    seed: int = seed_number(0)
    # null: long_contexts/<time>
    directory: str | None = None
