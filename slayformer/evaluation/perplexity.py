"""Score a checkpoint: on the validation tokens of its run, or on any text."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column, Table

from slayformer.config import EvalConfig, SourceConfig
from slayformer.data.corpus import open_source
from slayformer.data.loader import Batch, WindowLoader
from slayformer.data.prepare import prepare
from slayformer.data.shards import TokenStream
from slayformer.errors import ConfigError, DataError, UserError
from slayformer.evaluation.loss import score, validation_windows
from slayformer.training.checkpoint import LoadedModel, find_checkpoint, load_model
from slayformer.training.objective import IGNORE_INDEX, LanguageModelObjective

DOCUMENTS_AT_A_TIME = 256
READ_TOKENS = 1 << 20


class WholeText(WindowLoader):
    """Windows of a text in which every token but the first is a target exactly once.

    The last window may be shorter: what fills it up is no target.
    """

    def __init__(
        self, ids: np.ndarray, *, context_length: int, end_of_text: int, isolate_documents: bool
    ) -> None:
        windows = math.ceil((len(ids) - 1) / context_length)
        filled = np.full(windows * context_length + 1, end_of_text, dtype=np.uint32)
        filled[: len(ids)] = ids
        super().__init__(
            TokenStream([filled], label="the text"),
            context_length=context_length,
            seed=None,
            end_of_text=end_of_text,
            isolate_documents=isolate_documents,
        )
        self._targets = len(ids) - 1

    def batch(self, sample_indices: Sequence[int]) -> Batch:
        """Return the windows with these indices, targets beyond the text as IGNORE_INDEX."""
        batch = super().batch(sample_indices)
        length = batch.targets_BT.shape[1]
        position_BT = torch.tensor(sample_indices)[:, None] * length + torch.arange(length)
        targets_BT = batch.targets_BT.masked_fill(position_BT >= self._targets, IGNORE_INDEX)
        return replace(batch, targets_BT=targets_BT)


def run(config: EvalConfig) -> dict[str, Any]:
    """Score `config.checkpoint`, print the numbers, and return them as `config.json` gets them.

    Raises UserError if the checkpoint, the data or an option cannot work.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("eval.py works in one process: run it without a launcher")
    if config.checkpoint is None:
        hint = "give a run directory or a checkpoint folder: python eval.py checkpoint=runs/NAME"
        raise ConfigError("checkpoint", None, hint)
    path = find_checkpoint(Path(config.checkpoint))
    loaded = load_model(path, "cuda" if torch.cuda.is_available() else "cpu")
    context_length = config.context_length or loaded.model.context_length
    if context_length > loaded.model.context_length:
        hint = f"the model was made for at most {loaded.model.context_length} tokens"
        raise ConfigError("context_length", context_length, hint)
    if config.data is None:
        loader, windows, stream = _validation_windows(config, loaded, context_length)
    else:
        loader, windows, stream = _text_windows(config, loaded, context_length)

    start = time.perf_counter()
    with _progress() as progress:
        task = progress.add_task(f"scoring {windows:,} windows", total=windows)
        totals = score(
            LanguageModelObjective(loaded.model, loaded.config.engine.precision),
            loader,
            windows=windows,
            batch_samples=config.batch_samples,
            byte_lengths=loaded.tokenizer.token_byte_lengths(),
            progress=lambda count: progress.advance(task, count),
        )
    result = {
        "checkpoint": str(path),
        "mechanism": loaded.config.attention.name,
        "data": config.data or "validation tokens of the run",
        "context_length": context_length,
        "loss": totals.loss,
        "perplexity": totals.perplexity,
        "bits_per_byte": totals.bits_per_byte,
        "scored_tokens": totals.tokens,
        "bytes": totals.bytes,
        "documents": _documents_in(stream, totals.tokens, loaded.tokenizer.end_of_text),
        "seconds": time.perf_counter() - start,
    }
    _print(result)
    if config.json is not None:
        _write_json(Path(config.json), result)
    return result


def _validation_windows(
    config: EvalConfig, loaded: LoadedModel, context_length: int
) -> tuple[WindowLoader, int, TokenStream]:
    """Return loader, number of windows and tokens of the validation that training did."""
    trained = loaded.config
    prepared = prepare(trained.data, trained.tokenizer)
    if prepared.tokenizer.identity != loaded.tokenizer.identity:
        raise DataError(
            f"{prepared.directory} has another tokenizer than {config.checkpoint}: the documents "
            f"have changed since; score a text with data=FILE_OR_FOLDER"
        )
    trained_on = loaded.state.get("data")
    if prepared.directory.name != trained_on:
        raise DataError(
            f"{config.checkpoint} was validated on {trained_on}, but its documents have changed "
            f"and now give {prepared.directory.name}; score a text with data=FILE_OR_FOLDER"
        )
    loader = WindowLoader(
        prepared.validation,
        context_length=context_length,
        seed=None,
        end_of_text=loaded.tokenizer.end_of_text,
        isolate_documents=trained.data.isolate_documents,
    )
    tokens = config.tokens or trained.validation.tokens
    windows = validation_windows(loader, tokens, context_length)
    return loader, windows, prepared.validation


def _text_windows(
    config: EvalConfig, loaded: LoadedModel, context_length: int
) -> tuple[WindowLoader, int, TokenStream]:
    """Return loader, number of windows and tokens of the documents in `config.data`.

    Every document is followed by an end-of-text, as in training.
    """
    tokenizer = loaded.tokenizer
    documents = open_source(SourceConfig(kind="text", path=config.data), "data").documents()
    most_tokens = math.inf if config.tokens is None else config.tokens + 1
    end = np.array([tokenizer.end_of_text], dtype=np.uint32)
    pieces: list[np.ndarray] = []
    count = 0
    with _progress() as progress:
        task = progress.add_task("tokenizing", total=None)
        while count < most_tokens:
            texts = [document.text for document in islice(documents, DOCUMENTS_AT_A_TIME)]
            if not texts:
                break
            for ids in tokenizer.encode_batch(texts):
                pieces += [np.asarray(ids, dtype=np.uint32), end]
                count += len(ids) + 1
            progress.update(task, description=f"tokenizing: {count:,} tokens")
    ids = np.concatenate(pieces)[: int(min(count, most_tokens))]
    loader = WholeText(
        ids,
        context_length=context_length,
        end_of_text=tokenizer.end_of_text,
        isolate_documents=loaded.config.data.isolate_documents,
    )
    return loader, loader.windows, TokenStream([ids])


def _documents_in(stream: TokenStream, scored_tokens: int, end_of_text: int) -> int:
    """Return how many documents the first `scored_tokens` + 1 tokens of `stream` belong to."""
    ended = 0
    for start in range(0, scored_tokens, READ_TOKENS):
        ids = stream.read(start, min(READ_TOKENS, scored_tokens - start))
        ended += int(np.count_nonzero(ids == end_of_text))
    # the last token belongs to one more, or is itself the end of it
    return ended + 1


def _progress() -> Progress:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    times = TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn()
    # standard output is for the numbers
    console = Console(stderr=True)
    return Progress(
        *columns, *times, console=console, transient=True, disable=not console.is_terminal
    )


def _print(result: dict[str, Any]) -> None:
    table = Table(Column(), Column(justify="right"), show_header=False, box=SIMPLE)
    table.add_row("loss", f"{result['loss']:.6f} nats/token")
    table.add_row("perplexity", f"{result['perplexity']:,.3f} per token")
    table.add_row("bits per byte", f"{result['bits_per_byte']:.4f} bits/byte")
    table.add_row("scored", f"{result['scored_tokens']:,} tokens")
    table.add_row("text", f"{result['bytes']:,} bytes")
    table.add_row("documents", f"{result['documents']:,}")
    table.add_row("context", f"{result['context_length']:,} tokens")
    table.add_row("time", f"{result['seconds']:.1f} s")
    console = Console()
    console.print(f"{result['checkpoint']}\non {result['data']}", soft_wrap=True, highlight=False)
    console.print(table)


def _write_json(path: Path, result: dict[str, Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError("json", path, f"cannot be written: {error.strerror}") from error
