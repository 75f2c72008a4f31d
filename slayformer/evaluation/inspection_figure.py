"""The picture of how mechanisms attend: scores, entropy, normalisers, guarded rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from slayformer.evaluation.attention_sample import COSINES
from slayformer.evaluation.fidelity import NORMALISER_EDGES, UNIFORM, Measurement
from slayformer.evaluation.report_figure import COLOURS, DASHES

# with more curves, the bands of percentiles hide them
MOST_BANDS = 3
# entropies of neighbouring positions are averaged, about as many at a time everywhere on a log axis
POSITION_BINS = 40
ROW_INCHES = 0.24


def draw(path: Path, rows: Sequence[Measurement], about: str) -> None:
    """Draw `rows`, all of one head width, to `path`; `about` says what was measured."""
    from matplotlib.figure import Figure

    lower = 1.3 + ROW_INCHES * len(rows)
    # a Figure of its own draws with Agg and leaves pyplot's global state alone
    figure = Figure(figsize=(12.5, 4.6 + lower), layout="constrained", dpi=130)
    (scores, entropy), (normalisers, shares) = figure.subplots(
        2, 2, height_ratios=[4.2, lower], width_ratios=[1.15, 1]
    )
    labels = [_label(row) for row in rows]
    styles = [_style(number) for number in range(len(rows))]
    _draw_scores(scores, rows, labels, styles)
    _draw_entropy(entropy, rows, styles)
    _draw_normalisers(normalisers, rows, labels, styles)
    _draw_shares(shares, rows)
    shares.sharey(normalisers)
    shares.tick_params(labelleft=False)
    figure.suptitle(f"{about}, head width {rows[0].head_dim}", fontsize=11)
    figure.legend(*scores.get_legend_handles_labels(), loc="outside right upper", fontsize=9)
    figure.savefig(path)


def _label(row: Measurement) -> str:
    # it is the same in every layer
    if row.layer is None or row.mechanism == UNIFORM.name:
        return row.mechanism
    return f"layer {row.layer + 1}: {row.mechanism}"


def _style(number: int) -> dict[str, Any]:
    # black is the exact kernel's
    colours = COLOURS[:-1]
    dash = DASHES[number // len(colours) % len(DASHES)]
    return {"color": colours[number % len(colours)], "linestyle": dash, "linewidth": 1.6}


def _draw_scores(
    axes: Any, rows: Sequence[Measurement], labels: Sequence[str], styles: Sequence[dict[str, Any]]
) -> None:
    exact = rows[0].exact_curve.mean
    shared = all(np.array_equal(row.exact_curve.mean, exact, equal_nan=True) for row in rows)
    for row, label, style in zip(rows, labels, styles, strict=True):
        curve = row.score_curve
        axes.plot(COSINES, curve.mean, label=label, **style)
        if len(rows) <= MOST_BANDS:
            axes.fill_between(COSINES, curve.low, curve.high, color=style["color"], alpha=0.15)
        if not shared and row.mechanism != UNIFORM.name:
            kernel = {"color": style["color"], "linewidth": 1.2, "linestyle": (0, (1, 2))}
            axes.plot(COSINES, row.exact_curve.mean, **kernel)
    if shared:
        axes.plot(COSINES, exact, color="black", linewidth=1.2, label="exact spherical Yat")
    else:
        axes.plot([], [], color="black", linestyle=(0, (1, 2)), label="exact spherical Yat")
    top = max(float(np.nanmax(row.exact_curve.mean)) for row in rows)
    axes.set_yscale("symlog", linthresh=1)
    axes.set(ylim=(-10, 3 * top), xlim=(-1, 1), title="Score of a query and a key")
    band = ", band: 10th to 90th percentile" if len(rows) <= MOST_BANDS else ""
    axes.set_xlabel(f"cosine x between q and k (no unit){band}")
    axes.set_ylabel("score ÷ mean |score| of visible pairs")
    axes.axhline(0, color="#777777", linewidth=0.6)
    axes.grid(alpha=0.25)


def _draw_entropy(axes: Any, rows: Sequence[Measurement], styles: Sequence[dict[str, Any]]) -> None:
    length = len(rows[0].entropy_by_position)
    edges = np.unique(np.geomspace(1, length + 1, POSITION_BINS + 1).round().astype(int))
    for row, style in zip(rows, styles, strict=True):
        parts = np.split(row.entropy_by_position, edges[1:-1] - 1)
        axes.plot((edges[:-1] + edges[1:] - 1) / 2, [part.mean() for part in parts], **style)
    axes.set(title="Entropy of a row of weights", xscale="log", ylim=(0, None))
    axes.set(xlabel="tokens seen, the query's own included", ylabel="entropy (nats)")
    axes.grid(alpha=0.25)


def _draw_normalisers(
    axes: Any, rows: Sequence[Measurement], labels: Sequence[str], styles: Sequence[dict[str, Any]]
) -> None:
    for number, (row, style) in enumerate(zip(rows, styles, strict=True)):
        shares = row.normaliser_histogram
        heights = 0.85 * shares / shares.max()
        axes.stairs(
            number + 0.4 - heights,
            NORMALISER_EDGES,
            baseline=number + 0.4,
            fill=True,
            color=style["color"],
        )
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(rows)), labels, fontsize=9)
    axes.set(ylim=(len(rows) - 0.4, -0.7), xlim=(NORMALISER_EDGES[0], NORMALISER_EDGES[-1]))
    axes.set_title("Normalisers (histogram, each to its own height)")
    axes.set_xlabel("normaliser per visible key ÷ its median size (outer bins hold all beyond)")
    axes.grid(alpha=0.25, axis="x")


def _draw_shares(axes: Any, rows: Sequence[Measurement]) -> None:
    parts = (
        ("normaliser ≤ 0", -0.2, COLOURS[1], [row.nonpositive_share for row in rows]),
        ("guarded", 0.2, COLOURS[0], [row.guarded_share for row in rows]),
    )
    for label, offset, colour, values in parts:
        places = np.arange(len(rows)) + offset
        bars = axes.barh(places, [100 * v for v in values], 0.36, color=colour, label=label)
        axes.bar_label(bars, [f"{100 * v:.1f}" for v in values], padding=2, fontsize=8)
    most = 100 * max(max(values) for _, _, _, values in parts)
    axes.set(title="Rows without a sound normaliser", xlabel="share of rows (%)")
    axes.set_xlim(0, max(1.0, 1.12 * most))
    axes.legend(loc="lower right", fontsize=9)
    axes.grid(alpha=0.25, axis="x")
