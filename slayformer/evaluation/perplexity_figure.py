"""The picture of `eval.py`: loss along the context, a line a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slayformer.evaluation.report_figure import series_style


def draw_positions(path: Path, results: Sequence[dict[str, Any]]) -> None:
    """Draw the loss by position in the context of each result to `path`.

    A line that still falls at its end is that of a model that uses its whole context. Where a
    context is longer than the trained one, a vertical line marks the trained one.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.6), layout="constrained", dpi=150)
    axes = figure.subplots()
    for number, result in enumerate(results):
        stretches = result["loss_by_position"]
        # positions count from 0, and position t predicts from t + 1 tokens
        middles = [(s["first"] + 1 + s["last"] + 1) / 2 for s in stretches]
        label = f"{number + 1}: {result['mechanism']}"
        losses = [s["loss"] for s in stretches]
        axes.plot(middles, losses, label=label, linewidth=1.8, markersize=4, **series_style(number))
    beyond = [r for r in results if r["context_length"] > r["trained_context_length"]]
    for length in sorted({r["trained_context_length"] for r in beyond}):
        label = f"trained context, {length:,} tokens"
        axes.axvline(length, color="#777777", linewidth=1, label=label)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set(
        title="Loss by position in the context",
        xlabel="tokens of context",
        ylabel="loss (nats/token)",
    )
    axes.grid(alpha=0.25)
    axes.legend(fontsize=9)
    figure.savefig(path)
