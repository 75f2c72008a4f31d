"""What a piece of the paper is here: a computation, and what is shown of its data.

A module of this package defines one `Item` or several; `items.py` lists them all. `compute` does
the work and returns data that JSON can hold (numpy arrays may stand for lists). `draw`, `tables`
and `claims` get that data as JSON gives it back, so that a kept result is shown without the work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

Data = dict[str, Any]
Choice = TypeVar("Choice")

HOLDS, HOLDS_AT, FAILS, NOT_SETTLED = "holds", "holds at", "does not hold", "not settled:"
ONE_SEED = "one seed"


@dataclass(frozen=True)
class Request:
    """What a computation is asked for.

    `directory` is the item's own, kept between runs: long work can leave there what it has
    finished. `processes` is how many it may start. `progress` is told the share done, 0 to 1.
    `results` are comparisons to show: folders, or files that `results_file` tells of.
    """

    size: str
    seeds: int | None
    processes: int
    directory: Path
    progress: Callable[[float], None] = field(default=lambda share: None)
    results: Sequence[str] = ()

    def choose(self, *, quick: Choice, full: Choice) -> Choice:
        """Return the value for the size asked for."""
        return full if self.size == "full" else quick

    def seed_count(self, *, quick: int, full: int) -> int:
        """Return how many seeds to use: those asked for, or the size's own number."""
        return self.seeds or self.choose(quick=quick, full=full)


@dataclass(frozen=True)
class Picture:
    """A matplotlib Figure, the name of its files, and a caption that tells what is seen."""

    name: str
    caption: str
    figure: Any


@dataclass(frozen=True)
class Table:
    """Rows of text under `columns`; `note` says in a sentence or two what follows from them."""

    name: str
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper in our words, where it stands, what we measured, and the verdict.

    `verdict` is `HOLDS`, `FAILS`, `HOLDS_AT` followed by where, or `NOT_SETTLED` by why. Where it
    hangs on a threshold of ours, the claim says which.
    """

    text: str
    source: str
    measured: str
    verdict: str


@dataclass(frozen=True)
class Item:
    """A piece of the paper that is computed together.

    `sources` are the paper's numbers of it, as "Figure 7"; `minutes` about what the quick size
    takes one core; `published` what the paper says or shows there. One that is not `kept` only
    reads what others computed, and does so each time.
    """

    name: str
    title: str
    sources: tuple[str, ...]
    minutes: float
    compute: Callable[[Request], Data]
    published: str = ""
    kept: bool = True
    draw: Callable[[Data], Sequence[Picture]] = lambda data: ()
    tables: Callable[[Data], Sequence[Table]] = lambda data: ()
    claims: Callable[[Data], Sequence[Claim]] = lambda data: ()

    def answers_to(self, name: str) -> bool:
        """Return whether `name` is the item's or one of its sources', as figure_7."""
        return name in (self.name, *(source.lower().replace(" ", "_") for source in self.sources))
