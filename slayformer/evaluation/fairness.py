"""Whether runs may be compared: everything but mechanism and seed has to be the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slayformer.errors import UserError
from slayformer.evaluation.runs import Run

# what shapes a result beside the plan, the tokens and the mechanism
SHARED_CONFIG = (
    *("model.", "optimizer.", "schedule.", "bad_updates.", "data.isolate_documents"),
    *("engine.precision", "engine.deepspeed"),
)


@dataclass(frozen=True)
class Difference:
    """What a run has other than the first of the comparison: the values of `what` in both."""

    run: Run
    first: Run
    what: str
    ours: Any
    theirs: Any

    def __str__(self) -> str:
        """Say it in one sentence."""
        own, other = _shortest_apart(self.run.folder, self.first.folder)
        return f"{self.what} differs: {self.ours} in {own}, {self.theirs} in {other}"


def find_differences(runs: Sequence[Run]) -> list[Difference]:
    """Return where runs differ from the first in more than mechanism and seed.

    The unigram cross entropy stands for the data: every training and validation token counts in it.
    """
    first = runs[0]
    return [
        Difference(run, first, what, ours, theirs)
        for run in runs[1:]
        for what, ours, theirs in _pairs(run, first)
        if ours != theirs
    ]


def check_fair(differences: Sequence[Difference]) -> None:
    """Raise UserError if there are `differences` in plan, tokenizer, data or settings."""
    if differences:
        first = differences[0]
        more = {difference.what for difference in differences} - {first.what}
        raise UserError(
            f"{first.run.folder} and {first.first.folder} cannot be compared: their {first.what} "
            f"differ ({first.ours} and {first.theirs})"
            + (f"; so do {', '.join(sorted(more))}" if more else "")
            + "; scripts/report.py allow_differences=true shows them in red"
        )


def _pairs(run: Run, first: Run) -> list[tuple[str, Any, Any]]:
    """Return (what, value here, value there) of all that has to be equal."""
    # a key that one lacks is an option its version did not have
    pairs = [
        (f"plan.{key}", run.plan[key], first.plan[key]) for key in first.plan if key in run.plan
    ]
    pairs += [
        (key, run.config[key], first.config[key])
        for key in first.config.keys() & run.config.keys()
        if key.startswith(SHARED_CONFIG)
    ]
    return [
        *pairs,
        # a version without it had no others
        (key := "initial_weights", run.config.get(key), first.config.get(key)),
        ("tokenizer", run.tokenizer_identity[:12], first.tokenizer_identity[:12]),
        ("unigram_loss", run.summary["unigram_loss"], first.summary["unigram_loss"]),
        ("training tokens", run.summary["tokens"], first.summary["tokens"]),
        ("scored validation tokens", run.scored_tokens, first.scored_tokens),
    ]


def _shortest_apart(one: Path, other: Path) -> tuple[str, str]:
    """Return the names of two folders, with their parents if the names are the same."""
    return (one.name, other.name) if one.name != other.name else (str(one), str(other))
