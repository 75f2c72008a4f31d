"""The pictures of a comparison: losses at the end, over training, along the context; recall."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slayformer.evaluation.report import Report, Row
from slayformer.evaluation.runs import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours, told apart by colour-blind eyes; markers repeat the difference, and of
# curves that lie on one another dashes show both
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX"
DASHES = ("-", "--", "-.", ":")
# letters in a line of a long name
NAME_LETTERS = 36


def draw_pictures(directory: Path, report: Report) -> list[Path]:
    """Draw losses and curves, and positions and recall if measured; each as .png and as .svg.

    Return the paths.
    """
    figures = {
        "losses": losses(report.runs, report.rows),
        "curves": curves(report.runs, [row.mechanism for row in report.rows]),
    }
    if report.placed:
        figures["positions"] = positions(report.placed)
    if report.recalling:
        figures["recall"] = recall(report.recalling, report.recalls[0].summary["chance"])
    paths = []
    for name, figure in figures.items():
        for kind in ("png", "svg"):
            paths.append(directory / f"{name}.{kind}")
            figure.savefig(paths[-1])
    return paths


def losses(runs: Sequence[Run], rows: Sequence[Row]) -> Figure:
    """Return the final validation loss of every mechanism, best on top, and of each of its seeds.

    The bar is the sample standard deviation over seeds; controls are hollow, diverged runs absent.
    """
    from matplotlib.figure import Figure

    rows = [row for row in rows if math.isfinite(row.loss)]
    names = [wrapped(row.label) for row in rows]
    # a row is as high as the longest name
    lines = 1 + max((name.count("\n") for name in names), default=0)
    height = 1.4 + (0.12 + 0.16 * lines) * len(rows)
    figure = Figure(figsize=(8, height), layout="constrained", dpi=150)
    axes = figure.subplots()
    for place, row in enumerate(rows):
        seeds = [run.summary["validation_loss"] for run in runs if run.mechanism == row.mechanism]
        axes.plot(seeds, [place] * len(seeds), "|", color="#777777", markersize=9)
        axes.errorbar(
            row.loss,
            place,
            xerr=row.loss_std,
            fmt="o",
            color=COLOURS[0],
            markerfacecolor="white" if row.control else COLOURS[0],
            capsize=3,
        )
        axes.annotate(
            f"{row.loss:.3f}", (1.01, place), xycoords=("axes fraction", "data"), va="center"
        )
    axes.set_yticks(range(len(rows)), names)
    axes.invert_yaxis()
    axes.set(title="Final validation loss", xlabel="loss (nats/token): mean, its spread, each seed")
    axes.grid(axis="x", alpha=0.25)
    return figure


def curves(runs: Sequence[Run], mechanisms: Sequence[str]) -> Figure:
    """Return training and validation loss against training tokens.

    Each seed is a thin line, the mean over a mechanism's seeds a thick one; `mechanisms` gives the
    order of the legend.
    """
    from matplotlib.figure import Figure

    # a Figure of its own draws with Agg and leaves pyplot's global state alone
    figure = Figure(figsize=(12, 4.8), layout="constrained", dpi=150)
    left, right = figure.subplots(1, 2)
    for number, mechanism in enumerate(mechanisms):
        mine = [run for run in runs if run.mechanism == mechanism]
        style: dict[str, Any] = {
            "color": COLOURS[number % len(COLOURS)],
            "linestyle": DASHES[number % len(DASHES)],
        }
        for axes, kind in ((left, "train"), (right, "validation")):
            seeds = [curve for run in mine if (curve := run.curve(kind))]
            for curve in seeds if len(seeds) > 1 else []:
                axes.plot(*_xy(curve), linewidth=0.6, alpha=0.6, **style)
            count = "1 seed" if len(mine) == 1 else f"{len(mine)} seeds"
            label = wrapped(f"{mechanism} ({count})")
            (line,) = axes.plot(*_xy(mean_curve(seeds)), label=label, linewidth=1.8, **style)
            if kind == "validation":
                line.set(marker=MARKERS[number % len(MARKERS)], markersize=4)
    # where its height does not press the curves together
    floor = left.axhline(runs[0].summary["unigram_loss"], color="#777777", linewidth=1)
    for axes, title in ((left, "Training loss"), (right, "Validation loss")):
        axes.set(title=title, xlabel="training tokens", ylabel="loss (nats/token)")
        axes.xaxis.set_major_formatter(tokens_label)
        axes.grid(alpha=0.25)
    # beside the curves, which a long list of names would cover
    handles, labels = right.get_legend_handles_labels()
    handles, labels = [*handles, floor], [*labels, "unigram floor"]
    figure.legend(handles, labels, loc="outside right center", fontsize=8)
    return figure


def mean_curve(curves: Sequence[Sequence[tuple[int, float]]]) -> list[tuple[int, float]]:
    """Return (tokens, mean loss) at the tokens that every curve has."""
    by_tokens = [dict(curve) for curve in curves]
    shared = [t for t in (by_tokens[0] if by_tokens else {}) if all(t in one for one in by_tokens)]
    return [(t, statistics.fmean(one[t] for one in by_tokens)) for t in shared]


def _xy(curve: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [x for x, _ in curve], [y for _, y in curve]


def tokens_label(value: float, _position: object = None) -> str:
    """Return a number of tokens as 3.07 M."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g} {unit}"
    return f"{value:g}"


def positions_apart(rows: Sequence[Row]) -> tuple[list[str], list[list[float]]]:
    """Return the labels of the positions that all rows have, and each row's loss there.

    Losses are less the mean of all rows.
    """
    losses = [{(s["first"], s["last"]): s["loss"] for s in row.loss_by_position} for row in rows]
    places = [place for place in losses[0] if all(place in one for one in losses)]
    labels = [stretch_label({"first": first, "last": last}) for first, last in places]
    middle = {place: statistics.fmean(one[place] for one in losses) for place in places}
    return labels, [[one[place] - middle[place] for place in places] for one in losses]


def positions(rows: Sequence[Row]) -> Figure:
    """Return each mechanism's loss by position in the context, less the mean of all.

    All fall along the context; what tells them apart is how far each is from the others.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.6), layout="constrained", dpi=150)
    axes = figure.subplots()
    labels, apart = positions_apart(rows)
    for number, (row, losses) in enumerate(zip(rows, apart, strict=True)):
        axes.plot(
            range(len(labels)),
            losses,
            label=wrapped(row.label),
            linewidth=1.8,
            markersize=4,
            **series_style(number),
        )
    axes.axhline(0, color="#777777", linewidth=1)
    axes.set(
        title="Validation loss by position in the context",
        xlabel="position (tokens before the one predicted, less one)",
        ylabel="loss − mean of all (nats/token)",
    )
    axes.set_xticks(range(len(labels)), labels)
    axes.grid(alpha=0.25)
    figure.legend(loc="outside right center", fontsize=8)
    return figure


def recall(rows: Sequence[Row], chance: float) -> Figure:
    """Return the share of values recalled against the number of pairs."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.6), layout="constrained", dpi=150)
    axes = figure.subplots()
    for number, row in enumerate(rows):
        pairs = [int(count) for count in row.recall]
        shares = [100 * share for share in row.recall.values()]
        axes.plot(
            pairs,
            shares,
            label=wrapped(row.label),
            linewidth=1.8,
            markersize=4,
            **series_style(number),
        )
    axes.axhline(100 * chance, color="#777777", linewidth=1, label="chance")
    axes.set_xscale("log", base=2)
    counts = sorted({int(count) for row in rows for count in row.recall})
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set(
        title="Associative recall", xlabel="key-value pairs in the context", ylabel="recalled (%)"
    )
    axes.grid(alpha=0.25)
    figure.legend(loc="outside right center", fontsize=8)
    return figure


def wrapped(name: str) -> str:
    """Return a name with options in it in lines that leave room for the picture."""
    return textwrap.fill(name, NAME_LETTERS, subsequent_indent="  ")


def series_style(number: int) -> dict[str, Any]:
    """Return colour, dash and marker of the line of a series."""
    return {
        "color": COLOURS[number % len(COLOURS)],
        "linestyle": DASHES[number % len(DASHES)],
        "marker": MARKERS[number % len(MARKERS)],
    }


def stretch_label(stretch: dict[str, float]) -> str:
    """Return the positions of a stretch, as 0 or 2–3."""
    first, last = stretch["first"], stretch["last"]
    return f"{first}" if first == last else f"{first}–{last}"
