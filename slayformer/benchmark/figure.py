"""Pictures of a benchmark: time, memory and tokens per second against the length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from slayformer.benchmark.results import Cell, of_pass
from slayformer.evaluation.report_figure import COLOURS, DASHES, MARKERS

TITLES = {
    "forward": "forward",
    "forward_backward": "forward and backward",
    "decode": "one token decoded",
}
MIB = 2**20
PANELS: tuple[tuple[str, Callable[[Cell], float | None]], ...] = (
    ("time (ms)", lambda cell: cell.milliseconds),
    (
        "memory beyond inputs (MiB)",
        lambda cell: cell.memory_bytes / MIB if cell.memory_bytes else None,
    ),
    ("tokens/s", lambda cell: cell.tokens_per_second),
)


def draw_scaling(
    path: Path, cells: Sequence[Cell], *, passes: Sequence[str] = ("forward",), title: str = ""
) -> None:
    """Draw what `scaling_figure` returns to `path`."""
    scaling_figure(cells, passes=passes, title=title).savefig(path)


def scaling_figure(
    cells: Sequence[Cell], *, passes: Sequence[str] = ("forward",), title: str = ""
) -> Any:
    """Return a Figure of time, memory and tokens per second of `passes` against the length.

    Both axes are logarithmic; bands are quartiles. A line ends where its contestant was left out.
    """
    from matplotlib.figure import Figure

    by_pass = {name: of_pass(cells, name) for name in passes}
    contestants = list(dict.fromkeys(cell.contestant for cell in cells))
    height = 3.6 * len(passes) + 0.2 * (len(contestants) // 5 + 1)
    # a Figure of its own draws with Agg and leaves pyplot's global state alone
    figure = Figure(figsize=(13.5, height), layout="constrained", dpi=130)
    grid = figure.subplots(len(passes), len(PANELS), squeeze=False)
    handles: dict[str, Any] = {}
    for row, (pass_name, found) in zip(grid, by_pass.items(), strict=True):
        for axes, (label, value) in zip(row, PANELS, strict=True):
            for contestant, of_contestant in found.items():
                style = _style(contestants.index(contestant))
                points = [
                    (length, y)
                    for length, cell in sorted(of_contestant.items())
                    if (y := value(cell))
                ]
                if not points:
                    continue
                (handles[contestant],) = axes.plot(*zip(*points, strict=True), **style)
                if label.startswith("time"):
                    _draw_quartiles(axes, of_contestant, style["color"])
            _dress(axes, pass_name, label)
    if title:
        figure.suptitle(title, fontsize=10)
    if handles:
        figure.legend(
            handles.values(), handles.keys(), loc="outside lower center", ncols=5, fontsize=8
        )
    return figure


def _draw_quartiles(axes: Any, cells: dict[int, Cell], colour: str) -> None:
    known = sorted((length, c) for length, c in cells.items() if c.milliseconds is not None)
    axes.fill_between(
        [length for length, _ in known],
        [cell.lower_milliseconds for _, cell in known],
        [cell.upper_milliseconds for _, cell in known],
        color=colour,
        alpha=0.15,
        linewidth=0,
    )


def _dress(axes: Any, pass_name: str, label: str) -> None:
    what = "tokens of context" if pass_name == "decode" else "tokens"
    axes.set(xlabel=what, ylabel=label, title=TITLES[pass_name])
    if pass_name == "decode" and label.startswith("memory"):
        axes.set_ylabel("state (MiB)")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: tokens_label(round(value)))
    axes.grid(alpha=0.25)


def _style(number: int) -> dict[str, Any]:
    # colours come back with the next dash: seven curves are told apart by colour alone
    turn = number // len(COLOURS)
    return {
        "color": COLOURS[number % len(COLOURS)],
        "linestyle": DASHES[turn % len(DASHES)],
        "marker": MARKERS[number % len(MARKERS)],
        "markersize": 3.5,
        "linewidth": 1.4,
    }


def tokens_label(tokens: int) -> str:
    """Return a number of tokens as 512 or 16k; k is 1,024."""
    return f"{tokens // 1024}k" if tokens >= 1024 and tokens % 1024 == 0 else f"{tokens}"
