"""What a benchmark found, as values that JSON can hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from slayformer.benchmark.clock import Samples
from slayformer.benchmark.contestants import REFERENCE


@dataclass(frozen=True)
class Cell:
    """One contestant at one length: medians and quartiles over rounds, or why there are none.

    `pass_name`: `forward`, `forward_backward`, or `decode`, one token after `length` others.
    `ratio` is the median over rounds of its time ÷ that of torch's fused attention.
    """

    contestant: str
    pass_name: str
    length: int
    left_out: str | None = None
    # the shorter length where that was found
    left_out_since: int | None = None
    milliseconds: float | None = None
    lower_milliseconds: float | None = None
    upper_milliseconds: float | None = None
    rounds: int = 0
    ratio: float | None = None
    tokens_per_second: float | None = None
    # beyond the inputs; of a token decoded, what the state holds
    memory_bytes: int | None = None
    # of a token decoded: relative RMS difference from the same tokens computed in parallel
    error: float | None = None


@dataclass(frozen=True)
class Result:
    """Everything a run of the benchmark found, with what it was found on and with."""

    machine: dict[str, Any]
    options: dict[str, Any]
    cells: list[Cell]
    # which engine computed each mechanism, `pairs` for those without a choice
    engines: dict[str, str]

    def plain(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        return asdict(self)

    @staticmethod
    def from_plain(plain: dict[str, Any]) -> Result:
        """Return what `plain` returned; raises KeyError or TypeError if it is something else."""
        given = {item.name: plain[item.name] for item in fields(Result)}
        return Result(**{**given, "cells": [Cell(**cell) for cell in plain["cells"]]})


def finished_cell(
    contestant: str,
    pass_name: str,
    length: int,
    samples: dict[str, Samples],
    *,
    tokens: int,
    memory_bytes: int | None,
    error: float | None = None,
) -> Cell:
    """Return the cell of a contestant among `samples`, whose call computes `tokens` tokens."""
    own = samples.get(contestant)
    if own is None:
        told = "the time budget was used up"
        return Cell(contestant, pass_name, length, left_out=told, memory_bytes=memory_bytes)
    reference = samples.get(REFERENCE)
    lower, upper = own.quartiles
    return Cell(
        contestant=contestant,
        pass_name=pass_name,
        length=length,
        milliseconds=1000 * own.median,
        lower_milliseconds=1000 * lower,
        upper_milliseconds=1000 * upper,
        rounds=len(own.seconds),
        ratio=None if reference is None else own.ratio(reference),
        tokens_per_second=tokens / own.median,
        memory_bytes=memory_bytes,
        error=error,
    )


def of_pass(cells: Sequence[Cell], pass_name: str) -> dict[str, dict[int, Cell]]:
    """Return the cells of a pass by contestant, then by length, in the order they came."""
    found: dict[str, dict[int, Cell]] = {}
    for cell in cells:
        if cell.pass_name == pass_name:
            found.setdefault(cell.contestant, {})[cell.length] = cell
    return found


def crossover(cells: dict[int, Cell]) -> int | None:
    """Return the shortest measured length from which on the contestant beats the reference.

    None if it does not at the longest length where both were measured.
    """
    known = sorted((length, c.ratio) for length, c in cells.items() if c.ratio is not None)
    found = None
    for length, ratio in reversed(known):
        if ratio >= 1:
            break
        found = length
    return found
