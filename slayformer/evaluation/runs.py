"""What runs left behind: reading them, and whether they may be compared."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slayformer.errors import UserError

# training losses of single updates are noisy: a curve shows at most this many means of them
CURVE_POINTS = 150


@dataclass(frozen=True)
class Run:
    """What a finished run left behind in `folder`."""

    folder: Path
    mechanism: str
    seed: int
    summary: dict[str, Any]
    plan: dict[str, Any]
    metrics: list[dict[str, Any]]
    tokenizer_identity: str

    def curve(self, kind: str) -> list[tuple[int, float]]:
        """Return (training tokens, loss in nats/token) of the `train` or `validation` records.

        The losses of many updates are averaged over neighbours, to at most CURVE_POINTS points.
        """
        records = [record for record in self.metrics if record["kind"] == kind]
        size = max(1, math.ceil(len(records) / CURVE_POINTS)) if kind == "train" else 1
        groups = [records[start : start + size] for start in range(0, len(records), size)]
        return [(g[-1]["tokens"], statistics.fmean(r["loss"] for r in g)) for g in groups]


def is_finished(folder: Path) -> bool:
    """Return whether the run in `folder` reached its budget and wrote its summary."""
    try:
        return json.loads((folder / "summary.json").read_text(encoding="utf-8"))["finished"] is True
    except (OSError, ValueError, KeyError, TypeError):
        return False


def read_run(folder: Path) -> Run:
    """Return the finished run in `folder`; raises UserError if it is unfinished or unreadable."""
    from slayformer.data.tokenizer import load_tokenizer
    from slayformer.training.checkpoint import find_checkpoint

    if not is_finished(folder):
        raise UserError(f"{folder}: not a finished run (its summary.json does not say so)")
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        # a resumed run may have told the same update twice: the later line stands
        records = {(r["kind"], r["update"]): r for r in map(json.loads, lines)}
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{folder}: unreadable run: {error}") from error
    metrics = sorted(records.values(), key=lambda record: record["update"])
    identity = load_tokenizer(find_checkpoint(folder) / "tokenizer").identity
    return Run(folder, summary["mechanism"], summary["seed"], summary, plan, metrics, identity)


def read_recall(folder: Path) -> dict[str, Any]:
    """Return the summary of the finished recall run in `folder`; UserError if unreadable."""
    if not is_finished(folder):
        raise UserError(f"{folder}: not a finished run (its summary.json does not say so)")
    return json.loads((folder / "summary.json").read_text(encoding="utf-8"))


def check_fair(runs: Sequence[Run]) -> None:
    """Raise UserError unless all runs had the same plan, tokenizer, data and amount of validation.

    The unigram cross entropy stands for the data: every training and validation token counts in it.
    """
    first = runs[0]
    for run in runs[1:]:
        for what, ours, theirs in (
            ("plan.json", run.plan, first.plan),
            ("tokenizer", run.tokenizer_identity, first.tokenizer_identity),
            ("unigram_loss", run.summary["unigram_loss"], first.summary["unigram_loss"]),
            ("training tokens", run.summary["tokens"], first.summary["tokens"]),
            ("scored validation tokens", scored_tokens(run), scored_tokens(first)),
        ):
            if ours != theirs:
                raise UserError(
                    f"{run.folder} and {first.folder} cannot be compared: their {what} differ"
                    f"{_difference(ours, theirs)}"
                )


def scored_tokens(run: Run) -> int | None:
    counts = [r["scored_tokens"] for r in run.metrics if r["kind"] == "validation"]
    return counts[-1] if counts else None


def _difference(ours: Any, theirs: Any) -> str:
    if not isinstance(ours, dict):
        return f" ({ours} and {theirs})"
    keys = sorted(k for k in ours.keys() | theirs.keys() if ours.get(k) != theirs.get(k))
    return f" in {', '.join(keys)}"
