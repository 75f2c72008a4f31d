"""Precision at k, plain and propensity-scored (Jain et al., 2016), of ranked labels."""

from __future__ import annotations

import numpy as np

from slayformer.paper.xmc.data import Rows


def propensities(
    training_labels: Rows, label_count: int, *, a: float = 0.55, b: float = 1.5
) -> np.ndarray:
    """Return p_l = 1 / (1 + C (N_l + B)^−A) with C = (ln N − 1)(B + 1)^A, [L].

    N documents are in training, N_l of them with label l. Of a rare label p is small: it is likely
    to be missing where it belongs.
    """
    counts = np.bincount(training_labels.values, minlength=label_count)
    c = (np.log(len(training_labels)) - 1) * (b + 1) ** a
    return 1 / (1 + c * (counts + b) ** -a)


def precision_at(ranked: np.ndarray, truth: Rows, k: int) -> float:
    """Return P@k: the share of right labels among the first `k` of `ranked` [N, ≥ k]."""
    return float(_hits(ranked, truth, k).mean())


def scored_precision_at(ranked: np.ndarray, truth: Rows, p: np.ndarray, k: int) -> float:
    """Return PSP@k: Σ 1/p_l over right labels among the first `k`, over the most there can be.

    Both are summed over documents first. 1 for a perfect ranking, never above; 0 without labels.
    """
    gained = (_hits(ranked, truth, k) / p[ranked[:, :k]]).sum()
    best = sum(np.sort(1 / p[labels])[::-1][:k].sum() for labels in truth)
    return float(gained / best) if best else 0.0


def _hits(ranked: np.ndarray, truth: Rows, k: int) -> np.ndarray:
    """Return which of the first `k` labels are right, [N, k]; a label counts once a document."""
    first = ranked[:, :k]
    return np.array([np.isin(row, labels) for row, labels in zip(first, truth, strict=True)])
