"""Figures 7 and 8: what attention divides by, and how often it is not positive."""

from __future__ import annotations

import statistics

import numpy as np
import torch

from slayformer.evaluation.attention_sample import random_sample
from slayformer.paper.figures import line_styles, new_figure
from slayformer.paper.item import FAILS, HOLDS, Claim, Data, Item, Picture, Request, Table
from slayformer.paper.mechanisms import options

MECHANISMS = (
    "yat",
    "yat_spherical",
    "slay",
    "slay_tensor_sketch",
    "slay_random_maclaurin",
    "slay_nystrom",
)
POSITIVE = MECHANISMS[:3]
HEAD_WIDTH, TOKENS = 64, 256
EDGES = np.linspace(-4, 6, 81)


@torch.no_grad()
def compute(request: Request) -> Data:
    """Return histograms of the normalisers and, by seed, their shares at or below zero."""
    seeds = request.seed_count(quick=20, full=100)
    shares: dict[str, list[float]] = {name: [] for name in MECHANISMS}
    smallest = dict.fromkeys(MECHANISMS, np.inf)
    counts = {name: np.zeros(len(EDGES) - 1) for name in MECHANISMS}
    for seed in range(seeds):
        sample = random_sample(head_dim=HEAD_WIDTH, length=TOKENS, seed=seed)
        keys_T = torch.arange(1, TOKENS + 1)
        for name in MECHANISMS:
            changes = {"normalization": "kernel"} if name == "yat" else {}
            attention = sample.build(options(name, **changes), seed)
            per_key = (sample.normalisers(attention)[0, 0] / keys_T).numpy()
            ratio = per_key / np.median(np.abs(per_key))
            shares[name].append(float((per_key <= 0).mean()))
            smallest[name] = min(smallest[name], float(ratio.min()))
            counts[name] += np.histogram(ratio.clip(EDGES[0], EDGES[-1]), EDGES)[0]
        request.progress((seed + 1) / seeds)
    total = seeds * TOKENS
    histograms = {name: count / total for name, count in counts.items()}
    return {"shares": shares, "smallest": smallest, "histograms": histograms, "seeds": seeds}


def draw(data: Data) -> list[Picture]:
    """Draw Figures 7 and 8."""
    return [_histograms(data), _by_seed(data)]


def _histograms(data: Data) -> Picture:
    figure = new_figure(8, 7)
    grid = figure.subplots(len(MECHANISMS), 1, sharex=True)
    styles = line_styles(MECHANISMS)
    for axes, name in zip(grid, MECHANISMS, strict=True):
        heights = 100 * np.array(data["histograms"][name])
        axes.stairs(heights, EDGES, fill=True, color=styles[name]["color"])
        axes.axvline(0, color="black", linewidth=0.9)
        below = 100 * statistics.fmean(data["shares"][name])
        axes.set_title(f"{name}: {below:.1f} % at or below zero", fontsize=10)
        axes.set_ylim(0, 1.1 * heights.max())
        axes.grid(alpha=0.25)
        axes.set_axisbelow(True)
    grid[-1].set_xlabel("normaliser per visible key ÷ its median size (outer bins hold all beyond)")
    grid[-1].set_xlim(EDGES[0], EDGES[-1])
    figure.supylabel("share of rows (%)", fontsize=10)
    caption = (
        f"Figure 7. Normalisers of causal attention on iid Gaussian q and k, head width "
        f"{HEAD_WIDTH}, {TOKENS} tokens, {data['seeds']} seeds."
    )
    return Picture("figure_07_normalisers", caption, figure)


def _by_seed(data: Data) -> Picture:
    figure = new_figure(8, 4.2)
    axes = figure.subplots()
    styles = line_styles(MECHANISMS)
    for place, name in enumerate(MECHANISMS):
        shares = 100 * np.array(data["shares"][name])
        # spread sideways, so that seeds with the same share are all seen
        offsets = place + np.linspace(-0.28, 0.28, len(shares))
        colour = styles[name]["color"]
        axes.scatter(offsets, shares, s=18, color=colour, edgecolor="white", linewidth=0.3)
        axes.plot([place - 0.33, place + 0.33], [shares.mean()] * 2, color=colour, linewidth=1.5)
    axes.set_xticks(
        range(len(MECHANISMS)), [name.replace("slay_", "slay_\n") for name in MECHANISMS]
    )
    axes.set(ylabel="rows with a normaliser ≤ 0 (%)", ylim=(-3, 100))
    axes.set_title("Each point is a seed, each line a mean")
    axes.grid(alpha=0.25, axis="y")
    caption = "Figure 8. Share of rows whose normaliser is zero or negative, by seed."
    return Picture("figure_08_negative_by_seed", caption, figure)


def tables(data: Data) -> list[Table]:
    """Return shares and extremes by mechanism."""
    rows = []
    for name in MECHANISMS:
        shares = [100 * share for share in data["shares"][name]]
        rows.append(
            [
                name,
                f"{statistics.fmean(shares):.1f}",
                f"{min(shares):.1f} – {max(shares):.1f}",
                f"{data['smallest'][name]:.2g}",
            ]
        )
    columns = ["mechanism", "rows ≤ 0 (%)", "by seed (%)", "smallest ÷ median size"]
    note = f"Head width {HEAD_WIDTH}, {TOKENS} tokens, {data['seeds']} seeds."
    return [Table("normalisers", "Normalisers at or below zero", columns, rows, note)]


def claims(data: Data) -> list[Claim]:
    """Return the claims of section L.2."""
    worst = max(max(data["shares"][name]) for name in POSITIVE)
    signed = {
        name: [100 * share for share in data["shares"][name]]
        for name in ("slay_tensor_sketch", "slay_random_maclaurin", "slay_nystrom")
    }
    ranges = ", ".join(f"{name} {min(s):.0f}–{max(s):.0f} %" for name, s in signed.items())
    sketches = min(min(signed[name]) for name in ("slay_tensor_sketch", "slay_random_maclaurin"))
    return [
        Claim(
            "Denominators of Yat and SLAY are positive for every seed",
            "Figures 7 and 8",
            f"{100 * worst:.0f} % of {data['seeds'] * TOKENS:,} rows each are not",
            HOLDS if worst == 0 else FAILS,
        ),
        Claim(
            "TensorSketch and Random Maclaurin give substantial fractions of negative denominators",
            "Figures 7 and 8",
            f"share of rows ≤ 0 by seed: {ranges}",
            HOLDS if sketches > 5 else FAILS,
        ),
    ]


ITEM = Item(
    name="normalisers",
    title="denominators of attention",
    sources=("Figure 7", "Figure 8"),
    minutes=0.5,
    compute=compute,
    published="strictly positive for SLAY and the Yat kernels, substantial fractions negative for "
    "TensorSketch and Random Maclaurin, whatever the seed",
    draw=draw,
    tables=tables,
    claims=claims,
)
