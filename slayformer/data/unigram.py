"""The unigram baseline: what a model that ignores its context would score."""

from __future__ import annotations

import io
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np

from slayformer.data.shards import TokenStream, write_atomically

READ_TOKENS = 1 << 20


def unigram_cross_entropy(
    train: TokenStream,
    targets: Iterable[np.ndarray],
    vocabulary_size: int,
    kept: Path | None = None,
) -> float:
    """Return nats per token of all `targets` (ids) under the token frequencies of `train`.

    The frequencies are add-one smoothed: p(v) = (count(v) + 1) / (tokens + vocabulary_size).
    The counts are read from the file `kept`, and left there for the next run, if one is named.
    """
    counts = None if kept is None else _read_counts(kept, vocabulary_size)
    if counts is None or counts.sum() != len(train):
        counts = _count(train, vocabulary_size)
        if kept is not None:
            content = io.BytesIO()
            np.save(content, counts)
            # tokens that nobody may write beside are counted again
            with suppress(OSError):
                write_atomically(kept, (content.getbuffer(),))
    nats_V = np.log(len(train) + vocabulary_size) - np.log(counts + 1.0)

    target_counts = np.zeros(vocabulary_size, dtype=np.int64)
    for ids in targets:
        target_counts += np.bincount(np.ravel(ids), minlength=vocabulary_size)
    return float(target_counts @ nats_V / target_counts.sum())


def _count(train: TokenStream, vocabulary_size: int) -> np.ndarray:
    counts = np.zeros(vocabulary_size, dtype=np.int64)
    for start in range(0, len(train), READ_TOKENS):
        ids = train.read(start, min(READ_TOKENS, len(train) - start))
        counts += np.bincount(ids, minlength=vocabulary_size)
    return counts


def _read_counts(kept: Path, vocabulary_size: int) -> np.ndarray | None:
    try:
        counts = np.load(kept)
    except (OSError, ValueError, EOFError):
        return None
    fits = counts.dtype == np.int64 and counts.shape == (vocabulary_size,)
    return counts if fits else None
