"""The table and the picture of `scripts/long_context.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table

from slayformer.evaluation.report_figure import series_style
from slayformer.tables import markdown_table

# the interval's name in the record
INTERVAL = "found_share_95_percent_interval"
COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "context\n(tokens)": lambda row: f"{row['length_tokens']:,}",
    "found\n(%)": lambda row: f"{_found(row):.1f}",
    "95 %\ninterval": lambda row: "–".join(f"{100 * end:.0f}" for end in _interval(row)),
    "asked\n(answers)": lambda row: f"{row['asked']:,}",
    "state\n(KiB)": lambda row: f"{row['state_bytes'] / 1024:,.0f}",
    "reading\n(ms/token)": lambda row: f"{row['read_ms_per_token']:.3f}",
    "next token\n(ms)": lambda row: f"{row['next_token_ms']:.2f}",
}


def _found(row: dict[str, Any]) -> float:
    return 100 * row["found"] / row["asked"]


def interval(found: int, asked: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of the share found, as if answers were independent."""
    from scipy.stats import binomtest

    ends = binomtest(found, asked).proportion_ci(0.95, method="wilson")
    return float(ends.low), float(ends.high)


def _interval(row: dict[str, Any]) -> tuple[float, float]:
    return interval(row["found"], row["asked"])


def _heading(about: str, chance: float) -> str:
    return f"Needles found again: {about}; chance {100 * chance:.1f} %"


def print_table(
    rows: Sequence[dict[str, Any]], about: str, chance: float, console: Console
) -> None:
    """Print a row for each mechanism and length."""
    columns = (Column(name, justify="right", overflow="fold") for name in COLUMNS)
    table = Table("mechanism", *columns, box=SIMPLE_HEAD)
    before = None
    for row in rows:
        if before not in (None, row["mechanism"]):
            table.add_section()
        before = row["mechanism"]
        table.add_row(row["mechanism"], *(column(row) for column in COLUMNS.values()))
    console.print(_heading(about, chance), soft_wrap=True, highlight=False)
    console.print(table)


def markdown(rows: Sequence[dict[str, Any]], about: str, chance: float) -> str:
    """Return the table as Markdown."""
    names = ["mechanism", *(name.replace("\n", " ") for name in COLUMNS)]
    cells = [[r["mechanism"], *(column(r) for column in COLUMNS.values())] for r in rows]
    lines = markdown_table(names, cells)
    picture = "![found, state and time by length](long_context.png)"
    return "\n".join(["# Long contexts", "", _heading(about, chance), "", *lines, "", picture, ""])


def draw(
    path: Path, rows: Sequence[dict[str, Any]], about: str, *, chance: float, trained_tokens: int
) -> None:
    """Draw what was found, the state and the time of the next token against the length."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.4), layout="constrained", dpi=150)
    left, middle, right = figure.subplots(1, 3)
    mechanisms = list(dict.fromkeys(row["mechanism"] for row in rows))
    for number, mechanism in enumerate(mechanisms):
        mine = sorted(
            (row for row in rows if row["mechanism"] == mechanism),
            key=lambda row: row["length_tokens"],
        )
        style: dict[str, Any] = {
            **series_style(number),
            "markersize": 4,
            "label": mechanism,
        }
        lengths = [row["length_tokens"] for row in mine]
        left.plot(lengths, [_found(row) for row in mine], **style)
        ends = [[100 * end for end in _interval(row)] for row in mine]
        left.fill_between(lengths, *zip(*ends, strict=True), color=style["color"], alpha=0.12)
        middle.plot(lengths, [row["state_bytes"] / 1024 for row in mine], **style)
        right.plot(lengths, [row["next_token_ms"] for row in mine], **style)
    left.axhline(100 * chance, color="#777777", linewidth=1, label="chance")
    left.axvline(
        trained_tokens, color="#777777", linewidth=1, linestyle=":", label="longest in training"
    )
    left.set(title="Needles found again, 95 % intervals", ylabel="found (%)", ylim=(0, 103))
    middle.set(title="State of one sequence", ylabel="state (KiB)", yscale="log")
    right.set(title="Time of the next token", ylabel="ms", yscale="log")
    for axes in (left, middle, right):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.tick_params(axis="x", labelrotation=30)
        axes.set_xlabel("context (tokens)")
        axes.grid(alpha=0.25)
    left.legend(fontsize=8)
    figure.suptitle(about, fontsize=9)
    figure.savefig(path)
