"""How the paper's figures look: sizes, and colours and dashes that keep curves apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slayformer.evaluation.report_figure import COLOURS, DASHES

# black is the exact kernel's
_PALETTE = (COLOURS[-1], *COLOURS[:-1])
# colours that mean the same in every figure
_OWN = {"yat_spherical": 0, "softmax": 1, "slay": 2}


def new_figure(width: float, height: float) -> Any:
    """Return an empty Figure, sizes in inches."""
    from matplotlib.figure import Figure

    # a Figure of its own draws with Agg and leaves pyplot's global state alone
    return Figure(figsize=(width, height), layout="constrained", dpi=130)


def line_styles(mechanisms: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return a colour and dash for each of `mechanisms`; the main ones look the same everywhere."""
    free = iter(range(len(_OWN), len(_OWN) + len(mechanisms)))
    return {name: numbered_style(_OWN[name] if name in _OWN else next(free)) for name in mechanisms}


def numbered_style(number: int) -> dict[str, Any]:
    """Return the colour and dash of the `number`th curve."""
    # with another dash where a colour comes back
    dash = DASHES[(number + 2 * (number // len(_PALETTE))) % len(DASHES)]
    return {"color": _PALETTE[number % len(_PALETTE)], "linestyle": dash, "linewidth": 1.8}
