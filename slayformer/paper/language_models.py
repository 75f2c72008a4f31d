"""Table 5 and Figure 3: language models with each mechanism, and their order beside the paper's.

Training them takes hours: scripts/compare.py does it, and what it left behind is read here.
"""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from slayformer.data.shards import write_atomically
from slayformer.evaluation.report_figure import MARKERS, mean_curve, tokens_label
from slayformer.finite import deviation
from slayformer.paper.figures import line_styles, new_figure
from slayformer.paper.item import (
    FAILS,
    HOLDS,
    HOLDS_AT,
    NOT_SETTLED,
    ONE_SEED,
    Claim,
    Data,
    Item,
    Picture,
    Request,
    Table,
)
from slayformer.paper.order import (
    OPEN,
    REVERSED,
    SAME,
    compare_order,
    difference,
    losses,
    rank_correlation,
)
from slayformer.paper.published import TABLE_5
from slayformer.paper.results_file import KEPT, read_results

COMMAND = "python scripts/compare.py experiment=table5_cpu directory=comparisons/table5_cpu"
# the linear-time mechanisms that the paper compares SLAY with
LINEAR_RIVALS = ("linear_elu", "cosformer", "performer")
_COLUMNS = (
    "mechanism",
    "validation loss (nats/token)",
    "perplexity",
    "bits per byte",
    "published loss",
    "published perplexity",
)


def compute(request: Request) -> Data:
    """Return the results asked for, or those the project keeps; each is left as a file as well."""
    sources = [Path(name) for name in request.results] or sorted(KEPT.glob("*.json"))
    results = [read_results(source) for source in sources]
    for one in results:
        path = request.directory / f"{one['name']}.json"
        write_atomically(path, (json.dumps(one, indent=1).encode(),))
    return {"results": results}


def tables(data: Data) -> list[Table]:
    """Return of each comparison the losses and the order of every pair."""
    if not data["results"]:
        rows = [
            [n, "–", "–", "–", f"{m.loss:.4f}", f"{m.perplexity:.2f}"] for n, m in TABLE_5.items()
        ]
        note = f"Nothing measured yet: {COMMAND}, then results=[comparisons/table5_cpu]."
        return [Table("table_5", "Table 5: language models", _COLUMNS, rows, note)]
    found = []
    for number, results in enumerate(data["results"]):
        name = "table_5" if number == 0 else f"table_5_{results['name']}"
        found += [_loss_table(name, results), _pair_table(f"{name}_order", results)]
    return found


def _loss_table(name: str, results: dict[str, Any]) -> Table:
    rows = []
    for mechanism, by_seed in losses(results).items():
        values = [*by_seed.values()]
        mean = statistics.fmean(values)
        std = deviation(values)
        spread = "" if std is None else f" ± {std:.4f}"
        count = "" if len(values) == 3 else f" ({len(values)} seed{'s' * (len(values) > 1)})"
        published = TABLE_5.get(mechanism)
        bits = [r["bits_per_byte"] for r in results["runs"] if r["mechanism"] == mechanism]
        rows.append(
            [
                mechanism,
                f"{mean:.4f}{spread}{count}",
                f"{math.inf if mean > 700 else math.exp(mean):.2f}",
                f"{statistics.fmean(bits):.4f}",
                f"{published.loss:.4f}" if published else "–",
                f"{published.perplexity:.2f}" if published else "–",
            ]
        )
    pairs = compare_order(losses(results))
    counts = {order: sum(p["order"] == order for p in pairs) for order in (SAME, REVERSED, OPEN)}
    unequal = f" Not a fair comparison: {'; '.join(results['unequal'])}." * bool(results["unequal"])
    note = (
        f"{_setting(results)} ± is the sample standard deviation over seeds (three unless said). "
        "Compare the order with the published one, not the digits: training code and seeds are "
        "others, and so is a smaller size. Kendall's τ with the published order "
        f"{rank_correlation(pairs):+.2f}; {counts[SAME]} of {len(pairs)} pairs are in the same "
        f"order beyond their 95 % interval, {counts[REVERSED]} in the other, {counts[OPEN]} too "
        f"close to tell.{unequal}"
    )
    return Table(name, f"Table 5: language models ({results['name']})", _COLUMNS, rows, note)


def _pair_table(name: str, results: dict[str, Any]) -> Table:
    columns = ["better as published", "worse", "published difference", "measured", "order"]
    rows = [
        [
            pair["first"],
            pair["second"],
            f"{pair['published']:.3f}",
            _signed(pair["difference"], pair["half_width"]),
            pair["order"],
        ]
        for pair in compare_order(losses(results))
    ]
    note = (
        "Differences of validation losses in nats/token, worse less better as published, paired by "
        "seed, with their 95 % t interval."
    )
    return Table(name, f"Table 5, pair by pair ({results['name']})", columns, rows, note)


def _signed(mean: float, half_width: float | None) -> str:
    return f"{mean:+.3f}" + ("" if half_width is None else f" ± {half_width:.3f}")


def _setting(results: dict[str, Any]) -> str:
    """Return in a sentence what the runs were."""
    setting = results["setting"]
    tokens = sorted({run["training_tokens"] for run in results["runs"]})
    source = setting.get("data.source.path") or f"the corpus {setting.get('data.source.kind')}"
    shape = ", ".join(
        f"{setting[f'model.{key}']:,} {told}"
        for key, told in (
            ("layers", "layers"),
            ("width", "wide"),
            ("heads", "heads"),
            ("context_length", "tokens of context"),
        )
        if f"model.{key}" in setting
    )
    return (
        f"GPT-2 ({shape}) on {', '.join(map(tokens_label, tokens))} tokens of {source}, scored on "
        f"{results['scored_tokens'] or 0:,}."
    )


def draw(data: Data) -> list[Picture]:
    """Draw of each comparison the validation curves, and their distance from softmax's."""
    pictures = []
    for number, results in enumerate(data["results"]):
        name = "figure_3" if number == 0 else f"figure_3_{results['name']}"
        pictures.append(_curves(name, results))
    return pictures


def curves(results: dict[str, Any]) -> dict[str, list[tuple[int, float]]]:
    """Return (training tokens, mean validation loss over seeds) by mechanism, the best first."""
    return {
        mechanism: mean_curve(
            [
                [(int(tokens), loss) for tokens, loss in run["curve"]]
                for run in results["runs"]
                if run["mechanism"] == mechanism
            ]
        )
        for mechanism in losses(results)
    }


def _curves(name: str, results: dict[str, Any]) -> Picture:
    found = curves(results)
    styles = line_styles([*found])
    figure = new_figure(11.5, 4.6)
    left, right = figure.subplots(1, 2)
    baseline = dict(found.get("softmax", []))
    for mechanism, curve in found.items():
        style = {**styles[mechanism], "marker": MARKERS[len(left.lines) % len(MARKERS)]}
        style |= {"label": mechanism, "markersize": 4}
        left.plot([tokens for tokens, _ in curve], [loss for _, loss in curve], **style)
        apart = [(tokens, loss - baseline[tokens]) for tokens, loss in curve if tokens in baseline]
        # one that is far below would press the others together
        if mechanism in TABLE_5:
            right.plot([tokens for tokens, _ in apart], [gap for _, gap in apart], **style)
    left.set(ylabel="validation loss (nats/token)", title="Validation loss")
    right.set(
        ylabel="loss − softmax's (nats/token)",
        title="Distance from softmax, mechanisms of the paper",
    )
    for axes in (left, right):
        axes.set_xlabel("training tokens")
        axes.xaxis.set_major_formatter(lambda value, _: tokens_label(value))
        axes.grid(alpha=0.25)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", fontsize=9)
    caption = f"Means over seeds, the lowest last loss first. {_setting(results)}"
    return Picture(name, caption, figure)


def claims(data: Data) -> list[Claim]:
    """Return the paper's claims on language models, for each comparison."""
    return [claim for results in data["results"] for claim in _claims(results)]


def _claims(results: dict[str, Any]) -> list[Claim]:
    found, where = losses(results), results["name"]
    pairs = compare_order(found)
    made = []
    if pairs:
        same = [pair for pair in pairs if pair["order"] == SAME]
        wrong = [f"{p['second']} before {p['first']}" for p in pairs if p["order"] == REVERSED]
        # two that are too close to tell contradict no order
        verdict = (
            HOLDS if len(same) == len(pairs) else f"{HOLDS_AT} {len(same)} of {len(pairs)} pairs"
        )
        verdict = FAILS if wrong or not same else verdict
        told = (
            f"τ {rank_correlation(pairs):+.2f}; beyond their 95 % interval {len(same)} of "
            f"{len(pairs)} pairs are in this order, and {len(wrong)} the other way round"
            + (f": {', '.join(wrong)}" if wrong else "")
        )
        text = "Seven mechanisms end in the order of Table 5"
        made.append(Claim(text, f"Table 5 ({where})", told, verdict))
    if {"slay", "softmax"} <= found.keys():
        made.append(_near_softmax(found, where))
    rivals = [name for name in LINEAR_RIVALS if name in found]
    if rivals and "slay" in found:
        made.append(_ahead_of_rivals(found, rivals, where))
    if rivals and {"slay", "softmax"} <= found.keys():
        made.append(_gap_along_training(curves(results), rivals, where))
    return made


def _near_softmax(found: dict[str, dict[int, float]], where: str) -> Claim:
    published = TABLE_5["slay"].loss - TABLE_5["softmax"].loss
    mean = difference(found["slay"], found["softmax"])
    close = mean is not None and mean[0] <= published
    told = "no common seed" if mean is None else f"{_signed(*mean)} nats/token"
    alone = f" ({ONE_SEED})" if mean is not None and mean[1] is None else ""
    text = f"SLAY ends within {published:.3f} nats/token of softmax"
    return Claim(text, f"Table 5 ({where})", told, (HOLDS if close else FAILS) + alone)


def _ahead_of_rivals(found: dict[str, dict[int, float]], rivals: list[str], where: str) -> Claim:
    told, won, known = [], [], False
    for name in rivals:
        apart = difference(found[name], found["slay"])
        if apart is None:
            continue
        mean, half_width = apart
        told.append(f"{name} {_signed(mean, half_width)}")
        won += [name] if half_width is not None and mean > half_width else []
        known = known or half_width is not None
    verdict = HOLDS if len(won) == len(rivals) else f"{HOLDS_AT} {', '.join(won)}" if won else FAILS
    if not known:
        verdict = f"{NOT_SETTLED} {ONE_SEED}"
    text = "SLAY ends clearly before linear attention, cosFormer and Performer"
    return Claim(text, f"Table 5 ({where})", f"less SLAY's loss: {'; '.join(told)}", verdict)


def _gap_along_training(
    found: dict[str, list[tuple[int, float]]], rivals: list[str], where: str
) -> Claim:
    softmax = dict(found["softmax"])
    # a run that diverged is at no distance, and NaN is not the largest for max()
    gaps = {
        name: float(np.max([abs(loss - softmax[t]) for t, loss in found[name] if t in softmax]))
        for name in ("slay", *rivals)
    }
    nearer = all(gaps["slay"] < gaps[name] for name in rivals)
    told = ", ".join(f"{name} {gap:.3f}" for name, gap in gaps.items())
    text = "All through training SLAY stays near softmax, other linear mechanisms do not"
    measured = f"largest distance from softmax's curve (nats/token): {told}"
    return Claim(text, f"Figure 3 ({where})", measured, HOLDS if nearer else FAILS)


ITEM = Item(
    name="language_models",
    title="language models with each mechanism",
    sources=("Table 5", "Figure 3"),
    minutes=0.1,
    compute=compute,
    kept=False,
    published="GPT-2 small on 2.5 billion tokens of FineWeb, validated on WikiText-2, one run a "
    "mechanism. Shown here are comparisons trained with scripts/compare.py.",
    draw=draw,
    tables=tables,
    claims=claims,
)
