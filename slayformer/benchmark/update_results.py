"""What a benchmark of updates found, as values that JSON can hold."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True)
class UpdateCell:
    """One mechanism under one loop at one context length: medians over rounds, or why none.

    Milliseconds are of an update and of its parts. `ratio`: tokens per second ÷ those of softmax
    under the same loop; `overhead`: time ÷ that of the plain loop; both medians over rounds.
    """

    mechanism: str
    loop: str
    length: int
    left_out: str | None = None
    parameters: int | None = None
    rounds: int = 0
    milliseconds: float | None = None
    lower_milliseconds: float | None = None
    upper_milliseconds: float | None = None
    data_milliseconds: float | None = None
    forward_backward_milliseconds: float | None = None
    optimizer_milliseconds: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    ratio: float | None = None
    overhead: float | None = None


@dataclass(frozen=True)
class UpdateResult:
    """Everything a run found, with what it was found on and with."""

    machine: dict[str, Any]
    options: dict[str, Any]
    # what every update had in common
    shared: dict[str, Any]
    cells: list[UpdateCell]

    def plain(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        return asdict(self)

    @staticmethod
    def from_plain(plain: dict[str, Any]) -> UpdateResult:
        """Return what `plain` returned; raises KeyError or TypeError if it is something else."""
        given = {item.name: plain[item.name] for item in fields(UpdateResult)}
        return UpdateResult(**{**given, "cells": [UpdateCell(**cell) for cell in plain["cells"]]})
