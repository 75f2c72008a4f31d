"""From finished runs to one row a mechanism, and to what has to be told beside the rows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slayformer.errors import ConfigError, nearest
from slayformer.evaluation.fairness import Difference, check_fair, find_differences
from slayformer.evaluation.paired import PairedDifference, paired_difference
from slayformer.evaluation.published import Published, published_losses
from slayformer.evaluation.recall_runs import (
    check_recalls,
    is_recall_of,
    mean_recall,
    recall_statement,
    unmatched_statement,
)
from slayformer.evaluation.runs import Recall, Run, named_apart
from slayformer.finite import deviation

# compared with unless another is named
USUAL_BASELINE = "softmax"


@dataclass(frozen=True)
class Row:
    """A mechanism's results over its seeds: means, except the largest peak memory.

    `loss_std` is the sample standard deviation, None for one seed, NaN if one diverged;
    `perplexity` is exp(loss).
    """

    mechanism: str
    seeds: list[int]
    loss: float
    loss_std: float | None
    perplexity: float
    bits_per_byte: float
    tokens_per_second: float
    peak_memory_mib: float
    parameters: int
    control: bool
    state_bytes: int | None
    flops_per_token: int | None
    # mean over training of the share of rows whose normaliser was guarded; None without a guard
    guarded_share: float | None
    # {first, last, loss} of each stretch of positions
    loss_by_position: list[dict[str, float]]
    # share of values recalled by number of pairs, empty if not measured
    recall: dict[str, float]
    # loss less the baseline's; None for the baseline itself and without common seeds
    difference: PairedDifference | None = None
    # nats/token; None where the setting is not that of the publication
    published_loss: float | None = None
    # whether its runs are unlike the others' in more than mechanism and seed
    unfair: bool = False

    @property
    def label(self) -> str:
        """The mechanism, and whether it is there as a control."""
        return f"{self.mechanism} (control)" if self.control else self.mechanism


@dataclass(frozen=True)
class Report:
    """What a comparison came to: rows, lowest loss first, and all that is told beside them.

    `baseline` is the mechanism that differences are to, None if there is none.
    """

    rows: list[Row]
    runs: list[Run]
    recalls: list[Recall]
    baseline: str | None
    published: Published | None
    differences: list[Difference]
    notes: list[str]

    @property
    def unigram_loss(self) -> float:
        """Cross entropy of the validation tokens under the frequencies of the training tokens."""
        return self.runs[0].summary["unigram_loss"]

    @property
    def placed(self) -> list[Row]:
        """The rows with a loss by position, those of diverged runs left out."""
        return [row for row in self.rows if row.loss_by_position and math.isfinite(row.loss)]

    @property
    def recalling(self) -> list[Row]:
        """The rows with a measured recall."""
        return [row for row in self.rows if row.recall]

    @property
    def unequal(self) -> list[str]:
        """A sentence for each difference that makes the comparison unfair."""
        return list(dict.fromkeys(map(str, self.differences)))

    @property
    def statements(self) -> list[str]:
        """Sentences that belong under the table: what the numbers are and what runs share."""
        summary, scored = self.runs[0].summary, self.runs[0].scored_tokens
        loss = self.unigram_loss
        seeds = [f"{row.mechanism} {', '.join(map(str, row.seeds))}" for row in self.rows]
        told = [
            f"Unigram floor: {loss:.4f} nats/token (perplexity {math.exp(loss):,.2f}): what "
            "knowing only how frequent each token is would give on the same validation tokens.",
            f"± is the sample standard deviation over seeds: {'; '.join(seeds)}.",
        ]
        if not self.differences:
            told[1:1] = [
                f"Every run trained on {summary['tokens']:,} tokens in {summary['updates']:,} "
                + "updates"
                + (f" and was scored on the same {scored:,} validation tokens." if scored else "."),
                "Checked equal over all runs: the plan, the settings, the tokenizer "
                f"({self.runs[0].tokenizer_identity[:12]}) and the tokens. With the same seed, "
                "runs see the same batches and start from the same weights everywhere outside "
                "the mechanism.",
            ]
        told += self._interval_statements()
        machines = {
            tuple(run.environment.get(key) for key in ("platform", "device", "threads"))
            for run in self.runs
        }
        if len(machines) > 1:
            told.append(
                "tokens/s and memory are of different machines or numbers of threads: compare "
                "them within an environment only."
            )
        told += self._version_statement()
        if self.recalling:
            told.append(recall_statement(self.recalls))
        told += unmatched_statement(self.recalls, self.runs)
        if self.published:
            told.append(self.published.statement)
        return [*told, *self.notes]

    def _version_statement(self) -> list[str]:
        """Return a sentence if the runs are of several revisions of the code or of torch."""
        found = [run.environment for run in self.runs]
        revisions = {one["git_revision"] for one in found if one.get("git_revision")}
        torches = {one["packages"]["torch"] for one in found if "torch" in one.get("packages", {})}
        # a commit is known by its first twelve digits, what follows + says that files were edited
        short = {f"{r[:12]}{r[r.index('+') :] if '+' in r else ''}" for r in revisions}
        told = [
            f"of {len(names)} {what} ({', '.join(sorted(names))})"
            for what, names in (("revisions of the code", short), ("versions of torch", torches))
            if len(names) > 1
        ]
        return [f"Runs are {' and '.join(told)}."] if told else []

    def _interval_statements(self) -> list[str]:
        by_cover: dict[str, list[Row]] = {}
        for row in self.rows:
            if row.difference is not None:
                by_cover.setdefault(row.difference.covers, []).append(row)
        told = []
        for covers, rows in by_cover.items():
            names = "" if len(by_cover) == 1 else f" ({', '.join(row.mechanism for row in rows)})"
            if covers == "nothing":
                told.append(
                    f"Difference to {self.baseline}{names}: one seed and no losses of two "
                    "documents or more, so there is no interval."
                )
                continue
            documents = max(row.difference.documents for row in rows if row.difference)
            pairs = "seed and validation document" if documents else "seed"
            count = f", {documents:,} documents" if documents else ""
            told.append(
                f"Difference to {self.baseline}{names}: paired by {pairs}, with the 95 % "
                f"confidence interval over {covers}{count}."
            )
        return told


def make_rows(
    runs: Sequence[Run],
    recalls: Sequence[Recall] = (),
    *,
    baseline: str | None = None,
    published: Published | None = None,
    unfair: Collection[Path] = (),
) -> list[Row]:
    """Return one row a mechanism, the lowest mean validation loss first (NaN last).

    `unfair` are the folders of runs not like the others.
    """
    by_mechanism = {
        mechanism: sorted((r for r in runs if r.mechanism == mechanism), key=lambda run: run.seed)
        for mechanism in dict.fromkeys(run.mechanism for run in runs)
    }
    rows = []
    for mechanism, mine in by_mechanism.items():
        summaries = [run.summary for run in mine]
        losses = [summary["validation_loss"] for summary in summaries]
        loss = statistics.fmean(losses)
        own_recalls = [recall for recall in recalls if is_recall_of(mine[0], recall)]
        theirs = [run for run in runs if run.mechanism == baseline != mechanism]
        rows.append(
            Row(
                mechanism=mechanism,
                seeds=[run.seed for run in mine],
                loss=loss,
                loss_std=deviation(losses),
                perplexity=math.inf if loss > 700 else math.exp(loss),
                bits_per_byte=statistics.fmean(s["bits_per_byte"] for s in summaries),
                tokens_per_second=statistics.fmean(s["tokens_per_second"] for s in summaries),
                peak_memory_mib=max(s["peak_memory_bytes"] for s in summaries) / 2**20,
                parameters=summaries[0]["parameters"],
                control=summaries[0].get("control", False),
                state_bytes=summaries[0].get("state_bytes"),
                flops_per_token=summaries[0].get("flops_per_token"),
                guarded_share=_guarded_share(mine),
                loss_by_position=_mean_by_position(summaries),
                recall=mean_recall(own_recalls),
                difference=paired_difference(mine, theirs),
                published_loss=published.loss_of(mine[0]) if published else None,
                unfair=any(run.folder in unfair for run in mine),
            )
        )
    return sorted(rows, key=lambda row: (math.isnan(row.loss), row.loss))


def _guarded_share(runs: Sequence[Run]) -> float | None:
    shares = [r["guarded_share"] for run in runs for r in run.metrics if "guarded_share" in r]
    return statistics.fmean(shares) if shares else None


def _mean_by_position(summaries: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    """Return the stretches of positions with the mean loss over seeds; empty if one lacks them."""
    stretches = [summary.get("loss_by_position", []) for summary in summaries]
    return [
        {
            "first": same[0]["first"],
            "last": same[0]["last"],
            "loss": statistics.fmean(stretch["loss"] for stretch in same),
        }
        for same in zip(*stretches, strict=False)
    ]


def make_report(
    runs: Sequence[Run],
    recalls: Sequence[Recall] = (),
    notes: Sequence[str] = (),
    *,
    baseline: str | None = None,
    allow_differences: bool = False,
) -> Report:
    """Return what `runs` come to; `baseline` None is softmax if it is one of them.

    A mechanism stands for its only row, whatever options that has in its name. Raises UserError if
    the runs may not be compared, unless `allow_differences`, if recall runs are not of one kind, or
    if there is no such baseline.
    """
    named, recalls = named_apart(runs), check_recalls(recalls)
    differences = find_differences(named)
    if not allow_differences:
        check_fair(differences)
    published = published_losses(named)
    baseline = _baseline_row(baseline, runs, named)
    rows = make_rows(
        named,
        recalls,
        baseline=baseline,
        published=published,
        unfair={difference.run.folder for difference in differences},
    )
    return Report(rows, named, recalls, baseline, published, differences, list(notes))


def _baseline_row(wanted: str | None, runs: Sequence[Run], named: Sequence[Run]) -> str | None:
    """Return the name of the row that `wanted` is, None if none was and there is no usual one."""
    name = wanted or USUAL_BASELINE
    names = list(dict.fromkeys(run.mechanism for run in named))
    if name in names:
        return name
    same = {to.mechanism for run, to in zip(runs, named, strict=True) if run.mechanism == name}
    if len(same) == 1:
        return same.pop()
    if wanted is None:
        return None
    raise ConfigError("baseline", wanted, nearest(wanted, names))
