"""Figures 2 and 21: what a benchmark's cells say, and a real one of a few tokens."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from slayformer.benchmark.results import Cell, Result
from slayformer.paper import scaling
from slayformer.paper.item import Request
from slayformer.paper.scaling import CONTESTANTS, EXPLICIT, PASSES, claims, draw, growth, tables

MACHINE = {"device": "cpu", "name": "a machine", "threads": 1}


def cell(name: str, pass_name: str, length: int, ms: float, mib: float) -> Cell:
    return Cell(
        name,
        pass_name,
        length,
        milliseconds=ms,
        lower_milliseconds=ms,
        upper_milliseconds=ms,
        tokens_per_second=1000 * length / ms,
        memory_bytes=int(mib * 2**20),
    )


def data(slay_ms: float = 1.0, slay_mib: float = 1.0) -> dict[str, Any]:
    cells = []
    for pass_name in PASSES:
        for name in CONTESTANTS:
            for length in (100, 200, 800):
                quadratic = name in EXPLICIT
                if quadratic and length == 800:
                    left_out = "out of memory at 800"
                    cells.append(Cell(name, pass_name, length, left_out=left_out))
                    continue
                ms, mib = (length**2 / 1e3,) * 2 if quadratic else (length / 100,) * 2
                if name == "slay":
                    ms, mib = ms * slay_ms, mib * slay_mib
                cells.append(cell(name, pass_name, length, ms, mib))
    options = {"dtype": "fp32", "passes": list(PASSES), "clock": "cpu"}
    return Result(machine(), options, cells, {}).plain()


def machine() -> dict[str, Any]:
    from slayformer.benchmark.machine import describe

    return describe(torch.device("cpu"), 1)


def test_growth_by_hand() -> None:
    # ÷ 4 lengths: 9 times the time is 3 for each doubling
    cells = {n: cell("slay", "forward", n, ms, 1) for n, ms in ((1, 7.0), (2, 5.0), (8, 45.0))}
    assert growth(cells) == pytest.approx(3.0)
    assert math.isnan(growth({1: cells[1]}))
    assert math.isnan(growth({1: cells[1], 2: Cell("slay", "forward", 2, left_out="no")}))


def test_tables_and_claims() -> None:
    given = data()
    published, forward, _ = tables(given)
    rows = {row[0]: row[1:] for row in published.rows}
    assert rows["slay"][:5] == ["800", "8.0", "8.0", "100,000", "2.00"]
    assert rows["naive_softmax"][:1] == ["200"]
    assert rows["naive_softmax"][4] == "4.00"
    assert rows["slay"][5] == "149.6 ms, 2.4 GB at 131,072"
    assert {row[0]: row[1:] for row in forward.rows}["naive_softmax"] == [
        "10 · 10.0",
        "40 · 40.0",
        "–",
    ]
    assert "out of memory" in forward.note
    verdicts = [claim.verdict for claim in claims(given)]
    assert verdicts == ["holds", "holds at softmax with its matrix written out", "holds"]
    slow = [claim.verdict for claim in claims(data(slay_ms=2.0, slay_mib=3.0))]
    assert slow == ["holds", "does not hold", "does not hold"]
    # what decides stands in the claim
    grows, memory, speed = claims(given)
    assert "(2 is linear, 4 quadratic, 2.83 between them): slay 2.00" in grows.measured
    assert "(10 times or more)" in memory.text
    assert "(within 10 %)" in speed.text
    # fused softmax takes as much as ten times ours
    assert claims(data(slay_mib=0.09))[1].verdict == "holds"


def test_the_picture_shows_the_cells() -> None:
    (picture,) = draw(data())
    time, memory, speed = picture.figure.axes[:3]
    names = list(CONTESTANTS)
    line = time.lines[names.index("naive_softmax")]
    assert list(line.get_xdata()) == [100, 200]
    assert list(line.get_ydata()) == [10, 40]
    assert list(memory.lines[names.index("slay")].get_ydata()) == pytest.approx([1, 2, 8], rel=1e-4)
    assert list(speed.lines[names.index("slay")].get_ydata()) == [1e5] * 3


@pytest.mark.slow
def test_a_real_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "QUICK_LENGTHS", (32, 64))
    monkeypatch.setattr(scaling, "PASSES", ("forward",))
    shares: list[float] = []
    threads = torch.get_num_threads()
    result = scaling.compute(Request("quick", None, 1, tmp_path, shares.append))
    assert torch.get_num_threads() == threads
    assert shares[-1] == 1
    cells = Result.from_plain(result).cells
    assert {(c.contestant, c.length) for c in cells} == {
        (n, t) for n in CONTESTANTS for t in (32, 64)
    }
    assert all(c.milliseconds and c.milliseconds > 0 for c in cells)
