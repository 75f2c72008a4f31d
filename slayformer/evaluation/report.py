"""From finished runs to one table and one picture: Markdown, CSV, JSON, PNG and the terminal."""

from __future__ import annotations

import csv
import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slayformer.errors import UserError

# Okabe and Ito's colours, told apart by colour-blind eyes; markers repeat the difference, and of
# curves that lie on one another dashes show both
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX"
DASHES = ("-", "--", "-.", ":")
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


COLUMNS: dict[str, Callable[[Row], str]] = {
    "mechanism": lambda row: row.mechanism,
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


def _seeds(count: int) -> str:
    return "1 seed" if count == 1 else f"{count} seeds"


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
            ("scored validation tokens", _scored_tokens(run), _scored_tokens(first)),
        ):
            if ours != theirs:
                raise UserError(
                    f"{run.folder} and {first.folder} cannot be compared: their {what} differ"
                    f"{_difference(ours, theirs)}"
                )


def _scored_tokens(run: Run) -> int | None:
    counts = [r["scored_tokens"] for r in run.metrics if r["kind"] == "validation"]
    return counts[-1] if counts else None


def _difference(ours: Any, theirs: Any) -> str:
    if not isinstance(ours, dict):
        return f" ({ours} and {theirs})"
    keys = sorted(k for k in ours.keys() | theirs.keys() if ours.get(k) != theirs.get(k))
    return f" in {', '.join(keys)}"


def make_rows(runs: Sequence[Run]) -> list[Row]:
    """Return one row a mechanism, the lowest mean validation loss first (NaN last)."""
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
            )
        )
    return sorted(rows, key=lambda row: (math.isnan(row.loss), row.loss))


def write_report(directory: Path, runs: Sequence[Run], notes: Sequence[str] = ()) -> list[Row]:
    """Write comparison.md, .csv, .json and curves.png to `directory`; return the table's rows.

    `notes` are sentences for the report. Raises UserError if the runs cannot be compared.
    """
    check_fair(runs)
    rows = make_rows(runs)
    statements = [*_statements(runs, rows), *notes]
    unigram = runs[0].summary["unigram_loss"]
    (directory / "comparison.md").write_text(_markdown(rows, statements), encoding="utf-8")
    with (directory / "comparison.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*asdict(rows[0]), "unigram_loss"])
        writer.writeheader()
        for row in rows:
            seeds = " ".join(map(str, row.seeds))
            writer.writerow({**asdict(row), "seeds": seeds, "unigram_loss": unigram})
    record = {
        "rows": [asdict(row) for row in rows],
        "unigram_loss": unigram,
        "statements": statements,
        "plan": runs[0].plan,
        "tokenizer_identity": runs[0].tokenizer_identity,
        "runs": [{"folder": run.folder.name, **run.summary} for run in runs],
    }
    (directory / "comparison.json").write_text(json.dumps(record, indent=2), encoding="utf-8")
    draw_curves(directory / "curves.png", runs, [row.mechanism for row in rows])
    return rows


def _statements(runs: Sequence[Run], rows: Sequence[Row]) -> list[str]:
    """Return the sentences under the table: the floor to beat, and what the runs share."""
    summary = runs[0].summary
    loss = summary["unigram_loss"]
    scored = _scored_tokens(runs[0])
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


def _markdown(rows: Sequence[Row], statements: Sequence[str]) -> str:
    names = list(COLUMNS)
    table = [names, ["---"] + ["---:"] * (len(names) - 1)]
    table += [[column(row) for column in COLUMNS.values()] for row in rows]
    lines = ["| " + " | ".join(cells) + " |" for cells in table]
    listed = [f"- {statement}" for statement in statements]
    return "\n".join(["# Comparison", "", *lines, "", *listed, "", "![curves](curves.png)", ""])


def print_rows(rows: Sequence[Row], unigram_loss: float) -> None:
    """Print the table and the unigram floor to the terminal."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, padding=0, pad_edge=False)
    for number, name in enumerate(COLUMNS):
        # a word a line: values set the width, and the table fits 80 columns
        table.add_column(name.replace(" ", "\n"), justify="right" if number else "left")
    for row in rows:
        table.add_row(*(column(row) for column in COLUMNS.values()))
    console = Console()
    console.print(table)
    console.print(f"unigram floor: {unigram_loss:.4f} nats/token")


def draw_curves(path: Path, runs: Sequence[Run], mechanisms: Sequence[str]) -> None:
    """Draw training and validation loss against training tokens to `path`.

    Each seed is a thin line, the mean over a mechanism's seeds a thick one; `mechanisms` gives the
    order of the legend.
    """
    from matplotlib.figure import Figure

    # a Figure of its own draws with Agg and leaves pyplot's global state alone
    figure = Figure(figsize=(11, 4.6), layout="constrained", dpi=150)
    left, right = figure.subplots(1, 2)
    for number, mechanism in enumerate(mechanisms):
        mine = [run for run in runs if run.mechanism == mechanism]
        style: dict[str, Any] = {
            "color": COLOURS[number % len(COLOURS)],
            "linestyle": DASHES[number % len(DASHES)],
        }
        for axes, kind in ((left, "train"), (right, "validation")):
            curves = [curve for run in mine if (curve := run.curve(kind))]
            for curve in curves if len(curves) > 1 else []:
                axes.plot(*zip(*curve, strict=True), linewidth=0.6, alpha=0.6, **style)
            label = f"{mechanism} ({_seeds(len(mine))})"
            (line,) = axes.plot(*_mean_curve(curves), label=label, linewidth=1.8, **style)
            if kind == "validation":
                line.set(marker=MARKERS[number % len(MARKERS)], markersize=4)
    for axes, title in ((left, "Training loss"), (right, "Validation loss")):
        axes.axhline(
            runs[0].summary["unigram_loss"], color="#777777", linewidth=1, label="unigram floor"
        )
        axes.set(title=title, xlabel="training tokens", ylabel="loss (nats/token)")
        axes.xaxis.set_major_formatter(_tokens_label)
        axes.grid(alpha=0.25)
    right.legend(fontsize=9)
    figure.savefig(path)


def _mean_curve(curves: Sequence[Sequence[tuple[int, float]]]) -> tuple[list[int], list[float]]:
    """Return tokens and mean losses at the tokens that every curve has."""
    by_tokens = [dict(curve) for curve in curves]
    shared = [t for t in (by_tokens[0] if by_tokens else {}) if all(t in one for one in by_tokens)]
    return shared, [statistics.fmean(one[t] for one in by_tokens) for t in shared]


def _tokens_label(value: float, _position: object = None) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g} {unit}"
    return f"{value:g}"
