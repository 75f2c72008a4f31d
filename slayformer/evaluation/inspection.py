"""From mechanisms or a checkpoint to a table of how they attend: terminal, Markdown, JSON, PNG."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from rich.console import Console

from slayformer.config import positive
from slayformer.config_loading import fill_list, load_config
from slayformer.data.loader import Batch, WindowLoader
from slayformer.data.prepare import prepare
from slayformer.errors import ConfigError, DataError, UserError
from slayformer.evaluation.attention_sample import COSINES
from slayformer.evaluation.fidelity import (
    NORMALISER_EDGES,
    STATE_TOKENS,
    UNIFORM,
    Measurement,
    Spread,
    measure,
    measure_model,
    with_uniform,
)
from slayformer.evaluation.inspection_figure import draw
from slayformer.evaluation.progress import progress_bar
from slayformer.finite import strict_json
from slayformer.presets import load_preset, preset_names
from slayformer.tables import markdown_table

RANDOM_DEFAULTS: dict[str, Any] = {"attention": ["slay"], "head_dim": [64, 32], "length": 256}


@dataclass
class InspectConfig:
    """Everything `scripts/inspect_attention.py` is told; null chooses what the YAML says."""

    attention: list[str] | None = None
    checkpoint: str | None = None
    head_dim: list[int] | None = None
    length: int | None = positive(None)
    seeds: int = positive(20)
    directory: str | None = None


def _share(share: float) -> str:
    return f"{100 * share:.1f}"


def _spread(spread: Spread) -> str:
    mean = f"{spread.mean:.3f}"
    return mean if spread.std is None else f"{mean} ±{spread.std:.3f}"


COLUMNS: dict[str, Callable[[Measurement], str]] = {
    "relative error": lambda row: _spread(row.relative_error),
    "cosine": lambda row: _spread(row.cosine),
    "entropy (nats)": lambda row: _spread(row.entropy_nats),
    "normaliser ≤ 0 (% of rows)": lambda row: _share(row.nonpositive_share),
    "guarded (% of rows)": lambda row: _share(row.guarded_share),
    "weights": lambda row: "≥ 0" if row.positive else "signed",
    "time per token": lambda row: "constant" if row.constant_time else "grows with T",
    "features": lambda row: "–" if row.features is None else f"{row.features:,}",
    f"state (bytes a head at {STATE_TOKENS:,} tokens)": lambda row: f"{row.state_bytes:,}",
    "parameters a head": lambda row: f"{row.parameters:,}",
}
# what the terminal shows, in 80 columns
TERMINAL_COLUMNS: dict[str, Callable[[Measurement], str]] = {
    "relative error": COLUMNS["relative error"],
    "cosine": lambda row: f"{row.cosine.mean:.3f}",
    "entropy (nats)": lambda row: f"{row.entropy_nats.mean:.2f}",
    "z ≤ 0 (%)": COLUMNS["normaliser ≤ 0 (% of rows)"],
    "guarded (%)": COLUMNS["guarded (% of rows)"],
    "state (KiB)": lambda row: f"{row.state_bytes / 1024:,.{0 if row.state_bytes > 2**20 else 1}f}",
    "weights": COLUMNS["weights"],
}


def read_config(composed: DictConfig) -> InspectConfig:
    """Return the checked configuration; one value stands for a list of it, `all` for every option.

    Raises ConfigError for a value that cannot work.
    """
    fill_list(composed, "attention", preset_names())
    fill_list(composed, "head_dim")
    config: InspectConfig = load_config(composed, InspectConfig)
    for key in ("attention", "head_dim"):
        values = getattr(config, key)
        if values is not None and (not values or len(set(values)) < len(values)):
            raise ConfigError(key, values, "name at least one, and each once")
    for width in config.head_dim or []:
        if width < 2:
            raise ConfigError("head_dim", width, "must be 2 or greater")
    if config.checkpoint is None:
        for key, value in RANDOM_DEFAULTS.items():
            if getattr(config, key) is None:
                setattr(config, key, value)
        return config
    for key in ("attention", "head_dim"):
        if getattr(config, key) is not None:
            raise ConfigError(key, getattr(config, key), "a checkpoint has its own; leave it null")
    return config


def run(config: InspectConfig) -> Path:
    """Measure, print the table, write the files, and return the folder they are in.

    Raises UserError if a mechanism, the checkpoint, its data or the folder cannot be used.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("inspect_attention.py works in one process: run it without a launcher")
    directory = Path(config.directory or time.strftime("inspections/%Y-%m-%d_%H-%M-%S"))
    if config.checkpoint is None:
        rows, about = _inspect_random(config, directory)
    else:
        rows, about = _inspect_checkpoint(config, directory)
    notes = [about, *_notes(rows)]
    _print(rows, about)
    record = {
        "notes": notes,
        "cosines": COSINES.tolist(),
        "normaliser_edges": NORMALISER_EDGES.tolist(),
        "rows": [strict_json(asdict(row)) for row in rows],
    }
    (directory / "table.md").write_text(_markdown(rows, notes), encoding="utf-8")
    (directory / "table.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    draw(directory / "attention.png", _shown(rows), about)
    console = Console()
    for name in ("table.md", "table.json", "attention.png"):
        console.print(str(directory / name), soft_wrap=True, highlight=False, markup=False)
    return directory


def _inspect_random(config: InspectConfig, directory: Path) -> tuple[list[Measurement], str]:
    """Return the rows for iid Gaussian vectors, and what was measured in one sentence."""
    assert config.attention is not None
    assert config.head_dim is not None
    assert config.length is not None
    options = with_uniform([load_preset(name) for name in config.attention])
    _make(directory)
    rows = []
    total = len(config.head_dim) * len(options) * config.seeds
    with progress_bar() as progress:
        task = progress.add_task("measuring", total=total)
        for head_dim in config.head_dim:
            rows += measure(
                options,
                head_dim=head_dim,
                length=config.length,
                seeds=config.seeds,
                progress=lambda: progress.advance(task),
            )
    about = f"iid Gaussian q, k, v of one head, {config.length:,} tokens"
    return rows, f"{about}, {_count(config.seeds, 'seed')}"


def _inspect_checkpoint(config: InspectConfig, directory: Path) -> tuple[list[Measurement], str]:
    """Return a row for each layer of the checkpoint, and what was measured in one sentence."""
    from slayformer.training.checkpoint import find_checkpoint, load_model

    assert config.checkpoint is not None
    path = find_checkpoint(Path(config.checkpoint))
    loaded = load_model(path)
    length = config.length or loaded.model.context_length
    if length > loaded.model.context_length:
        hint = f"the model was made for at most {loaded.model.context_length} tokens"
        raise ConfigError("length", length, hint)
    prepared = prepare(loaded.config.data, loaded.config.tokenizer)
    if prepared.tokenizer.identity != loaded.tokenizer.identity:
        raise DataError(
            f"{prepared.directory} has another tokenizer than {path}: the documents have changed "
            f"since the checkpoint was saved"
        )
    loader = WindowLoader(
        prepared.validation,
        context_length=length,
        seed=None,
        end_of_text=loaded.tokenizer.end_of_text,
        isolate_documents=loaded.config.data.isolate_documents,
    )
    count = min(config.seeds, loader.windows)
    _make(directory)

    def windows() -> Iterator[Batch]:
        for index in range(count):
            yield loader.batch([index])

    with progress_bar() as progress:
        task = progress.add_task("measuring", total=count * loaded.config.model.layers)
        rows = measure_model(loaded.model, windows(), lambda: progress.advance(task))
    return rows, (f"q, k, v of {path}, {_count(count, 'window')} of {length:,} validation tokens")


def _shown(rows: Sequence[Measurement]) -> list[Measurement]:
    """Return the rows to draw: those of the first head width, and `uniform` once, last."""
    width = rows[0].head_dim
    own = [row for row in rows if row.head_dim == width and row.mechanism != UNIFORM.name]
    return [*own, next(row for row in rows if row.mechanism == UNIFORM.name)]


def _notes(rows: Sequence[Measurement]) -> list[str]:
    """Return what the columns mean."""
    of = "seeds" if rows[0].layer is None else "windows"
    return [
        f"± is the sample standard deviation over {of}. All arithmetic is fp64, without biases.",
        "Relative error: ‖y − exact‖/‖exact‖ of the causal outputs, exact spherical Yat "
        "attention with ε = 0.001; cosine: between y and exact. Fidelity to the kernel and the "
        "loss of a language model are different things.",
        "Entropy: mean over rows, of the weights' absolute values.",
        "Normaliser: what the weighted sum of v is divided by. Guarded: rows that got their own v "
        "because their normaliser was not clearly positive.",
    ]


def _title(row: Measurement) -> str:
    return f"{row.mechanism} †" if row.control else row.mechanism


def _group(row: Measurement) -> str:
    """Return what a stretch of rows has in common."""
    return f"head width {row.head_dim}" if row.layer is None else f"layer {row.layer + 1}"


def _print(rows: Sequence[Measurement], about: str) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, padding=0, pad_edge=False, show_edge=False)
    table.add_column("mechanism")
    for name in TERMINAL_COLUMNS:
        # a word a line: values set the width, and the table fits 80 columns
        table.add_column(name.replace(" ", "\n").replace("≤\n", "≤ "), justify="right")
    for group, members in groupby(rows, _group):
        table.add_section()
        table.add_row(f"[bold]{group}[/bold]")
        for row in members:
            table.add_row(_title(row), *(column(row) for column in TERMINAL_COLUMNS.values()))
    console = Console()
    heading = f"Against exact spherical Yat attention: {about}"
    console.print(heading, soft_wrap=True, highlight=False, markup=False)
    console.print(table)
    console.print(
        f"z: normaliser; state: of a head at {STATE_TOKENS:,} tokens; † control, not a contender",
        highlight=False,
    )


def _markdown(rows: Sequence[Measurement], notes: Sequence[str]) -> str:
    cells = [
        [_group(row), _title(row), *(column(row) for column in COLUMNS.values())] for row in rows
    ]
    lines = markdown_table(["", "mechanism", *COLUMNS], cells, words=2)
    listed = [f"- {note}" for note in [*notes, "† control, not a contender."]]
    picture = "![kernel, entropy, normalisers, guarded rows](attention.png)"
    return "\n".join(["# How the mechanisms attend", "", *lines, "", *listed, "", picture, ""])


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def _make(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        hint = f"the folder cannot be written: {error.strerror}"
        raise ConfigError("directory", directory, hint) from error
