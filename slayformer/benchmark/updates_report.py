"""From what a benchmark of updates found to JSON, CSV, Markdown, a picture and the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from slayformer.benchmark.machine import in_words
from slayformer.benchmark.record import read_record, write_csv, write_record
from slayformer.benchmark.report import busy_notes
from slayformer.benchmark.update_plan import PLAIN, REFERENCE
from slayformer.benchmark.update_results import UpdateCell, UpdateResult
from slayformer.evaluation.report_figure import COLOURS
from slayformer.tables import markdown_table
from slayformer.training.meters import UPDATE_PARTS

RECORD = "bench_train.json"
PICTURE = "bench_train.png"


def _number(value: float | None, digits: int = 0, scale: float = 1) -> str:
    return "–" if value is None else f"{scale * value:,.{digits}f}"


COLUMNS: dict[str, Callable[[UpdateCell], str]] = {
    "tokens of context": lambda cell: f"{cell.length:,}",
    "mechanism": lambda cell: cell.mechanism,
    "loop": lambda cell: cell.loop,
    "tokens/s": lambda cell: _number(cell.tokens_per_second),
    "÷ softmax": lambda cell: _number(cell.ratio, 2),
    "MFU (%)": lambda cell: _number(cell.mfu, 1, 100),
    "update (ms)": lambda cell: _number(cell.milliseconds, 1),
    "data (ms)": lambda cell: _number(cell.data_milliseconds, 2),
    "forward and backward (ms)": lambda cell: _number(cell.forward_backward_milliseconds, 1),
    "optimizer (ms)": lambda cell: _number(cell.optimizer_milliseconds, 1),
    "time ÷ plain loop": lambda cell: _number(cell.overhead, 3),
}

# what the terminal calls some of them
SHORT = {
    "tokens of context": "tokens",
    "forward and backward (ms)": "passes (ms)",
    "optimizer (ms)": "AdamW (ms)",
    "time ÷ plain loop": "÷ plain",
}


def read_updates(folder: Path) -> UpdateResult:
    """Return what an earlier run wrote to `folder`; raises ConfigError if that is not there."""
    return read_record(folder / RECORD, UpdateResult.from_plain)


def write_updates(directory: Path, result: UpdateResult) -> list[Path]:
    """Write the record, the table as CSV and Markdown and the picture; return their paths."""
    names = (RECORD, "bench_train.csv", "bench_train.md", PICTURE)
    record, table, text, picture = paths = [directory / name for name in names]
    write_record(record, result.plain())
    write_csv(table, UpdateCell, result.cells)
    draw_updates(picture, result)
    body = [[column(cell) for column in COLUMNS.values()] for cell in result.cells]
    table_lines = markdown_table([*COLUMNS], body, words=3)
    lines = [
        "# Whole updates",
        "",
        *table_lines,
        "",
        *(f"- {note}" for note in updates_notes(result)),
    ]
    text.write_text("\n".join([*lines, "", f"![updates]({PICTURE})", ""]), encoding="utf-8")
    return paths


def updates_notes(result: UpdateResult) -> list[str]:
    """Return what was measured, on what, and what was left out."""
    shared, model = result.shared, result.shared["model"]
    found = [
        f"{in_words(result.machine)}; {shared['precision']}.",
        f"GPT-2 of {model['layers']} layers × {model['width']}, {model['heads']} heads, vocabulary "
        f"of {shared['vocabulary_size']:,}; updates of at most {result.options['tokens']:,} random "
        f"tokens in one forward pass; medians over {result.options['rounds']} rounds in which "
        "everybody takes its turn, ratios are medians over rounds.",
        "Forward and backward are timed to their end on a GPU as well; moving a batch to the "
        "device is among them. MFU counts a backward pass as two forward passes.",
    ]
    found += busy_notes(result.machine)
    found += [
        f"Left out: {cell.mechanism} ({cell.loop}) at {cell.length:,}: {cell.left_out}."
        for cell in result.cells
        if cell.left_out is not None
    ]
    return found


def draw_updates(path: Path, result: UpdateResult) -> None:
    """Draw tokens per second, and where the milliseconds of an update go, to `path`."""
    from matplotlib.figure import Figure

    cells = [cell for cell in result.cells if cell.left_out is None]
    labels = [_label(cell, result.cells) for cell in cells]
    places = range(len(cells), 0, -1)
    # a Figure of its own draws with Agg and leaves pyplot's global state alone
    figure = Figure(figsize=(12, 1.6 + 0.34 * max(3, len(cells))), layout="constrained", dpi=130)
    speed, parts = figure.subplots(1, 2, sharey=True)
    rates = [cell.tokens_per_second or 0.0 for cell in cells]
    bars = speed.barh(places, rates, color=COLOURS[0], height=0.7)
    ratios = ["" if cell.ratio is None else f"{cell.ratio:.2f} × softmax" for cell in cells]
    speed.bar_label(bars, ratios, padding=3, fontsize=8)
    speed.set(xlabel="tokens/s", yticks=list(places), yticklabels=labels)
    speed.margins(x=0.25)
    start = [0.0] * len(cells)
    for part, colour in zip(UPDATE_PARTS, (COLOURS[4], COLOURS[5], COLOURS[2]), strict=True):
        taken = [getattr(cell, f"{part}_milliseconds") or 0.0 for cell in cells]
        name = part.replace("_", " and ")
        parts.barh(places, taken, left=start, color=colour, height=0.7, label=name)
        start = [a + b for a, b in zip(start, taken, strict=True)]
    parts.set(xlabel="milliseconds an update")
    if cells:
        parts.legend(fontsize=8)
    figure.suptitle(in_words(result.machine), fontsize=9)
    figure.savefig(path)


def _label(cell: UpdateCell, cells: Sequence[UpdateCell]) -> str:
    loop = "" if all(other.loop == PLAIN for other in cells) else f" {cell.loop}"
    return f"{cell.mechanism}{loop}, {cell.length:,}"


def print_updates(result: UpdateResult) -> None:
    """Print speed, ratios and parts of every cell to the terminal."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, padding=0, pad_edge=False)
    for name in COLUMNS:
        is_text = name in ("mechanism", "loop")
        # a word a line: values set the width, and the table fits 80 columns
        title = SHORT.get(name, name).replace(" ", "\n")
        table.add_column(title, justify="left" if is_text else "right", no_wrap=is_text)
    for cell in result.cells:
        table.add_row(*(column(cell) for column in COLUMNS.values()))
    console = Console()
    console.print(table)
    for note in updates_notes(result)[3:]:
        console.print(note, soft_wrap=True, highlight=False, markup=False)
    if not any(cell.ratio for cell in result.cells):
        console.print(f"ratios need {REFERENCE} among the mechanisms", highlight=False)
