"""Whether runs may be compared: everything but mechanism and seed has to be the same."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slayformer.config_differences import differing_keys, value_of
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
    """Return where runs differ from the first in more than mechanism and seed."""
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
        (key, value_of(run.config, key), value_of(first.config, key))
        for key in differing_keys([run.config, first.config])
        if key.startswith(SHARED_CONFIG)
    ]
    return [
        *pairs,
        *_course(run, first),
        ("settings changed on the way", _changes(run), _changes(first)),
        # a version without it had no others
        (key := "initial_weights", run.config.get(key), first.config.get(key)),
        ("tokenizer", run.tokenizer_identity[:12], first.tokenizer_identity[:12]),
        _text(run, first),
        ("training tokens", run.summary["tokens"], first.summary["tokens"]),
        ("scored validation tokens", run.scored_tokens, first.scored_tokens),
    ]


def _course(run: Run, first: Run) -> list[tuple[str, Any, Any]]:
    """Return the first update with another learning rate or number of tokens than there.

    A run that a larger budget trained further has the plan of one that had it from the start.
    """
    there = {record["update"]: record for record in first.metrics if record["kind"] == "train"}
    peak = max((record.get("learning_rate", 0.0) for record in there.values()), default=0.0)
    for here in run.metrics:
        if here["kind"] == "train" and (other := there.get(here["update"])):
            for key in sorted({"learning_rate", "tokens"} & here.keys() & other.keys()):
                # cosines of two machines may differ in the last digit, and cancel at the end
                if not math.isclose(here[key], other[key], abs_tol=1e-9 * peak):
                    return [(f"{key} of update {here['update']:,}", here[key], other[key])]
    return []


def _changes(run: Run) -> str:
    """Return what of SHARED_CONFIG was changed when the run was resumed."""
    changes = run.summary.get("changed_settings", [])
    return "; ".join(one for one in changes if one.startswith(SHARED_CONFIG)) or "none"


def _text(run: Run, first: Run) -> tuple[str, Any, Any]:
    """Return what is known of the text of both, in training and validation."""
    if run.data_identity and first.data_identity:
        return "text (digest of its description)", run.data_identity[:12], first.data_identity[:12]
    # every token counts in it; sums of two machines may differ in the last digit
    ours, theirs = (one.summary["unigram_loss"] for one in (run, first))
    return "unigram_loss", ours, ours if math.isclose(ours, theirs) else theirs


def _shortest_apart(one: Path, other: Path) -> tuple[str, str]:
    """Return the names of two folders, with their parents if the names are the same."""
    return (one.name, other.name) if one.name != other.name else (str(one), str(other))
