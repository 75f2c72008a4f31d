"""Figures 15 to 18: entropy and pattern of attention weights, and outputs against the exact ones.

Weights are what each mechanism really applies: its outputs for v = identity.
"""

from __future__ import annotations

import math
import statistics
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slayformer.attention.base import Attention, generator
from slayformer.evaluation.attention_sample import attention_weights, entropy, random_sample
from slayformer.paper.figures import line_styles, new_figure
from slayformer.paper.item import FAILS, HOLDS, HOLDS_AT, Claim, Data, Item, Picture, Request
from slayformer.paper.mechanisms import one_head, options

YAT_SUM = "yat, kernel sum"
MECHANISMS = ("softmax", "yat_spherical", "slay", YAT_SUM, "yat", "performer")
# by label; `yat` is as published, a softmax over the kernel
_CHANGES: dict[str, tuple[str, dict[str, Any]]] = {YAT_SUM: ("yat", {"normalization": "kernel"})}
# mechanisms whose outputs are shown against the exact ones
APPROXIMATIONS = ("slay", "slay_exact_poly", "slay_block_quadratic", "uniform")
HEAD_WIDTH, TOKENS, PATTERN_TOKENS = 64, 128, 48
SIMILARITIES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
SCATTER_POINTS = 3000
# of relative entropies, to count as far lower
FAR = 0.1


def similar_heads(similarity: float, length: int, seed: int) -> Tensor:
    """Return q and k [2, 1, 1, T, D] whose vectors have the mean cosine `similarity`."""
    shape = (2, 1, 1, length, HEAD_WIDTH)
    draws = generator(seed)
    common = torch.randn(HEAD_WIDTH, generator=draws, dtype=torch.float64)
    noise = torch.randn(shape, generator=draws, dtype=torch.float64)
    return math.sqrt(similarity) * common + math.sqrt(1 - similarity) * noise


def _mechanism(label: str, seed: int) -> Attention:
    name, changes = _CHANGES.get(label, (label, {}))
    return one_head(name, HEAD_WIDTH, seed, **changes)


@torch.no_grad()
def relative_entropy(mechanism: str, heads: Tensor, seed: int) -> np.ndarray:
    """Return entropy ÷ that of uniform weights, of the rows of the second half."""
    weights = attention_weights(_mechanism(mechanism, seed), *heads)
    length = heads.shape[-2]
    visible = torch.arange(1, length + 1, dtype=torch.float64)
    return (entropy(weights)[0, 0] / visible.log())[length // 2 :].numpy()


def compute(request: Request) -> Data:
    """Return entropies by similarity, those of random vectors, weights, and pairs of outputs."""
    seeds = request.seed_count(quick=3, full=20)
    by_similarity: dict[str, list[list[float]]] = {name: [] for name in MECHANISMS}
    steps, done = len(SIMILARITIES) * len(MECHANISMS), 0
    random: dict[str, Any] = {}
    for similarity in SIMILARITIES:
        for name in MECHANISMS:
            rows = [
                relative_entropy(name, similar_heads(similarity, TOKENS, seed), seed)
                for seed in range(seeds)
            ]
            by_similarity[name].append([float(row.mean()) for row in rows])
            if similarity == 0:
                random[name] = np.concatenate(rows)
            done += 1
            request.progress(done / steps)
    heads = similar_heads(0.0, PATTERN_TOKENS, 0)
    with torch.no_grad():
        patterns = {
            name: attention_weights(_mechanism(name, 0), *heads)[0, 0] for name in MECHANISMS
        }
    return {
        "seeds": seeds,
        "by_similarity": by_similarity,
        "random": random,
        "patterns": patterns,
        "outputs": outputs(seeds),
    }


@torch.no_grad()
def outputs(seeds: int) -> dict[str, Any]:
    """Return some output components of each approximation with the exact ones, and correlations."""
    found: dict[str, Any] = {name: {"correlation": []} for name in APPROXIMATIONS}
    for seed in range(seeds):
        sample = random_sample(head_dim=HEAD_WIDTH, length=2 * TOKENS, seed=seed)
        exact = sample.exact_BHTD.flatten().numpy()
        for name in APPROXIMATIONS:
            y = sample.run(sample.build(options(name), seed)).flatten().numpy()
            found[name]["correlation"].append(float(np.corrcoef(exact, y)[0, 1]))
            if seed == 0:
                step = len(y) // SCATTER_POINTS
                found[name] |= {"exact": exact[::step], "output": y[::step]}
    return found


def draw(data: Data) -> list[Picture]:
    """Draw Figures 15 to 18."""
    return [_similarity(data), _distribution(data), _patterns(data), _scatter(data)]


def _similarity(data: Data) -> Picture:
    figure = new_figure(9, 4.8)
    axes = figure.subplots()
    styles = line_styles(MECHANISMS)
    for name in MECHANISMS:
        means = [statistics.fmean(values) for values in data["by_similarity"][name]]
        axes.plot(SIMILARITIES, means, marker="o", markersize=3.5, label=name, **styles[name])
    axes.set(xlabel="mean cosine between tokens (no unit)", ylim=(0, 1.04), xlim=(-0.02, 1.01))
    axes.set_ylabel("entropy of a row ÷ log of its keys (no unit)")
    axes.set_title(f"Entropy by similarity, {TOKENS} tokens of width {HEAD_WIDTH}")
    axes.grid(alpha=0.25)
    axes.legend(fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5))
    caption = (
        "Figure 15. Mean entropy of attention rows relative to uniform weights (1), by the "
        f"similarity of the tokens; {data['seeds']} seeds."
    )
    return Picture("figure_15_entropy_by_similarity", caption, figure)


def _distribution(data: Data) -> Picture:
    figure = new_figure(8.5, 4.4)
    axes = figure.subplots()
    styles = line_styles(MECHANISMS)
    parts = axes.violinplot(
        [data["random"][name] for name in MECHANISMS], showmedians=True, widths=0.8
    )
    for body, name in zip(parts["bodies"], MECHANISMS, strict=True):
        body.set(facecolor=styles[name]["color"], edgecolor="black", alpha=0.75)
    for key in ("cmedians", "cbars", "cmins", "cmaxes"):
        parts[key].set(color="black", linewidth=0.9)
    places = range(1, len(MECHANISMS) + 1)
    axes.set_xticks(places, MECHANISMS)
    axes.set(ylabel="entropy of a row ÷ log of its keys (no unit)", ylim=(0, 1.04))
    axes.grid(alpha=0.25, axis="y")
    axes.set_title("Entropy of rows, random tokens")
    caption = "Figure 16. Distribution of the entropies of Figure 15 at similarity 0; line: median."
    return Picture("figure_16_entropy_distribution", caption, figure)


def _patterns(data: Data) -> Picture:
    figure = new_figure(11, 7.4)
    grid = figure.subplots(2, 3)
    for axes, name in zip(grid.flat, MECHANISMS, strict=True):
        weights = np.array(data["patterns"][name])
        image = axes.imshow(
            np.where(np.tri(len(weights), dtype=bool), weights, np.nan),
            cmap="viridis",
            vmin=0,
            vmax=0.5,
            interpolation="nearest",
        )
        axes.set(title=name, xlabel="key (position)", ylabel="query (position)")
    bar = figure.colorbar(image, ax=grid, shrink=0.7, extend="max")
    bar.set_label("attention weight (no unit)")
    caption = (
        f"Figure 17. Causal attention weights on one sample of {PATTERN_TOKENS} random tokens, "
        f"width {HEAD_WIDTH}."
    )
    return Picture("figure_17_patterns", caption, figure)


def _scatter(data: Data) -> Picture:
    figure = new_figure(13, 3.9)
    grid = figure.subplots(1, len(APPROXIMATIONS), sharex=True, sharey=True)
    colours = line_styles(APPROXIMATIONS)
    for axes, name in zip(grid, APPROXIMATIONS, strict=True):
        part = data["outputs"][name]
        colour = colours[name]["color"]
        axes.scatter(part["exact"], part["output"], s=4, alpha=0.35, color=colour, rasterized=True)
        axes.plot([-2, 2], [-2, 2], color="black", linewidth=0.8)
        correlation = statistics.fmean(part["correlation"])
        axes.set_title(f"{name}: correlation {correlation:.2f}", fontsize=10)
        axes.set(xlabel="exact output (no unit)", xlim=(-2, 2), ylim=(-2, 2))
        axes.grid(alpha=0.25)
    grid[0].set_ylabel("output of the map (no unit)")
    caption = (
        f"Figure 18. Components of attention outputs against exact spherical Yat, {2 * TOKENS} "
        f"random tokens, width {HEAD_WIDTH}; correlation: mean over {data['seeds']} seeds."
    )
    return Picture("figure_18_outputs", caption, figure)


def claims(data: Data) -> list[Claim]:
    """Return the claims of section L.4."""
    first = {name: statistics.fmean(data["by_similarity"][name][0]) for name in MECHANISMS}
    last = {name: statistics.fmean(data["by_similarity"][name][-1]) for name in MECHANISMS}
    yats = ("yat", "yat_spherical", "slay")
    far_lower = [name for name in yats if first[name] < first["softmax"] - FAR]
    correlations = {
        name: statistics.fmean(data["outputs"][name]["correlation"]) for name in APPROXIMATIONS
    }
    # a softmax over a kernel that grows without bound goes the other way
    sums = [name for name in MECHANISMS if name != "yat"]
    spread, start = (
        max(values[name] for name in sums) - min(values[name] for name in sums)
        for values in (last, first)
    )
    entropies = ", ".join(f"{name} {value:.2f}" for name, value in first.items())
    verdict = HOLDS if len(far_lower) == len(yats) else FAILS
    if far_lower and verdict == FAILS:
        verdict = f"{HOLDS_AT} {' and '.join(far_lower)}"
    return [
        Claim(
            "On random tokens Yat mechanisms have far lower entropy than softmax",
            "Figures 15 to 17",
            f"entropy ÷ log of the keys: {entropies}",
            verdict,
        ),
        Claim(
            "As similarity grows all mechanisms converge",
            "Figure 15",
            f"spread between mechanisms that divide by their sum {start:.2f} at similarity 0, "
            f"{spread:.2f} at {SIMILARITIES[-1]}; a softmax over the Yat kernel goes to "
            f"{last['yat']:.2f}",
            f"{HOLDS_AT} all but the published softmax over Yat" if spread < 0.5 * start else FAILS,
        ),
        Claim(
            "Outputs of SLAY correlate highly with exact spherical Yat's",
            "Figure 18",
            ", ".join(f"{name} {value:.2f}" for name, value in correlations.items()),
            HOLDS if correlations["slay"] > 0.9 else FAILS,
        ),
    ]


ITEM = Item(
    name="selectivity",
    title="entropy, patterns and outputs",
    sources=("Figure 15", "Figure 16", "Figure 17", "Figure 18"),
    minutes=0.6,
    compute=compute,
    published="YAT and SLAY are far more selective than softmax; SLAY's outputs correlate highly "
    "with the exact ones (published without random features and quadrature)",
    draw=draw,
    claims=claims,
)
