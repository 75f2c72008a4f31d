"""From what a benchmark of attention found to JSON, CSV, Markdown, a picture and the terminal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from slayformer.benchmark.contestants import PEERS, REFERENCE
from slayformer.benchmark.figure import TITLES, draw_scaling, tokens_label
from slayformer.benchmark.machine import in_words
from slayformer.benchmark.record import read_record, write_csv, write_record
from slayformer.benchmark.results import Cell, Result, crossover, of_pass
from slayformer.tables import markdown_table

RECORD = "bench_attention.json"
PICTURE = "bench_attention.png"
# beyond this, what else ran on the machine shows in the times
BUSY_LOAD_PER_CORE = 0.5


def read_result(folder: Path) -> Result:
    """Return what an earlier run wrote to `folder`; raises ConfigError if that is not there."""
    return read_record(folder / RECORD, Result.from_plain)


def write_report(directory: Path, result: Result) -> list[Path]:
    """Write the record, the table as CSV and Markdown and the picture; return their paths."""
    names = (RECORD, "bench_attention.csv", "bench_attention.md", PICTURE)
    record, table, text, picture = paths = [directory / name for name in names]
    write_record(record, result.plain())
    write_csv(table, Cell, result.cells)
    draw_scaling(
        picture, result.cells, passes=result.options["passes"], title=in_words(result.machine)
    )
    text.write_text(markdown(result), encoding="utf-8")
    return paths


def markdown(result: Result) -> str:
    """Return the report: for each pass a table of times, ratios, memory and tokens per second."""
    lines = ["# Attention alone", "", *(f"- {note}" for note in notes(result))]
    for pass_name in result.options["passes"]:
        cells = of_pass(result.cells, pass_name)
        for heading, value in SECTIONS[pass_name].items():
            lines += ["", f"## {TITLES[pass_name].capitalize()}: {heading}", ""]
            lines += _table(cells, value, result)
    lines += ["", f"![time, memory, tokens/s]({PICTURE})", "", *_left_out(result)]
    return "\n".join([*lines, ""])


def _milliseconds(cell: Cell) -> str:
    if cell.milliseconds is None:
        return "–"
    spread = f"{_short(cell.lower_milliseconds)}–{_short(cell.upper_milliseconds)}"
    return f"{_short(cell.milliseconds)} ({spread})"


def _ratio(cell: Cell) -> str:
    return "–" if cell.ratio is None else f"{cell.ratio:.2f}"


def _memory(cell: Cell) -> str:
    return "–" if cell.memory_bytes is None else f"{cell.memory_bytes / 2**20:,.1f}"


def _state(cell: Cell) -> str:
    return "–" if cell.memory_bytes is None else f"{cell.memory_bytes / 1024:,.1f}"


def _speed(cell: Cell) -> str:
    return "–" if cell.tokens_per_second is None else f"{cell.tokens_per_second:,.0f}"


def _error(cell: Cell) -> str:
    return "–" if cell.error is None else f"{cell.error:.1e}"


def _short(value: float | None) -> str:
    """Return three digits of a number of milliseconds."""
    assert value is not None
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


_WHOLE: dict[str, Callable[[Cell], str]] = {
    "time ÷ torch SDPA": _ratio,
    "milliseconds (quartiles)": _milliseconds,
    "tokens per second": _speed,
    "memory beyond the inputs (MiB)": _memory,
}
SECTIONS: dict[str, dict[str, Callable[[Cell], str]]] = {
    "forward": _WHOLE,
    "forward_backward": _WHOLE,
    "decode": {
        "milliseconds (quartiles)": _milliseconds,
        "state (KiB)": _state,
        "relative difference from the parallel form": _error,
    },
}


def _table(
    cells: dict[str, dict[int, Cell]], value: Callable[[Cell], str], result: Result
) -> list[str]:
    lengths = sorted({length for found in cells.values() for length in found})
    head = ["contestant", "engine", *map(tokens_label, lengths)]
    body = [
        [name, result.engines.get(name, "peer"), *(value(found[length]) for length in lengths)]
        for name, found in cells.items()
    ]
    return markdown_table(head, body, words=2)


def _left_out(result: Result) -> list[str]:
    """Return a list of what has no figures and why, lengths of one reason together."""
    by_reason: dict[tuple[str, str, str], list[int]] = {}
    for cell in result.cells:
        if cell.left_out is not None:
            key = (cell.pass_name, cell.contestant, cell.left_out)
            by_reason.setdefault(key, []).append(cell.length)
    if not by_reason:
        return []
    body = [
        [TITLES[pass_name], contestant, ", ".join(map(tokens_label, lengths)), reason]
        for (pass_name, contestant, reason), lengths in by_reason.items()
    ]
    return [
        "## Left out",
        "",
        *markdown_table(["pass", "contestant", "tokens", "why"], body, words=4),
    ]


def busy_notes(machine: dict[str, Any]) -> list[str]:
    """Return what to tell of a CPU that had other work when the measurement began."""
    busy = machine["load_per_core"]
    if machine["device"] != "cpu" or busy <= BUSY_LOAD_PER_CORE:
        return []
    return [
        f"The machine was busy when this began ({busy:.1f} processes a core wanted to run): "
        "times do not hold, ratios more or less."
    ]


def notes(result: Result) -> list[str]:
    """Return what was measured, on what, and what the figures say."""
    options, machine = result.options, result.machine
    shape = f"batch {options['batch']}, {options['heads']} heads of {options['head_dim']}"
    time_kind = "wall time" if options["clock"] == "wall" else "processor time of all threads"
    memory = "PyTorch's largest allocation"
    if machine["device"] == "cpu":
        memory = "the largest growth of a process that makes one call (to about half a MiB)"
    found = [
        f"{in_words(machine)}; {options['dtype']}, {shape}.",
        f"Times: {time_kind}, medians over {options['rounds']} rounds in which every contestant "
        "takes its turn; a ratio is the median over rounds. Memory beyond the inputs, output "
        f"included: {memory}.",
    ]
    found += busy_notes(machine)
    if options["quick"]:
        found.append("A quick look: few lengths and rounds.")
    for pass_name in options["passes"]:
        cells = of_pass(result.cells, pass_name)
        found += _flatness(cells) if pass_name == "decode" else _crossovers(pass_name, cells)
    measured = {cell.contestant for cell in result.cells}
    found += [f"`{name}`: {PEERS[name].about}." for name in options["peers"] if name in measured]
    return found


def _crossovers(pass_name: str, cells: dict[str, dict[int, Cell]]) -> list[str]:
    if REFERENCE not in cells:
        return []
    at: dict[int, list[str]] = {}
    for name, found in cells.items():
        length = None if name == REFERENCE else crossover(found)
        if length is not None:
            at.setdefault(length, []).append(name)
    if not at:
        return [f"{TITLES[pass_name].capitalize()}: nothing overtakes torch SDPA at these lengths."]
    told = "; ".join(
        f"from {tokens_label(n)} on {', '.join(names)}" for n, names in sorted(at.items())
    )
    return [f"{TITLES[pass_name].capitalize()}: faster than torch SDPA {told}."]


def _flatness(cells: dict[str, dict[int, Cell]]) -> list[str]:
    """Return how much slower the slowest context is than the fastest, for constant states."""
    told = []
    for name, found in cells.items():
        known = [cell for cell in found.values() if cell.milliseconds is not None]
        if len(known) > 1 and len({cell.memory_bytes for cell in known}) == 1:
            # what else runs on the machine shows least in the lower quartiles
            times = [cell.lower_milliseconds for cell in known if cell.lower_milliseconds]
            told.append(f"{name} {100 * (max(times) / min(times) - 1):.1f} %")
    if not told:
        return []
    return [
        "Decoding, slowest context over fastest where the state is constant (lower quartiles): "
        f"{', '.join(told)}."
    ]


def print_report(result: Result) -> None:
    """Print a table of ratios and times at every length for each pass."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for pass_name in result.options["passes"]:
        cells = of_pass(result.cells, pass_name)
        lengths = sorted({length for found in cells.values() for length in found})
        value, told = (_ratio, "time ÷ torch SDPA")
        if pass_name == "decode" or REFERENCE not in cells:
            value, told = _plain_milliseconds, "milliseconds"
        what = "tokens of context" if pass_name == "decode" else "tokens"
        console.print(f"{TITLES[pass_name]}: {told}, by {what}")
        table = Table(box=SIMPLE_HEAD, padding=0, pad_edge=False)
        table.add_column("")
        for length in lengths:
            table.add_column(tokens_label(length), justify="right")
        for name, found in cells.items():
            table.add_row(name, *(value(found[length]) for length in lengths))
        console.print(table)
    for note in notes(result)[2:]:
        console.print(note, soft_wrap=True, highlight=False, markup=False)


def _plain_milliseconds(cell: Cell) -> str:
    return "–" if cell.milliseconds is None else _short(cell.milliseconds)
