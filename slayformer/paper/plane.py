"""Figure 1: which of a few keys each point of the plane belongs to, kernel by kernel.

Every point is a query; the key that a mechanism scores highest owns it.
"""

from __future__ import annotations

import statistics

import numpy as np
import torch
from torch import Tensor

from slayformer.attention.base import generator
from slayformer.evaluation.attention_sample import pair_scores
from slayformer.evaluation.report_figure import COLOURS
from slayformer.paper.figures import new_figure
from slayformer.paper.item import FAILS, HOLDS, Claim, Data, Item, Picture, Request, Table
from slayformer.paper.mechanisms import one_head

MECHANISMS = (
    "yat",
    "yat_spherical",
    "slay",
    "slay_exact_poly",
    "slay_laplace",
    "softmax",
    "linear_elu",
    "performer",
)
EXACT = "yat_spherical"
KEYS = 5
EXTENT = 3.0
WIDTH = 2


@torch.no_grad()
def owners(mechanism: str, points_TD: Tensor, keys_SD: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Return the key that owns each point, and the share of the weights it has there."""
    # the kernel itself, also of a mechanism that puts a softmax over it
    changes = {"normalization": "kernel"} if mechanism == "yat" else {}
    attention = one_head(mechanism, WIDTH, seed, **changes)
    positions = torch.zeros(1, 1, dtype=torch.long)
    scores_TS = pair_scores(
        attention,
        points_TD[None, None],
        keys_SD[None, None],
        positions.expand(1, len(points_TD)),
        positions.expand(1, len(keys_SD)),
    )[0, 0]
    best = scores_TS.max(-1)
    return best.indices, best.values / scores_TS.sum(-1)


def compute(request: Request) -> Data:
    """Return the partition by every mechanism for one draw of keys, and agreement over seeds."""
    side = request.choose(quick=160, full=400)
    seeds = request.seed_count(quick=10, full=50)
    axis = torch.linspace(-EXTENT, EXTENT, side, dtype=torch.float64)
    points = torch.stack(torch.meshgrid(axis, axis, indexing="xy"), -1).flatten(0, 1)
    agreement: dict[str, list[float]] = {name: [] for name in MECHANISMS}
    shown = {}
    for seed in range(seeds):
        keys = torch.randn(KEYS, WIDTH, generator=generator(seed), dtype=torch.float64)
        exact, _ = owners(EXACT, points, keys, seed)
        for name in MECHANISMS:
            owner, share = owners(name, points, keys, seed)
            agreement[name].append(float((owner == exact).double().mean()))
            if seed == 0:
                shown[name] = {
                    "owner": owner.reshape(side, side),
                    "share": share.reshape(side, side),
                }
        if seed == 0:
            first_keys = keys
        request.progress((seed + 1) / seeds)
    return {"side": side, "keys": first_keys, "shown": shown, "agreement": agreement}


def draw(data: Data) -> list[Picture]:
    """Draw Figure 1: colour for the owner, strength for its share of the weights."""
    figure = new_figure(13, 7)
    keys = np.array(data["keys"])
    palette = np.array([[int(c[i : i + 2], 16) / 255 for i in (1, 3, 5)] for c in COLOURS[:KEYS]])
    for axes, name in zip(figure.subplots(2, 4).flat, MECHANISMS, strict=True):
        part = data["shown"][name]
        share = np.clip((np.array(part["share"]) - 1 / KEYS) / (1 - 1 / KEYS), 0, 1)
        strength = 0.25 + 0.75 * share[..., None]
        image = strength * palette[np.array(part["owner"])] + 1 - strength
        extent = (-EXTENT, EXTENT, -EXTENT, EXTENT)
        axes.imshow(image, origin="lower", extent=extent, interpolation="nearest")
        axes.scatter(*keys.T, marker="*", s=130, color="white", edgecolor="black", linewidth=0.8)
        same = 100 * data["agreement"][name][0]
        axes.set_title(f"{name} ({same:.0f} % as {EXACT})", fontsize=10)
        axes.set_xlabel("first component (no unit)", fontsize=8)
        axes.set_ylabel("second component (no unit)", fontsize=8)
        axes.tick_params(labelsize=8)
    caption = (
        "Figure 1. Each point of the plane as a query, in the colour of the key (star) it scores "
        "highest; strong colour where that key has most of the weight."
    )
    return [Picture("figure_01_plane", caption, figure)]


def tables(data: Data) -> list[Table]:
    """Return how much of the plane each kernel gives to the same key as spherical Yat."""
    rows = []
    for name in MECHANISMS:
        shares = [100 * share for share in data["agreement"][name]]
        spread = f" ± {statistics.stdev(shares):.0f}" if len(shares) > 1 else ""
        rows.append([name, f"{statistics.fmean(shares):.0f}{spread}"])
    note = f"{KEYS} Gaussian keys, {len(shares)} draws of keys and features."
    columns = ["mechanism", f"same owner as {EXACT} (% of the plane)"]
    return [Table("figure_1_agreement", "Agreement of partitions", columns, rows, note)]


def claims(data: Data) -> list[Claim]:
    """Return the claim of section 3.1 on this figure."""
    means = {name: 100 * statistics.fmean(data["agreement"][name]) for name in MECHANISMS}
    others = ("softmax", "linear_elu", "performer")
    best = max(others, key=means.__getitem__)
    return [
        Claim(
            "SLAY divides the plane like the Yat kernels, at least as well as other kernels",
            "Section 3.1, Figure 1",
            f"same owner as spherical Yat in {means['slay']:.0f} % of the plane, exact Yat in "
            f"{means['yat']:.0f} %, {best} in {means[best]:.0f} %; with x² exact SLAY has "
            f"{means['slay_exact_poly']:.0f} %",
            HOLDS if means["slay"] >= means[best] else FAILS,
        )
    ]


ITEM = Item(
    name="plane",
    title="partition of the plane by kernel",
    sources=("Figure 1",),
    minutes=0.5,
    compute=compute,
    published="SLAY's partition is like that of the exact Yat kernels",
    draw=draw,
    tables=tables,
    claims=claims,
)
