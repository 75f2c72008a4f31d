"""Figures 4 to 6: the spherical Yat kernel beside softmax's, by cosine, by angle, by slope."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from slayformer.attention.base import generator
from slayformer.attention.kernels import spherical_yat, spherical_yat_derivative
from slayformer.paper.figures import new_figure
from slayformer.paper.item import FAILS, HOLDS, HOLDS_AT, Claim, Data, Item, Picture, Request
from slayformer.paper.mechanisms import direction_scores, one_head

EPSILON = 1e-3
HEAD_WIDTH = 64
# cosines close to 1 too, where the kernel lives
COSINES = np.concatenate([np.linspace(-1, 0.95, 391), 1 - np.geomspace(0.05, 1e-6, 200), [1.0]])
PAIRS = 20_000
LABELS = {
    "spherical": "spherical Yat, ε = 0.001",
    "softmax_unit": "exp(x): softmax of unit vectors",
    "softmax_typical": "exp(8x): softmax at ‖q‖ = ‖k‖ = √64",
}
STYLES: dict[str, dict[str, Any]] = {
    "spherical": {"color": "#000000", "linewidth": 1.9},
    "softmax_unit": {"color": "#0072B2", "linestyle": "--", "linewidth": 1.7},
    "softmax_typical": {"color": "#D55E00", "linestyle": "-.", "linewidth": 1.7},
}


def responses(cosines: np.ndarray) -> dict[str, np.ndarray]:
    """Return each kernel at `cosines`; the softmax of typical vectors is the mechanism's own."""
    x = torch.from_numpy(cosines)
    query = torch.zeros(1, HEAD_WIDTH, dtype=torch.float64)
    query[0, 0] = 1
    keys = torch.zeros(len(x), HEAD_WIDTH, dtype=torch.float64)
    keys[:, 0], keys[:, 1] = x, (1 - x.square()).clamp_min(0).sqrt()
    softmax = direction_scores(one_head("softmax", HEAD_WIDTH, 0), query, keys)[0]
    return {
        "spherical": spherical_yat(x, EPSILON).numpy(),
        "softmax_unit": x.exp().numpy(),
        "softmax_typical": softmax.numpy(),
    }


def slopes(cosines: np.ndarray) -> dict[str, np.ndarray]:
    """Return |d kernel/d x| at `cosines`, the spherical kernel's by automatic differentiation."""
    x = torch.from_numpy(cosines.copy()).requires_grad_()
    (slope,) = torch.autograd.grad(spherical_yat(x, EPSILON).sum(), x)
    # ‖∇_q k‖ for ‖q‖ = 1 is the slope times the sine: along q the kernel does not change
    sine = np.sqrt(np.clip(1 - cosines**2, 0, None))
    scale = HEAD_WIDTH**0.5
    return {
        "spherical": slope.abs().numpy(),
        "gradient": slope.abs().numpy() * sine,
        "softmax_unit": np.exp(cosines),
        "softmax_typical": scale * np.exp(scale * cosines),
    }


def compute(request: Request) -> Data:
    """Return the curves, and the slopes at the cosines of random pairs."""
    angles = np.linspace(0, 180, 721)
    directions = torch.randn(2, PAIRS, HEAD_WIDTH, generator=generator(0), dtype=torch.float64)
    first, second = directions / directions.norm(dim=-1, keepdim=True)
    random = spherical_yat_derivative((first * second).sum(-1), EPSILON).abs()
    return {
        "cosines": COSINES,
        "responses": responses(COSINES),
        "slopes": slopes(COSINES),
        "angles": angles,
        "by_angle": responses(np.cos(np.deg2rad(angles))),
        "random_slope_quantiles": torch.quantile(random, torch.tensor([0.5, 0.99, 1.0]).double()),
    }


def draw(data: Data) -> list[Picture]:
    """Draw Figures 4, 5 and 6."""
    return [_response(data), _angle(data), _gradient(data)]


def _axes(width: float = 7.5) -> tuple[Any, Any]:
    figure = new_figure(width, 4.6)
    axes = figure.subplots()
    axes.grid(alpha=0.25)
    return figure, axes


def _response(data: Data) -> Picture:
    figure, axes = _axes()
    for name, label in LABELS.items():
        axes.plot(data["cosines"], data["responses"][name], label=label, **STYLES[name])
    axes.axhline(1 / EPSILON, color="#777777", linewidth=0.8)
    axes.text(-0.98, 1.25 / EPSILON, "bound 1/ε = 1,000", fontsize=9, color="#555555")
    axes.set(yscale="log", ylim=(1e-4, 1e4), xlim=(-1, 1.02))
    axes.set(xlabel="cosine x between q and k (no unit)", ylabel="kernel value (no unit)")
    axes.set_title("Kernel response")
    axes.legend(fontsize=9, loc="lower right")
    caption = (
        "Figure 4. Kernel value by cosine. The spherical kernel is bounded by 1/ε and zero at "
        "x = 0; the softmax kernel grows with the vectors' lengths."
    )
    return Picture("figure_04_kernel_response", caption, figure)


def _angle(data: Data) -> Picture:
    figure, axes = _axes()
    for name, label in LABELS.items():
        values = np.array(data["by_angle"][name])
        axes.plot(data["angles"], values / values[0], label=label, **STYLES[name])
    axes.set(yscale="log", ylim=(1e-8, 2), xlim=(0, 180))
    axes.set_xticks(range(0, 181, 30))
    axes.set(xlabel="angle between q and k (degrees)", ylabel="kernel ÷ its value at 0° (no unit)")
    axes.set_title("Selectivity by angle")
    axes.legend(fontsize=9, loc="lower left")
    caption = "Figure 5. Kernel value by angle, relative to perfect alignment."
    return Picture("figure_05_angle", caption, figure)


def _gradient(data: Data) -> Picture:
    figure = new_figure(11, 4.6)
    left, right = figure.subplots(1, 2)
    x = np.array(data["cosines"])
    for name, label in LABELS.items():
        slope = np.array(data["slopes"][name])
        left.plot(x, slope, label=label, **STYLES[name])
        below = x < 1
        right.loglog(1 - x[below], slope[below], label=label, **STYLES[name])
    gradient = {"color": "#009E73", "linestyle": ":", "linewidth": 2}
    below = x < 1
    right.loglog(
        1 - x[below],
        np.array(data["slopes"]["gradient"])[below],
        label="spherical Yat, gradient in q: slope × sine",
        **gradient,
    )
    left.set(yscale="log", ylim=(1e-3, 1e7), xlim=(-1, 1.02), xlabel="cosine x (no unit)")
    right.set_ylim(1e-3, 1e7)
    right.invert_xaxis()
    right.set_xlabel("1 − x (no unit; alignment grows to the right)")
    for axes in (left, right):
        axes.set_ylabel("|slope| of the kernel (no unit)")
        axes.grid(alpha=0.25)
    left.set_title("Slope by cosine")
    right.set_title("Near perfect alignment")
    figure.legend(
        *right.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=9
    )
    caption = (
        "Figure 6. Slope of the kernels in x, and the length of the spherical kernel's gradient in"
        " a unit q, which vanishes at x = 1."
    )
    return Picture("figure_06_gradient", caption, figure)


def claims(data: Data) -> list[Claim]:
    """Return what the paper reads from these figures and what we measured."""
    angles = np.array(data["angles"])
    by_angle = {name: np.array(values) for name, values in data["by_angle"].items()}
    at_90 = {name: values[angles == 90][0] / values[0] for name, values in by_angle.items()}
    half = {name: angles[np.argmax(values < values[0] / 2)] for name, values in by_angle.items()}
    largest = max(data["responses"]["spherical"])
    gradient = max(data["slopes"]["gradient"])
    middle, rare, most = data["random_slope_quantiles"]
    return [
        Claim(
            "The spherical kernel is bounded by 1/ε, softmax's kernel is not",
            "Section L.1, Figure 4",
            f"largest {largest:,.0f} of 1/ε = 1,000; exp(x) of unit vectors is at most "
            f"{np.e:.2f} and so bounded as well, exp(q·k/√d) grows with the lengths",
            f"{HOLDS_AT} vectors of free length" if largest <= (1 + 1e-9) / EPSILON else FAILS,
        ),
        Claim(
            "Softmax keeps appreciable weight at 90°, spherical Yat none",
            "Figure 5",
            f"relative to 0°: softmax {at_90['softmax_unit']:.2f} for unit vectors, "
            f"{at_90['softmax_typical']:.1e} for vectors of length √64; spherical Yat "
            f"{at_90['spherical']:.0e}",
            f"{HOLDS_AT} unit vectors" if at_90["softmax_typical"] < 0.01 else HOLDS,
        ),
        Claim(
            "Spherical Yat is sharply selective",
            "Figure 5",
            f"half its peak at {half['spherical']:.2g}°; softmax at {half['softmax_unit']:.0f}° "
            f"(unit vectors) and {half['softmax_typical']:.0f}° (length √64)",
            HOLDS if half["spherical"] < half["softmax_typical"] else FAILS,
        ),
        Claim(
            "Gradients are bounded, and large only near x = 1",
            "Figure 6",
            f"slope at most {max(data['slopes']['spherical']):.1e} (x = 1), gradient in a unit q "
            f"at most {gradient:.1e}; of random pairs of width {HEAD_WIDTH} the median slope is "
            f"{middle:.2f}, 99 % are below {rare:.2f}, the largest of {PAIRS:,} is {most:.2f}",
            HOLDS if rare < 1 else FAILS,
        ),
    ]


ITEM = Item(
    name="kernel_curves",
    title="the spherical Yat kernel beside softmax's",
    sources=("Figure 4", "Figure 5", "Figure 6"),
    minutes=0.1,
    compute=compute,
    published="bounded by 1/ε, far more selective than softmax, gradients bounded and large only "
    "where q and k nearly align",
    draw=draw,
    claims=claims,
)
