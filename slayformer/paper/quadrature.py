"""Figures 9 to 12: the quadrature of the kernel's integral, its nodes, and what each contributes.

x²/(C − 2x) = ∫ e^{−sC} x² e^{2sx} ds ≈ Σ_r w_r x² e^{2 s_r x}.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slayformer.attention.kernels import gauss_laguerre, spherical_yat
from slayformer.attention.slay import QUADRATURES
from slayformer.paper.figures import new_figure, numbered_style
from slayformer.paper.item import FAILS, HOLDS, HOLDS_AT, Claim, Data, Item, Picture, Request, Table

EPSILON = 1e-3
COSINES = (-0.9, -0.5, 0.0, 0.25, 0.5, 0.8, 0.9, 0.99, 1.0)
SHOWN_COSINES = (0.0, 0.5, 0.8, 0.9, 0.99, 1.0)
MOST_NODES = 24
# the fit of nodes and weights takes longer and longer, and brings ever less
MOST_FITTED = 6
SHOWN_NODES = (1, 2, 3, 4, 6, 8)
DEFAULT_NODES = 3
# how many times smaller each node has to make the error for an exponential fall worth the name
FALLS = 1.2
# head width whose random pairs the expected contributions are for
HEAD_WIDTH = 64


def quadrature_kernel(
    x: Tensor, nodes: int, epsilon: float, rule: str = "gauss_laguerre"
) -> Tensor:
    """Return x² Σ_r w_r e^{2 s_r x} for cosines x: what SLAY would be without random features."""
    s, w = (torch.as_tensor(part, dtype=x.dtype) for part in QUADRATURES[rule](nodes, epsilon))
    return x.square() * (w * torch.exp(2 * s * x[..., None])).sum(-1)


def relative_error(cosine: float, nodes: int, rule: str) -> float:
    """Return (quadrature − kernel)/kernel; at x = 0 its limit, the error of 1/C."""
    # the factor x² is exact in both and cancels
    x = torch.tensor(cosine if cosine else 1e-8, dtype=torch.float64)
    return float(quadrature_kernel(x, nodes, EPSILON, rule) / spherical_yat(x, EPSILON) - 1)


def expected_contributions(nodes: int, width: int) -> np.ndarray:
    """Return w_r E[x² e^{2 s_r x}] of each node for independent directions in `width` dimensions.

    The cosine x has the density (1 − x²)^((width − 3)/2); Gauss–Jacobi integrates over it.
    """
    s, w = gauss_laguerre(nodes, EPSILON)
    # enough points for any exponential here to be exact in fp64
    x, weight = np.polynomial.legendre.leggauss(400)
    density = weight * (1 - x**2) ** ((width - 3) / 2)
    density /= density.sum()
    return w * (density * x**2 * np.exp(2 * s[:, None] * x)).sum(1)


def compute(request: Request) -> Data:
    """Return errors by nodes and cosine, nodes and weights, and contributions of the nodes."""
    errors: dict[str, Any] = {}
    for rule, most in (("gauss_laguerre", MOST_NODES), ("fitted", MOST_FITTED)):
        errors[rule] = [
            [relative_error(cosine, count, rule) for cosine in COSINES]
            for count in range(1, most + 1)
        ]
    contributions = {}
    for count in (DEFAULT_NODES, 8):
        s, w = gauss_laguerre(count, EPSILON)
        grid = np.linspace(-1, 1, 81)
        terms = w * np.exp(2 * s * grid[:, None])
        contributions[str(count)] = {
            "expected": expected_contributions(count, HEAD_WIDTH),
            "cosines": grid,
            "shares": terms / terms.sum(1, keepdims=True),
        }
    return {
        "cosines": list(COSINES),
        "errors": errors,
        "nodes": {str(count): gauss_laguerre(count, EPSILON) for count in SHOWN_NODES},
        "contributions": contributions,
    }


def draw(data: Data) -> list[Picture]:
    """Draw Figures 9 to 12."""
    return [_errors(data), _nodes(data), _expected(data), _shares(data)]


def _errors(data: Data) -> Picture:
    figure = new_figure(8, 5)
    axes = figure.subplots()
    shown = [
        number for number, x in enumerate(data["cosines"]) if x in (0.0, 0.5, 0.8, 0.9, 0.99, 1)
    ]
    for place, number in enumerate(shown):
        style = numbered_style(place)
        for rule, marker in (("gauss_laguerre", "o"), ("fitted", None)):
            column = np.abs([row[number] for row in data["errors"][rule]])
            counts = range(1, len(column) + 1)
            # below this is rounding
            column = np.maximum(column, 1e-14)
            if rule == "gauss_laguerre":
                label = f"x = {data['cosines'][number]:g}"
                axes.semilogy(counts, column, marker=marker, markersize=3.5, label=label, **style)
            else:
                axes.semilogy(counts, column, linewidth=1, color=style["color"], linestyle=":")
    axes.plot([], [], color="#555555", linestyle=":", linewidth=1, label="fitted nodes (same x)")
    axes.axvline(DEFAULT_NODES, color="#777777", linewidth=0.8)
    axes.text(DEFAULT_NODES + 0.15, 3e-14, "R = 3", color="#555555", fontsize=9)
    axes.set(
        xlabel="number of nodes R",
        ylabel="|relative error of the kernel| (no unit)",
        title="Gauss–Laguerre quadrature of the spherical Yat kernel, ε = 0.001",
        xlim=(0.5, MOST_NODES + 0.5),
    )
    axes.grid(alpha=0.25)
    axes.legend(fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5))
    caption = (
        "Figure 9. Relative error of the kernel by number of nodes at several cosines x; dotted, "
        "nodes and weights fitted on −1 ≤ x ≤ 0.95."
    )
    return Picture("figure_09_quadrature_error", caption, figure)


def _nodes(data: Data) -> Picture:
    figure = new_figure(7.5, 4.6)
    axes = figure.subplots()
    for place, (count, (nodes, weights)) in enumerate(data["nodes"].items()):
        style = numbered_style(place)
        axes.plot(nodes, weights, marker="o", markersize=5, label=f"R = {count}", **style)
    axes.set(yscale="log", xlabel="node s (no unit)", ylabel="weight w (no unit)")
    axes.set_title("Nodes and weights: small nodes carry nearly all the weight")
    axes.grid(alpha=0.25)
    axes.legend(fontsize=9)
    caption = "Figure 10. Gauss–Laguerre nodes s_r = t_r/C and weights w_r = α_r/C, ε = 0.001."
    return Picture("figure_10_quadrature_nodes", caption, figure)


def _expected(data: Data) -> Picture:
    figure = new_figure(8.5, 3.8)
    for axes, (count, part) in zip(
        figure.subplots(1, 2), data["contributions"].items(), strict=True
    ):
        shares = 100 * np.array(part["expected"]) / sum(part["expected"])
        bars = axes.bar(range(1, len(shares) + 1), shares, color=numbered_style(1)["color"])
        labels = [f"{share:.2g}" if share >= 0.01 else "<0.01" for share in shares]
        axes.bar_label(bars, labels, fontsize=8, padding=2)
        axes.set(xlabel="node r", ylabel="share of the expected kernel (%)", title=f"R = {count}")
        axes.set_ylim(0, 1.12 * shares.max())
        axes.set_xticks(range(1, len(shares) + 1))
    caption = (
        "Figure 11. Share of each node in the mean kernel value of independent random directions, "
        f"head width {HEAD_WIDTH}."
    )
    return Picture("figure_11_expected_contribution", caption, figure)


def _shares(data: Data) -> Picture:
    figure = new_figure(10, 4)
    for axes, (count, part) in zip(
        figure.subplots(1, 2), data["contributions"].items(), strict=True
    ):
        shares = 100 * np.array(part["shares"]).T
        colours = [numbered_style(number + 1)["color"] for number in range(len(shares))]
        hatches = ["", "", "", "", "", "", "//", "\\\\"]
        parts = axes.stackplot(part["cosines"], shares, colors=colours)
        for number, (area, hatch) in enumerate(zip(parts, hatches, strict=False)):
            area.set(hatch=hatch, edgecolor="white", linewidth=0.4, label=f"node {number + 1}")
        axes.set(xlim=(-1, 1), ylim=(0, 100), title=f"R = {count}")
        axes.set_xticks([-1, -0.5, 0, 0.5, 1])
        axes.set(xlabel="cosine x (no unit)", ylabel="share of the quadrature (%)")
        axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    caption = "Figure 12. Share of each node in the quadrature at a fixed cosine x."
    return Picture("figure_12_contribution_by_cosine", caption, figure)


def tables(data: Data) -> list[Table]:
    """Return the relative error by cosine for a few numbers of nodes."""
    rows = []
    for rule in ("gauss_laguerre", "fitted"):
        for count in (1, 2, 3, 4, 6, 8, 16, 24):
            if count > len(data["errors"][rule]):
                continue
            cells = [f"{100 * error:+.3g}" for error in data["errors"][rule][count - 1]]
            rows.append([f"{rule.replace('_', '–')}, R = {count}", *cells])
    columns = ["rule", *(f"x = {x:g}" for x in data["cosines"])]
    note = "Relative error of the kernel in per cent, ε = 0.001."
    return [Table("quadrature_error", "Error of the quadrature (%)", columns, rows, note)]


def _decay(data: Data, cosine: float) -> float:
    """Return the mean factor by which one more node divides the error, over 1 to 8 nodes."""
    column = [abs(row[data["cosines"].index(cosine)]) for row in data["errors"]["gauss_laguerre"]]
    return float((column[0] / column[7]) ** (1 / 7))


def claims(data: Data) -> list[Claim]:
    """Return what the paper says of the quadrature and what we measured."""

    def at(cosine: float, nodes: int = DEFAULT_NODES) -> float:
        row: Sequence[float] = data["errors"]["gauss_laguerre"][nodes - 1]
        return 100 * row[data["cosines"].index(cosine)]

    decays = {x: _decay(data, x) for x in (0.5, 0.8, 0.9, 0.99)}
    falling = [x for x, factor in decays.items() if factor >= FALLS]
    first = data["contributions"][str(DEFAULT_NODES)]["expected"]
    share = 100 * first[0] / sum(first)
    at_one = data["contributions"][str(DEFAULT_NODES)]["shares"][-1]
    return [
        Claim(
            f"The error falls exponentially with R (each node divides it by {FALLS:g} or more)",
            "Figure 9",
            ", ".join(f"÷{factor:.2g} a node at x = {x:g}" for x, factor in decays.items())
            + f"; at x = 1 still {at(1.0, MOST_NODES):.0f} % after {MOST_NODES} nodes",
            HOLDS
            if len(falling) == len(decays)
            else f"{HOLDS_AT} x ≤ {max(falling):g}, not near 1"
            if falling
            else FAILS,
        ),
        Claim(
            "R = 3 has low error",
            "Section L.3",
            ", ".join(f"{at(x):+.1f} % at x = {x:g}" for x in (0.5, 0.8, 0.9, 1.0)),
            f"{HOLDS_AT} x ≤ 0.5" if abs(at(0.5)) < 1 < abs(at(0.9)) else FAILS,
        ),
        Claim(
            "The first nodes contribute most, for every x",
            "Figures 11 and 12",
            f"node 1 of 3 gives {share:.0f} % for random directions of width {HEAD_WIDTH}, "
            f"{100 * at_one[0]:.1f} % at x = 1",
            HOLDS if share > 50 and at_one[0] > 0.5 else f"{HOLDS_AT} small x",
        ),
    ]


ITEM = Item(
    name="quadrature",
    title="quadrature of the integral over s",
    sources=("Figure 9", "Figure 10", "Figure 11", "Figure 12"),
    minutes=0.2,
    compute=compute,
    published="the error falls exponentially with R, R = 3 is enough, the first nodes dominate",
    draw=draw,
    tables=tables,
    claims=claims,
)
