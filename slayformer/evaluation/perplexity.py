"""Score checkpoints: on the validation tokens of their runs, or on any text."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from errno import EISDIR
from pathlib import Path
from typing import Any

from slayformer.config_commands import EvalConfig, EvalSourceConfig
from slayformer.errors import ConfigError
from slayformer.evaluation.loss import LossTotals, perplexity, score
from slayformer.evaluation.perplexity_figure import draw_positions
from slayformer.evaluation.perplexity_table import print_results
from slayformer.evaluation.progress import progress_bar
from slayformer.evaluation.scored_model import ScoredModel, extend_context, load_scored_model
from slayformer.evaluation.scored_text import named_text, validation_text
from slayformer.evaluation.windows import Text, TextWindows, standard_error
from slayformer.finite import strict_json
from slayformer.huggingface.hub import model_folder
from slayformer.training import distributed
from slayformer.training.objective import LanguageModelObjective


def run(config: EvalConfig) -> list[dict[str, Any]]:
    """Score each checkpoint, print the numbers, and return them, one record a checkpoint.

    `config.json` gets the same: a list if a list of checkpoints was given. Under a launcher ranks
    share the windows, and every rank returns all. Raises UserError if a checkpoint, the data or
    an option cannot work.
    """
    named = _checkpoints(config)
    if config.data is None and config.source != EvalSourceConfig():
        raise ConfigError("data", None, "fields of source change what data names; name it")
    if config.figure is not None and not config.figure.endswith(".png"):
        raise ConfigError("figure", config.figure, "must end with .png")
    if distributed.launched():
        distributed.initialize()
    paths = distributed.run_on_main(lambda: [model_folder("checkpoint", name) for name in named])
    distributed.run_on_main(lambda: _make_folders(config))
    # by tokenizer: all models that have the same one score the same tokens
    texts: dict[str, Text] = {}
    results = []
    for path in paths:
        model = load_scored_model(path, distributed.device())
        length = _read_length(config, model, is_only=len(paths) == 1)
        identity = model.tokenizer.identity
        if config.data is None:
            text = validation_text(model, config.tokens)
        else:
            text = texts.get(identity) or named_text(config, model.tokenizer)
            texts[identity] = text
        results.append(_score(config, model, text, length))
    if distributed.is_main():
        print_results(results)
        if config.json is not None:
            written = results if isinstance(config.checkpoint, list) else results[0]
            with _writing("json", config.json):
                content = json.dumps(strict_json(written), indent=2) + "\n"
                Path(config.json).write_text(content, encoding="utf-8")
        if config.figure is not None:
            with _writing("figure", config.figure):
                draw_positions(Path(config.figure), results)
    distributed.barrier()
    return results


def _checkpoints(config: EvalConfig) -> list[str]:
    given = config.checkpoint
    paths = given if isinstance(given, list) else [given]
    if not paths or not all(isinstance(path, str) and path for path in paths):
        hint = "give a run directory or a checkpoint folder: python eval.py checkpoint=runs/NAME"
        raise ConfigError("checkpoint", given, hint)
    return paths


def _read_length(config: EvalConfig, scored: ScoredModel, *, is_only: bool) -> int:
    """Return the tokens that the model reads at once, and let it; ConfigError if it cannot."""
    length = config.context_length or scored.context_length
    # of several models those with shorter contexts need it
    needed = is_only or length > scored.context_length
    extend_context(scored.model, length, config.positions if needed else None)
    if config.stride is not None and config.stride > length:
        hint = f"must be at most the context of {length} tokens, or tokens would be left out"
        raise ConfigError("stride", config.stride, hint)
    return length


def _score(config: EvalConfig, scored: ScoredModel, text: Text, length: int) -> dict[str, Any]:
    """Return the record of one checkpoint on `text`, read by windows of `length` tokens."""
    windows = TextWindows(
        text,
        context_length=length,
        stride=config.stride,
        isolate_documents=scored.isolate_documents,
    )
    documents = windows.document_sums()
    start = time.perf_counter()
    with progress_bar() as progress:
        task = progress.add_task(f"scoring {windows.windows:,} windows", total=windows.windows)
        totals = score(
            LanguageModelObjective(scored.model, scored.precision),
            windows,
            windows=windows.windows,
            batch_samples=config.batch_samples,
            byte_lengths=scored.tokenizer.token_byte_lengths(),
            progress=lambda count: progress.advance(task, count),
            observe=documents.add,
        )
    seconds = time.perf_counter() - start
    words, digest = distributed.run_on_main(
        lambda: (text.words(scored.tokenizer), text.digest(scored.tokenizer))
    )
    losses = documents.over_ranks()
    return {
        "checkpoint": str(scored.path),
        "mechanism": scored.mechanism,
        "data": text.label,
        "text_sha256": digest,
        "context_length": length,
        "trained_context_length": scored.context_length,
        "positions": config.positions if length > scored.context_length else None,
        "stride": config.stride,
        "isolate_documents": scored.isolate_documents,
        "tokenizer": scored.tokenizer.identity,
        **_measures(totals, words),
        "standard_error": standard_error(losses),
        "documents": len(losses.nats_D),
        "loss_by_position": totals.by_position(),
        "seconds": seconds,
    }


def _measures(totals: LossTotals, words: int) -> dict[str, Any]:
    """Return the loss by every name: per token in nats, and as a perplexity per unit of text."""
    return {
        "loss": totals.loss,
        "token_perplexity": totals.perplexity,
        "word_perplexity": perplexity(totals.nats, words),
        "byte_perplexity": perplexity(totals.nats, totals.bytes),
        "bits_per_byte": totals.bits_per_byte,
        "scored_tokens": totals.tokens,
        "words": words,
        "bytes": totals.bytes,
    }


def _make_folders(config: EvalConfig) -> None:
    """Make the folders to write to before anything is scored."""
    for field, path in (("json", config.json), ("figure", config.figure)):
        if path is not None:
            with _writing(field, path):
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                if Path(path).is_dir():
                    raise IsADirectoryError(EISDIR, os.strerror(EISDIR))


@contextmanager
def _writing(field: str, path: str) -> Iterator[None]:
    """Turn the refusal of a disk into a ConfigError about `field`."""
    try:
        yield
    except OSError as error:
        raise ConfigError(field, path, f"cannot be written: {error.strerror}") from error
