"""The order of mechanisms in a comparison beside that of the paper's Table 5, pair by pair."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np

from slayformer.evaluation.paired import interval_half_width
from slayformer.paper.published import TABLE_5

SAME, REVERSED, OPEN = "same", "reversed", "too close to tell"


def losses(results: dict[str, Any]) -> dict[str, dict[int, float]]:
    """Return the last validation losses by mechanism and seed, the lowest mean first, NaN last."""
    found: dict[str, dict[int, float]] = {}
    for run in results["runs"]:
        found.setdefault(run["mechanism"], {})[run["seed"]] = run["loss"]
    means = {name: statistics.fmean(by_seed.values()) for name, by_seed in found.items()}
    return {
        name: found[name] for name in sorted(found, key=lambda n: (math.isnan(means[n]), means[n]))
    }


def difference(
    ours: dict[int, float], theirs: dict[int, float]
) -> tuple[float, float | None] | None:
    """Return the mean difference of losses over common seeds and half its 95 % interval.

    The half width is None for one seed, everything None without a common one.
    """
    seeds = sorted(ours.keys() & theirs.keys())
    if not seeds:
        return None
    apart_S = np.array([ours[seed] - theirs[seed] for seed in seeds])
    return float(apart_S.mean()), interval_half_width(apart_S[:, None])


def compare_order(found: dict[str, dict[int, float]]) -> list[dict[str, Any]]:
    """Return each pair of published mechanisms, the better one as published first.

    `difference` is second less first, with `half_width`; `order` says whether ours is the same.
    """
    named = sorted((name for name in TABLE_5 if name in found), key=lambda n: TABLE_5[n].loss)
    pairs = []
    for first, second in combinations(named, 2):
        apart = difference(found[second], found[first])
        if apart is None:
            continue
        mean, half_width = apart
        # a diverged run, whose loss is NaN, decides nothing
        decided = half_width is not None and abs(mean) > half_width
        pairs.append(
            {
                "first": first,
                "second": second,
                "published": TABLE_5[second].loss - TABLE_5[first].loss,
                "difference": mean,
                "half_width": half_width,
                "order": (SAME if mean > 0 else REVERSED) if decided else OPEN,
            }
        )
    return pairs


def rank_correlation(pairs: Sequence[dict[str, Any]]) -> float:
    """Return Kendall's τ: pairs in the published order less those in the other, over all."""
    signs = [(pair["difference"] > 0) - (pair["difference"] < 0) for pair in pairs]
    return sum(signs) / len(pairs) if pairs else math.nan
