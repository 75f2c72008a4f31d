"""What scripts/bench_train.py is told; imports nothing heavy, so that `--help` answers at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from slayformer.config import positive


@dataclass
class BenchTrainConfig:
    """Everything `scripts/bench_train.py` is told for itself; all else goes to train.yaml."""

    attention: list[str]
    loops: list[str]
    # null: see the YAML
    lengths: list[int] | None = None
    tokens: int | None = positive(None)
    rounds: int | None = positive(None)
    threads: int | None = positive(None)
    time_budget_s: float | None = positive(None)
    quick: bool = False
    directory: str | None = None
    redraw: str | None = None


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the command-line arguments that are for the benchmark, and those for train.yaml."""
    own_keys = {item.name for item in fields(BenchTrainConfig)}
    own = [a for a in arguments if a.startswith("-") or a.partition("=")[0] in own_keys]
    return own, [a for a in arguments if a not in own]
