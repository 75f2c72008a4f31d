"""Figures 2 and 21: time, memory and tokens per second of attention alone, by length."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from slayformer.benchmark.attention import measure_scaling
from slayformer.benchmark.contestants import PEERS, REFERENCE
from slayformer.benchmark.figure import MIB, TITLES, scaling_figure, tokens_label
from slayformer.benchmark.machine import in_words
from slayformer.benchmark.options import LENGTHS
from slayformer.benchmark.results import Cell, Result, of_pass
from slayformer.paper.item import FAILS, HOLDS, HOLDS_AT, Claim, Data, Item, Picture, Request, Table
from slayformer.paper.published import FIGURE_21

# the paper's setting: d_model 256, batch 1
HEADS, HEAD_WIDTH = 8, 32
EXPLICIT = ("naive_softmax", "naive_yat_spherical")
LINEAR = ("slay", "linear_elu", "performer", "cosformer")
CONTESTANTS = (REFERENCE, *EXPLICIT, *LINEAR, "slay_best")
PASSES = ("forward", "forward_backward")
QUICK_LENGTHS = (128, 512, 2048, 8192)
# published as softmax: with its matrix written out
PUBLISHED = {name if name != "softmax" else "naive_softmax": row for name, row in FIGURE_21.items()}
# how much longer twice the tokens take: below it is nearer to twice, above nearer to four times
BETWEEN = 8**0.5
# how many times less memory is orders of magnitude less
ORDERS_OF_MAGNITUDE = 10


def compute(request: Request) -> Data:
    """Return the benchmark's result: each contestant in both passes at each length."""
    threads = torch.get_num_threads()
    try:
        result = measure_scaling(
            CONTESTANTS,
            request.choose(quick=QUICK_LENGTHS, full=LENGTHS),
            passes=PASSES,
            progress=lambda told, done, total: request.progress(done / total),
            heads=HEADS,
            head_dim=HEAD_WIDTH,
            rounds=request.choose(quick=3, full=7),
            longest_call_s=request.choose(quick=2.0, full=60.0),
            threads=1,
            # on a CPU of the processor, so that other work on the machine does not count
            clock="wall" if torch.cuda.is_available() else "cpu",
        )
    finally:
        torch.set_num_threads(threads)
    return result.plain()


def draw(data: Data) -> list[Picture]:
    """Draw time, memory and tokens per second against the length."""
    result = Result.from_plain(data)
    figure = scaling_figure(result.cells, passes=PASSES, title=in_words(result.machine))
    caption = (
        f"Causal attention alone, {HEADS} heads of width {HEAD_WIDTH}, batch 1, "
        f"{data['options']['dtype']}; {_clock(data)}, medians, bands are quartiles. A line ends "
        f"where a call takes too long or too much memory. {_peers()}"
    )
    return [Picture("figure_2", caption, figure)]


def _clock(data: Data) -> str:
    return "processor time" if data["options"]["clock"] == "cpu" else "wall time"


def _peers() -> str:
    return " ".join(f"{name}: {PEERS[name].about}." for name in (REFERENCE, *EXPLICIT))


def tables(data: Data) -> list[Table]:
    """Return times and memory by length of each pass, and growth beside the published values."""
    cells = Result.from_plain(data).cells
    found = [_pass_table(pass_name, cells) for pass_name in PASSES]
    return [_published_table(cells, data), *found]


def _pass_table(pass_name: str, cells: Sequence[Cell]) -> Table:
    by_contestant = of_pass(cells, pass_name)
    lengths = sorted({length for found in by_contestant.values() for length in found})
    rows = [
        [name, *(_time_and_memory(found[length]) for length in lengths)]
        for name, found in by_contestant.items()
    ]
    reasons = {cell.left_out for cell in cells if cell.left_out is not None}
    note = f"Left out (–): {'; '.join(sorted(reasons))}." if reasons else ""
    return Table(
        f"scaling_{pass_name}",
        f"Attention alone, {TITLES[pass_name]}: ms, and MiB beyond the inputs",
        ["contestant", *(f"{tokens_label(length)} tokens" for length in lengths)],
        rows,
        f"Medians. {note}".strip(),
    )


def _time_and_memory(cell: Cell) -> str:
    if cell.milliseconds is None:
        return "–"
    memory = "–" if cell.memory_bytes is None else f"{cell.memory_bytes / MIB:,.1f}"
    return (
        f"{cell.milliseconds:,.3g} · {memory}"
        if cell.milliseconds < 1000
        else (f"{cell.milliseconds:,.0f} · {memory}")
    )


def _published_table(cells: Sequence[Cell], data: Data) -> Table:
    rows = []
    for name, found in of_pass(cells, "forward").items():
        cell = longest(found)
        published = PUBLISHED.get(name)
        rows.append(
            [
                name,
                *(
                    ("–", "–", "–", "–")
                    if cell is None
                    else (
                        f"{cell.length:,}",
                        f"{cell.milliseconds:,.1f}",
                        f"{(cell.memory_bytes or 0) / MIB:,.1f}",
                        f"{cell.tokens_per_second:,.0f}",
                    )
                ),
                "–" if math.isnan(growth(found)) else f"{growth(found):.2f}",
                f"{published[1]:g} ms, {published[2]:g} GB at {published[0]:,}"
                if published
                else "–",
            ]
        )
    columns = [
        "contestant",
        "longest (tokens)",
        "time there (ms)",
        "memory there (MiB)",
        "tokens/s there",
        "time × for twice the tokens",
        "published (A100, 80 GB)",
    ]
    note = (
        f"Forward, {_clock(data)}. Growth is between the two longest lengths: 2 is linear, 4 "
        f"quadratic. The paper shows no fused softmax. {in_words(data['machine'])}; {_peers()}"
    )
    return Table(
        "figure_21", "Figures 2 and 21: scaling beside the published values", columns, rows, note
    )


def longest(found: dict[int, Cell]) -> Cell | None:
    """Return the cell of the longest length that was timed, None if there is none."""
    timed = [cell for _, cell in sorted(found.items()) if cell.milliseconds is not None]
    return timed[-1] if timed else None


def growth(found: dict[int, Cell]) -> float:
    """Return how many times longer twice the tokens take, of the two longest lengths timed.

    NaN with fewer than two.
    """
    timed = [(n, cell.milliseconds) for n, cell in sorted(found.items()) if cell.milliseconds]
    if len(timed) < 2:
        return math.nan
    (short, earlier), (long, later) = timed[-2:]
    return float((later / earlier) ** (1 / math.log2(long / short)))


def claims(data: Data) -> list[Claim]:
    """Return the paper's claims of section 3.2."""
    forward = of_pass(Result.from_plain(data).cells, "forward")
    grows = {name: growth(forward[name]) for name in (*LINEAR, *EXPLICIT)}
    if any(map(math.isnan, grows.values())):
        return []
    linear = all(grows[name] < BETWEEN for name in LINEAR)
    quadratic = all(grows[name] > BETWEEN for name in EXPLICIT)
    told = ", ".join(f"{name} {factor:.2f}" for name, factor in grows.items())
    return [
        Claim(
            "Exact attention grows quadratically with the length, linear mechanisms linearly",
            "Section 3.2, Figure 2",
            f"time for twice the tokens (2 is linear, 4 quadratic, {BETWEEN:.2f} between them): "
            f"{told}",
            HOLDS
            if linear and quadratic
            else f"{HOLDS_AT} the linear mechanisms"
            if linear
            else f"{HOLDS_AT} exact attention"
            if quadratic
            else FAILS,
        ),
        *_memory_claim(forward),
        *_speed_claim(forward),
    ]


def _memory_claim(forward: dict[str, dict[int, Cell]]) -> list[Claim]:
    cell = longest(forward["naive_softmax"])
    if cell is None or not cell.memory_bytes:
        return []
    ours = forward["slay"][cell.length].memory_bytes
    fused = forward[REFERENCE][cell.length].memory_bytes
    if not ours or not fused:
        return []
    ratio = cell.memory_bytes / ours
    told = (
        f"at {cell.length:,} tokens softmax with its matrix takes {ratio:,.1f} times SLAY's "
        f"memory, fused softmax {fused / ours:.2f} times"
    )
    text = (
        "At long lengths SLAY takes orders of magnitude less memory than exact attention "
        f"({ORDERS_OF_MAGNITUDE} times or more)"
    )
    enough = ratio >= ORDERS_OF_MAGNITUDE
    verdict = f"{HOLDS_AT} softmax with its matrix written out" if enough else FAILS
    if fused >= ORDERS_OF_MAGNITUDE * ours:
        verdict = HOLDS
    return [Claim(text, "Section 3.2, Figure 2", told, verdict)]


def _speed_claim(forward: dict[str, dict[int, Cell]]) -> list[Claim]:
    cell = longest(forward["slay"])
    if cell is None or cell.milliseconds is None:
        return []
    others = {
        name: other.milliseconds
        for name in LINEAR[1:]
        if (other := forward[name][cell.length]).milliseconds
    }
    met = [name for name, time in others.items() if time and cell.milliseconds <= 1.1 * time]
    told = ", ".join(
        f"{cell.milliseconds / (time or math.nan):.2f} × {n}" for n, time in others.items()
    )
    text = "SLAY's throughput is comparable to that of other linear mechanisms (within 10 %)"
    verdict = HOLDS if len(met) == len(others) else f"{HOLDS_AT} {', '.join(met)}" if met else FAILS
    measured = f"SLAY's time at {cell.length:,} tokens: {told}"
    return [Claim(text, "Section 3.2, Figure 21", measured, verdict)]


ITEM = Item(
    name="scaling",
    title="time, memory and throughput by length",
    sources=("Figure 2", "Figure 21"),
    minutes=4.0,
    compute=compute,
    published="One A100 of 80 GB, L to 131,072, no fused softmax. The full size has every power of "
    "two from 128 to 131,072 tokens, on a GPU if there is one.",
    draw=draw,
    tables=tables,
    claims=claims,
)
