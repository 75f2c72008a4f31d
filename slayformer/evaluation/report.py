"""From finished runs to tables and pictures: Markdown, CSV, JSON, PNG and the terminal."""

from __future__ import annotations

import csv
import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slayformer.evaluation.report_figure import (
    draw_curves,
    draw_positions,
    draw_recall,
    stretch_label,
)
from slayformer.evaluation.runs import Run, check_fair, scored_tokens


@dataclass(frozen=True)
class Row:
    """A mechanism's results over its seeds: means, except the largest peak memory.

    `loss_std` is the sample standard deviation, None for one seed; `perplexity` is exp(loss).
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

    @property
    def label(self) -> str:
        """The mechanism, and whether it is there as a control."""
        return f"{self.mechanism} (control)" if self.control else self.mechanism


COLUMNS: dict[str, Callable[[Row], str]] = {
    "mechanism": lambda row: row.label,
    "validation loss (nats/token)": lambda row: (
        f"{row.loss:.4f} (1 seed)"
        if row.loss_std is None
        else f"{row.loss:.4f} ± {row.loss_std:.4f}"
    ),
    "perplexity": lambda row: f"{row.perplexity:,.2f}",
    "bits per byte": lambda row: f"{row.bits_per_byte:.4f}",
    "tokens/s": lambda row: f"{row.tokens_per_second:,.0f}",
    "peak memory (MiB)": lambda row: f"{row.peak_memory_mib:,.0f}",
    "parameters": lambda row: f"{row.parameters:,}",
}
# what a terminal of 80 columns has no room for
MORE_COLUMNS: dict[str, Callable[[Row], str]] = {
    "state (KiB a sequence)": lambda row: (
        "–" if row.state_bytes is None else f"{row.state_bytes / 1024:,.0f}"
    ),
    "forward (MFLOP/token)": lambda row: (
        "–" if row.flops_per_token is None else f"{row.flops_per_token / 1e6:,.2f}"
    ),
    "guarded rows (%)": lambda row: (
        "–" if row.guarded_share is None else f"{100 * row.guarded_share:.1f}"
    ),
}


@dataclass(frozen=True)
class Report:
    """What a comparison came to: rows, lowest loss first, and the files that hold it."""

    rows: list[Row]
    unigram_loss: float
    files: list[Path]


def make_rows(runs: Sequence[Run], recalls: Sequence[dict[str, Any]] = ()) -> list[Row]:
    """Return one row a mechanism, the lowest mean validation loss first (NaN last).

    `recalls` are summaries of recall runs.
    """
    rows = []
    for mechanism in dict.fromkeys(run.mechanism for run in runs):
        mine = sorted((run for run in runs if run.mechanism == mechanism), key=lambda run: run.seed)
        summaries = [run.summary for run in mine]

        def mean(key: str, summaries: list[dict[str, Any]] = summaries) -> float:
            return statistics.fmean(summary[key] for summary in summaries)

        losses = [summary["validation_loss"] for summary in summaries]
        loss = mean("validation_loss")
        rows.append(
            Row(
                mechanism=mechanism,
                seeds=[run.seed for run in mine],
                loss=loss,
                loss_std=statistics.stdev(losses) if len(losses) > 1 else None,
                perplexity=math.inf if loss > 700 else math.exp(loss),
                bits_per_byte=mean("bits_per_byte"),
                tokens_per_second=mean("tokens_per_second"),
                peak_memory_mib=max(s["peak_memory_bytes"] for s in summaries) / 2**20,
                parameters=summaries[0]["parameters"],
                control=summaries[0].get("control", False),
                state_bytes=summaries[0].get("state_bytes"),
                flops_per_token=summaries[0].get("flops_per_token"),
                guarded_share=_guarded_share(mine),
                loss_by_position=_mean_by_position(summaries),
                recall=_mean_recall([r for r in recalls if r["mechanism"] == mechanism]),
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


def _mean_recall(recalls: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the share of values recalled by number of pairs, the mean over seeds."""
    by_seed = [recall["accuracy"] for recall in recalls]
    return {p: statistics.fmean(one[p] for one in by_seed) for p in (by_seed or [{}])[0]}


def write_report(
    directory: Path,
    runs: Sequence[Run],
    recalls: Sequence[dict[str, Any]] = (),
    notes: Sequence[str] = (),
) -> Report:
    """Write comparison.md, .csv, .json and the pictures to `directory`, and return what they hold.

    `recalls` are summaries of recall runs, `notes` sentences for the report. Raises UserError if
    the runs cannot be compared.
    """
    check_fair(runs)
    rows = make_rows(runs, recalls)
    statements = [*_statements(runs, rows), *notes]
    unigram = runs[0].summary["unigram_loss"]
    files = [directory / f"comparison.{kind}" for kind in ("md", "csv", "json")]
    pictures = [directory / "curves.png"]
    draw_curves(pictures[0], runs, [row.mechanism for row in rows])
    placed = [row for row in rows if row.loss_by_position]
    if placed:
        pictures.append(directory / "positions.png")
        draw_positions(pictures[-1], placed)
    recalling = [row for row in rows if row.recall]
    if recalling:
        pictures.append(directory / "recall.png")
        draw_recall(pictures[-1], recalling, recalls[0]["chance"])
        statements.append(_recall_statement(recalls))
    sections = _sections(rows, placed, recalling, statements, pictures)
    files[0].write_text(sections, encoding="utf-8")
    with files[1].open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*asdict(rows[0]), "unigram_loss"])
        writer.writeheader()
        for row in rows:
            seeds = " ".join(map(str, row.seeds))
            nested = {key: json.dumps(getattr(row, key)) for key in ("loss_by_position", "recall")}
            writer.writerow({**asdict(row), **nested, "seeds": seeds, "unigram_loss": unigram})
    record = {
        "rows": [asdict(row) for row in rows],
        "unigram_loss": unigram,
        "statements": statements,
        "plan": runs[0].plan,
        "tokenizer_identity": runs[0].tokenizer_identity,
        "runs": [{"folder": run.folder.name, **run.summary} for run in runs],
        "recalls": list(recalls),
    }
    files[2].write_text(json.dumps(record, indent=2), encoding="utf-8")
    return Report(rows, unigram, [*files, *pictures])


def _statements(runs: Sequence[Run], rows: Sequence[Row]) -> list[str]:
    """Return the sentences under the table: the floor to beat, and what the runs share."""
    summary = runs[0].summary
    loss = summary["unigram_loss"]
    scored = scored_tokens(runs[0])
    seeds = [f"{row.mechanism} {', '.join(map(str, row.seeds))}" for row in rows]
    return [
        f"Unigram floor: {loss:.4f} nats/token (perplexity {math.exp(loss):,.2f}): what knowing "
        "only how frequent each token is would give on the same validation tokens.",
        f"Every run trained on {summary['tokens']:,} tokens in {summary['updates']:,} updates"
        + (f" and was scored on the same {scored:,} validation tokens." if scored else "."),
        "Checked equal over all runs: the plan, the tokenizer "
        f"({runs[0].tokenizer_identity[:12]}) and the tokens. With the same seed, runs see the "
        "same batches and start from the same weights everywhere outside the mechanism.",
        f"± is the sample standard deviation over seeds: {'; '.join(seeds)}.",
    ]


def _recall_statement(recalls: Sequence[dict[str, Any]]) -> str:
    """Return what the recall runs were."""
    model, seeds = recalls[0]["config"]["model"], sorted({r["seed"] for r in recalls})
    return (
        f"Recall: {model['layers']} layers of width {model['width']} with a short convolution of "
        f"{model['short_convolution']}, {recalls[0]['updates']:,} updates, seeds "
        f"{', '.join(map(str, seeds))}; chance {100 * recalls[0]['chance']:.1f} %."
    )


def _sections(
    rows: Sequence[Row],
    placed: Sequence[Row],
    recalling: Sequence[Row],
    statements: Sequence[str],
    pictures: Sequence[Path],
) -> str:
    """Return the report in Markdown: a table each for loss, position and recall, then pictures."""
    columns = {**COLUMNS, **MORE_COLUMNS}
    body = [[column(row) for column in columns.values()] for row in rows]
    lines = ["# Comparison", "", *_table([*columns], body), ""]
    lines += [f"- {statement}" for statement in statements]
    if placed:
        names = [stretch_label(stretch) for stretch in placed[0].loss_by_position]
        body = [[r.label, *(f"{s['loss']:.3f}" for s in r.loss_by_position)] for r in placed]
        lines += ["", "## Validation loss by position in the context (nats/token)", ""]
        lines += _table(["mechanism", *names], body)
    if recalling:
        body = [[r.label, *(f"{100 * a:.1f}" for a in r.recall.values())] for r in recalling]
        lines += ["", "## Associative recall (% of values, by number of pairs)", ""]
        lines += _table(["mechanism", *recalling[0].recall], body)
    for picture in pictures:
        lines += ["", f"![{picture.stem}]({picture.name})"]
    return "\n".join([*lines, ""])


def _table(names: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    rule = ["---"] + ["---:"] * (len(names) - 1)
    return ["| " + " | ".join(cells) + " |" for cells in (names, rule, *body)]


def print_report(report: Report) -> None:
    """Print the table and the unigram floor to the terminal, and recall if it was measured."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    columns: dict[str, Callable[[Row], str]] = {**COLUMNS}
    if any(row.recall for row in report.rows):
        columns.pop("peak memory (MiB)")
        columns["recall, most pairs (%)"] = lambda row: (
            f"{100 * list(row.recall.values())[-1]:.1f}" if row.recall else "–"
        )
    table = Table(box=SIMPLE_HEAD, padding=0, pad_edge=False)
    for number, name in enumerate(columns):
        # a word a line: values set the width, and the table fits 80 columns
        table.add_column(name.replace(" ", "\n"), justify="right" if number else "left")
    for row in report.rows:
        table.add_row(*(column(row) for column in columns.values()))
    console = Console()
    console.print(table)
    console.print(f"unigram floor: {report.unigram_loss:.4f} nats/token")
