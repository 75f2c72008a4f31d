"""The tables of a report: Markdown, LaTeX, CSV and the terminal."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from slayformer.evaluation.report import Report, Row
from slayformer.evaluation.report_figure import stretch_label
from slayformer.finite import strict_json
from slayformer.tables import latex_table, latex_text, markdown_table

Columns = dict[str, Callable[[Row], str]]
NOTHING = "–"

LOSS = "validation loss (nats/token)"
COLUMNS: Columns = {
    "mechanism": lambda row: row.label,
    LOSS: lambda row: (
        f"{row.loss:.4f} (1 seed)"
        if row.loss_std is None
        else f"{row.loss:.4f} ± {row.loss_std:.4f}"
    ),
    "perplexity": lambda row: f"{row.perplexity:,.2f}",
    "bits per byte": lambda row: f"{row.bits_per_byte:.4f}",
    "tokens/s": lambda row: f"{row.tokens_per_second:,.0f}",
    "peak memory (MiB)": lambda row: f"{row.peak_memory_mib:,.0f}",
    "parameters": lambda row: f"{row.parameters:,}",
}
# what a terminal of 80 columns has no room for
MORE_COLUMNS: Columns = {
    "state (KiB a sequence)": lambda row: (
        NOTHING if row.state_bytes is None else f"{row.state_bytes / 1024:,.0f}"
    ),
    "forward (MFLOP/token)": lambda row: (
        NOTHING if row.flops_per_token is None else f"{row.flops_per_token / 1e6:,.2f}"
    ),
    "guarded rows (%)": lambda row: (
        NOTHING if row.guarded_share is None else f"{100 * row.guarded_share:.1f}"
    ),
}


def columns(report: Report) -> Columns:
    """Return every column of the table, by its heading."""
    chosen: Columns = {}
    for name, column in {**COLUMNS, **MORE_COLUMNS}.items():
        chosen[name] = column
        if name == LOSS and report.baseline is not None:
            chosen[f"difference to {report.baseline} [95 % interval]"] = _difference
        if name == LOSS and report.published is not None:
            chosen["published loss (nats/token)"] = lambda row: (
                NOTHING if row.published_loss is None else f"{row.published_loss:.4f}"
            )
    return chosen


def _difference(row: Row) -> str:
    found = row.difference
    if found is None:
        return NOTHING
    if found.half_width is None:
        return signed(found.mean)
    low, high = found.mean - found.half_width, found.mean + found.half_width
    return f"{signed(found.mean)} [{signed(low)}, {signed(high)}]"


def signed(value: float) -> str:
    """Return a difference with its sign, a true minus."""
    return f"{value:+.4f}".replace("-", "−")


def markdown(report: Report, pictures: Sequence[Path]) -> str:
    """Return the report in Markdown: a table each for loss, position and recall, then pictures."""
    lines = ["# Comparison", ""]
    if report.unequal:
        lines += ["**Not a fair comparison:** runs marked ≠ differ in more than the mechanism.", ""]
        lines += [*(f"- **{difference}**" for difference in report.unequal), ""]
    shown = columns(report)
    lines += markdown_table([*shown], [_cells(shown, row) for row in report.rows])
    lines += ["", *(f"- {statement}" for statement in report.statements)]
    for title, names, body in detail_tables(report):
        lines += ["", f"## {title}", "", *markdown_table(names, body)]
    for picture in pictures:
        lines += ["", f"![{picture.stem}]({picture.name})"]
    return "\n".join([*lines, ""])


def _cells(shown: Columns, row: Row) -> list[str]:
    name, *cells = (column(row) for column in shown.values())
    return [f"{name} ≠" if row.unfair else name, *cells]


def detail_tables(report: Report) -> list[tuple[str, list[str], list[list[str]]]]:
    """Return title, headings and body of the tables by position and of recall, if measured."""
    tables = []
    if report.placed:
        losses = [
            {(s["first"], s["last"]): f"{s['loss']:.3f}" for s in row.loss_by_position}
            for row in report.placed
        ]
        # contexts of unequal runs end elsewhere
        places = sorted({place for one in losses for place in one})
        names = [stretch_label({"first": first, "last": last}) for first, last in places]
        body = [
            [row.label, *(one.get(place, NOTHING) for place in places)]
            for row, one in zip(report.placed, losses, strict=True)
        ]
        title = "Validation loss by position in the context (nats/token)"
        tables.append((title, ["mechanism", *names], body))
    if report.recalling:
        pairs = [*report.recalling[0].recall]
        body = [[r.label, *(f"{100 * a:.1f}" for a in r.recall.values())] for r in report.recalling]
        title = "Associative recall (% of values, by number of pairs)"
        tables.append((title, ["mechanism", *pairs], body))
    return tables


def latex(report: Report) -> str:
    """Return the table for a paper: needs the packages booktabs and graphicx.

    Of unequal runs xcolor as well, which shows them in red.
    """
    shown = {name: column for name, column in columns(report).items() if name not in MORE_COLUMNS}
    rows = []
    for row in report.rows:
        cells = [latex_text(cell) for cell in _cells(shown, row)]
        rows.append([rf"\textcolor{{red}}{{{cell}}}" for cell in cells] if row.unfair else cells)
    told = [*(f"Not equal: {difference}." for difference in report.unequal), *report.statements]
    lines = [r"% \usepackage{booktabs,graphicx,xcolor}", r"\begin{table}", r"\centering"]
    lines += [r"\resizebox{\linewidth}{!}{%", *latex_table([*map(latex_text, shown)], rows), "}"]
    lines += [rf"\caption{{{latex_text(' '.join(told))}}}", r"\end{table}", ""]
    return "\n".join(lines)


def write_csv(path: Path, report: Report) -> None:
    """Write a line a mechanism to `path`, with all digits; what is nested as JSON."""
    with path.open("w", newline="", encoding="utf-8") as file:
        lines = []
        for row in report.rows:
            values = asdict(row)
            found = values.pop("difference") or {}
            for name in ("mean", "half_width", "seeds", "documents", "covers"):
                values[f"difference_{name}"] = found.get(name)
            for name in ("seeds", "difference_seeds"):
                values[name] = values[name] and " ".join(map(str, values[name]))
            for name in ("loss_by_position", "recall"):
                values[name] = json.dumps(strict_json(values[name]))
            lines.append(
                {**values, "baseline": report.baseline, "unigram_loss": report.unigram_loss}
            )
        writer = csv.DictWriter(file, lines[0])
        writer.writeheader()
        writer.writerows(lines)


def print_report(report: Report) -> None:
    """Print the table and the unigram floor to the terminal, and recall if it was measured."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    shown: Columns = {**COLUMNS}
    if any(row.recall for row in report.rows):
        shown.pop("peak memory (MiB)")
        shown["recall, most pairs (%)"] = lambda row: (
            f"{100 * list(row.recall.values())[-1]:.1f}" if row.recall else NOTHING
        )
    if any(row.difference for row in report.rows):
        # one tokenizer for all, so bits per byte tell no more than the loss does
        for name in ("bits per byte", "parameters"):
            shown.pop(name)
        others = list(shown.items())
        shown = dict(
            [*others[:2], (f"to {report.baseline} (95 %)", _short_difference), *others[2:]]
        )
    table = Table(box=SIMPLE_HEAD, padding=0, pad_edge=False)
    for number, name in enumerate(shown):
        # a word a line: values set the width, and the table fits 80 columns
        justify: Literal["left", "right"] = "right" if number else "left"
        table.add_column(name.replace(" ", "\n"), justify=justify, overflow="fold")
    for row in report.rows:
        table.add_row(*map(Text, _cells(shown, row)), style="red" if row.unfair else None)
    console = Console()
    for difference in report.unequal:
        console.print(f"not equal: {difference}", style="red", markup=False, soft_wrap=True)
    console.print(table)
    console.print(f"unigram floor: {report.unigram_loss:.4f} nats/token")


def _short_difference(row: Row) -> str:
    found = row.difference
    if found is None:
        return NOTHING
    if found.half_width is None:
        return signed(found.mean)
    return f"{signed(found.mean)} ± {found.half_width:.4f}"
