"""What `eval.py` prints: one checkpoint in full, several side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE, SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table

from slayformer.evaluation.report_figure import stretch_label


def print_results(results: Sequence[dict[str, Any]]) -> None:
    """Print the numbers of all results, then their losses by position in the context."""
    console = Console()
    for number, result in enumerate(results):
        lead = f"{number + 1}: " if len(results) > 1 else ""
        told = f"{lead}{result['checkpoint']}\non {result['data']}, {_context(result)}"
        console.print(told, soft_wrap=True, highlight=False, markup=False)
    console.print(_in_full(results[0]) if len(results) == 1 else _side_by_side(results))
    if len({result["text_sha256"] for result in results}) > 1:
        told = (
            "these are different stretches of text, so their numbers do not compare: name one "
            "text for all with data=FILE_OR_FOLDER, and all of it (tokens=null)"
        )
        console.print(told, soft_wrap=True)
    # an exported tokenizer is another by name, but scores the same tokens
    elif len({result["scored_tokens"] for result in results}) > 1:
        told = "the tokenizers differ: compare bits per byte and perplexity per word or byte"
        console.print(told, soft_wrap=True)
    console.print(_by_position(results))


def _context(result: dict[str, Any]) -> str:
    told = f"context of {result['context_length']:,} tokens"
    if result["positions"]:
        trained = result["trained_context_length"]
        told += f" (trained with {trained:,}, positions: {result['positions']})"
    if result["stride"]:
        told += f", stride {result['stride']:,} tokens"
    return told


def _loss(result: dict[str, Any], digits: int) -> str:
    error = result["standard_error"]
    loss = f"{result['loss']:.{digits}f}"
    return loss if error is None else f"{loss} ±{error:.4f}"


def _number(value: float) -> str:
    return f"{value:,.3f}" if value < 1e6 else f"{value:.3e}"


def _in_full(result: dict[str, Any]) -> Table:
    table = Table(Column(), Column(justify="right"), show_header=False, box=SIMPLE)
    table.add_row("loss ± standard error", f"{_loss(result, 6)} nats/token")
    for unit in ("token", "word", "byte"):
        table.add_row(f"{unit} perplexity", f"{_number(result[f'{unit}_perplexity'])} per {unit}")
    table.add_row("bits per byte", f"{result['bits_per_byte']:.4f} bits/byte")
    table.add_row("scored", f"{result['scored_tokens']:,} tokens")
    table.add_row("text", f"{result['words']:,} words")
    table.add_row("", f"{result['bytes']:,} bytes")
    table.add_row("documents", f"{result['documents']:,}")
    table.add_row("time", f"{result['seconds']:.1f} s")
    return table


def _side_by_side(results: Sequence[dict[str, Any]]) -> Table:
    names = (
        "loss ± standard error\n(nats/token)",
        "perplexity\nper token",
        "per\nword",
        "per\nbyte",
        "bits per\nbyte",
        "scored\n(tokens)",
    )
    table = Table(
        "",
        "mechanism",
        *(Column(name, justify="right", overflow="fold") for name in names),
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for number, result in enumerate(results):
        table.add_row(
            str(number + 1),
            result["mechanism"],
            _loss(result, 4),
            *(_number(result[f"{unit}_perplexity"]) for unit in ("token", "word", "byte")),
            f"{result['bits_per_byte']:.4f}",
            f"{result['scored_tokens']:,}",
        )
    return table


def _by_position(results: Sequence[dict[str, Any]]) -> Table:
    """Return the losses by position, a column a checkpoint."""
    names = ["loss (nats/token)"]
    if len(results) > 1:
        names = [f"{number + 1}: {r['mechanism']}" for number, r in enumerate(results)]
    losses = [
        {(s["first"], s["last"]): s["loss"] for s in result["loss_by_position"]}
        for result in results
    ]
    table = Table(
        "position in the context",
        *(Column(name, justify="right", overflow="fold") for name in names),
        box=SIMPLE_HEAD,
    )
    for first, last in sorted({stretch for one in losses for stretch in one}):
        cells = (one.get((first, last)) for one in losses)
        told = ("" if loss is None else f"{loss:.4f}" for loss in cells)
        table.add_row(stretch_label({"first": first, "last": last}), *told)
    return table
