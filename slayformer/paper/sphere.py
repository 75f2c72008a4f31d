"""Figures 19 and 20: the weights of keys all over the sphere, for a query at its pole."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from slayformer.paper.figures import line_styles, new_figure
from slayformer.paper.item import FAILS, HOLDS, HOLDS_AT, Claim, Data, Item, Picture, Request
from slayformer.paper.mechanisms import direction_scores, one_head

MECHANISMS = ("softmax", "yat", "yat_spherical", "slay", "slay_exact_poly", "performer")
WIDTH = 3
CAP_DEGREES = 30.0
# odd, so that the equator is there too
ANGLES = np.linspace(0, 180, 91)
TURNS = np.linspace(0, 360, 73)


def directions(angles: np.ndarray, turns: np.ndarray) -> Tensor:
    """Return unit vectors [angles, turns, 3] at `angles` degrees from the pole."""
    theta, phi = np.deg2rad(np.meshgrid(angles, turns, indexing="ij"))
    parts = np.sin(theta) * np.cos(phi), np.sin(theta) * np.sin(phi), np.cos(theta)
    return torch.from_numpy(np.stack(parts, -1))


def compute(request: Request) -> Data:
    """Return relative weights over the sphere, a profile by angle, and the share near the pole.

    Profile and share are means over draws of the features, the map over the sphere is one draw's.
    """
    seeds = request.seed_count(quick=20, full=100)
    keys = directions(ANGLES, TURNS)
    pole = torch.tensor([[0.0, 0.0, 1.0]], dtype=torch.float64)
    # a ring of the sphere is as large as the sine of its angle
    area, cap = np.sin(np.deg2rad(ANGLES)), ANGLES <= CAP_DEGREES
    found = {}
    for number, name in enumerate(MECHANISMS):
        # the kernel itself, also of a mechanism that puts a softmax over it
        changes = {"normalization": "kernel"} if name == "yat" else {}
        maps = []
        for seed in range(seeds):
            attention = one_head(name, WIDTH, seed, **changes)
            scores = direction_scores(attention, pole, keys.flatten(0, 1))
            maps.append(scores.reshape(len(ANGLES), len(TURNS)).numpy())
        profiles = np.array([one[:, :-1].mean(1) for one in maps])
        profiles /= np.trapezoid(profiles * area, axis=1)[:, None]
        shares = np.trapezoid((profiles * area)[:, cap], axis=1)
        mean = profiles.mean(0)
        found[name] = {
            "map": maps[0] / maps[0].max(),
            # 1 where every direction has the same weight
            "profile": mean * np.trapezoid(area),
            "cap_share": shares.mean(),
            "cap_std": shares.std(ddof=1) if seeds > 1 else 0.0,
            "peak_degrees": ANGLES[mean.argmax()],
        }
        request.progress((number + 1) / len(MECHANISMS))
    uniform = float(np.trapezoid(area[cap]) / np.trapezoid(area))
    return {"angles": ANGLES, "turns": TURNS, "found": found, "uniform": uniform, "seeds": seeds}


def draw(data: Data) -> list[Picture]:
    """Draw Figures 19 and 20."""
    return [_heat_map(data), _polar(data)]


def _heat_map(data: Data) -> Picture:
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm

    figure = new_figure(11, 7.2)
    xyz = directions(np.array(data["angles"]), np.array(data["turns"])).numpy()
    norm, colours = LogNorm(1e-4, 1), colormaps["viridis"]
    grid = figure.subplots(2, 3, subplot_kw={"projection": "3d", "proj_type": "ortho"})
    for axes, name in zip(grid.flat, MECHANISMS, strict=True):
        values = np.clip(data["found"][name]["map"], 1e-4, 1)
        faces = colours(norm(values))
        axes.plot_surface(
            *np.moveaxis(xyz, -1, 0), facecolors=faces, rcount=91, ccount=73, shade=False
        )
        axes.set_box_aspect((1, 1, 1), zoom=1.25)
        axes.set_axis_off()
        axes.view_init(elev=32, azim=-60)
        part = data["found"][name]
        share = f"{100 * part['cap_share']:.0f} % within {CAP_DEGREES:.0f}°"
        axes.set_title(f"{name}: {share}", fontsize=10)
    bar = figure.colorbar(ScalarMappable(norm, colours), ax=grid, shrink=0.6)
    bar.set_label("weight ÷ largest weight (no unit)")
    caption = (
        "Figure 19. Weight of keys over the sphere in three dimensions for a query at the pole "
        f"(top), vectors of length √3. A uniform weight has {100 * data['uniform']:.0f} % within "
        f"{CAP_DEGREES:.0f}° of it. One draw of the features; percentages: mean over "
        f"{data['seeds']} draws."
    )
    return Picture("figure_19_sphere", caption, figure)


def _polar(data: Data) -> Picture:
    figure = new_figure(8.5, 6)
    axes = figure.subplots(subplot_kw={"projection": "polar"})
    theta = np.deg2rad(data["angles"])
    styles = line_styles(MECHANISMS)
    for name in MECHANISMS:
        values = np.log10(np.clip(data["found"][name]["profile"], 1e-3, None))
        both = np.concatenate([-theta[::-1], theta]), np.concatenate([values[::-1], values])
        axes.plot(*both, label=name, **styles[name])
    axes.set_theta_zero_location("N")
    axes.set_ylim(-3, 3.3)
    axes.set_yticks([-2, -1, 0, 1, 2], ["0.01", "0.1", "1", "10", "100"], fontsize=8)
    axes.set_rlabel_position(113)
    axes.set_title("Weight ÷ uniform weight (no unit, log radius) by angle from the query")
    axes.legend(fontsize=9, loc="center left", bbox_to_anchor=(1.08, 0.5))
    caption = (
        "Figure 20. Weight of a key by its angle from the query, in units of a uniform weight; "
        f"mean over {data['seeds']} draws of the features. The same sphere as Figure 19."
    )
    return Picture("figure_20_polar", caption, figure)


def claims(data: Data) -> list[Claim]:
    """Return the claim of section L.5."""
    found = data["found"]

    def share(name: str) -> str:
        return f"{name} {100 * found[name]['cap_share']:.0f} %"

    shares = ", ".join(share(name) for name in MECHANISMS)
    softmax = found["softmax"]["cap_share"]
    wider = [name for name in ("yat_spherical", "slay") if found[name]["cap_share"] < 1.1 * softmax]
    verdict = (
        HOLDS if not wider else f"{HOLDS_AT} the exact kernels" if wider == ["slay"] else FAILS
    )
    return [
        Claim(
            "Yat and SLAY concentrate weight around the query, softmax is more diffuse",
            "Figures 19 and 20",
            f"weight within {CAP_DEGREES:.0f}° of the query on the sphere of width 3 (uniform "
            f"{100 * data['uniform']:.0f} %): {shares}",
            verdict,
        )
    ]


ITEM = Item(
    name="sphere",
    title="weights over the sphere",
    sources=("Figure 19", "Figure 20"),
    minutes=0.5,
    compute=compute,
    published="Yat and SLAY concentrate around the query, softmax spreads",
    draw=draw,
    claims=claims,
)
