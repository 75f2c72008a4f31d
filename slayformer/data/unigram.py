"""The unigram baseline: what a model that ignores its context would score."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from slayformer.data.shards import TokenStream

READ_TOKENS = 1 << 20


def unigram_cross_entropy(
    train: TokenStream, targets: Iterable[np.ndarray], vocabulary_size: int
) -> float:
    """Return nats per token of all `targets` (ids) under the token frequencies of `train`.

    The frequencies are add-one smoothed: p(v) = (count(v) + 1) / (tokens + vocabulary_size).
    """
    counts = np.zeros(vocabulary_size, dtype=np.int64)
    for start in range(0, len(train), READ_TOKENS):
        ids = train.read(start, min(READ_TOKENS, len(train) - start))
        counts += np.bincount(ids, minlength=vocabulary_size)
    nats_V = np.log(len(train) + vocabulary_size) - np.log(counts + 1.0)

    target_counts = np.zeros(vocabulary_size, dtype=np.int64)
    for ids in targets:
        target_counts += np.bincount(np.ravel(ids), minlength=vocabulary_size)
    return float(target_counts @ nats_V / target_counts.sum())
