"""The text format of the extreme classification repository, read and written.

The header is `N D L`: documents, features, labels. A line follows for each document:
`l1,l2 f:v f:v`, its labels (it may have none) and its features with their values, all from 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from slayformer.data.shards import write_atomically
from slayformer.errors import DataError


@dataclass(frozen=True)
class Rows:
    """Lists of numbers of different length: row i is `values[starts[i] : starts[i + 1]]`."""

    starts: np.ndarray
    values: np.ndarray

    @staticmethod
    def of(rows: Iterable[Iterable[int]]) -> Rows:
        """Return `rows` as one array and where each starts."""
        lists = [np.fromiter(row, dtype=np.int64) for row in rows]
        starts = np.cumsum([0, *map(len, lists)])
        return Rows(starts, np.concatenate([np.zeros(0, np.int64), *lists]))

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        return self.values[self.starts[row] : self.starts[row + 1]]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[row] for row in range(len(self)))

    def take(self, chosen: np.ndarray) -> Rows:
        """Return the rows `chosen`, in that order."""
        return Rows.of(self[row] for row in chosen)


@dataclass(frozen=True)
class Documents:
    """Documents as sparse features, and the labels of each; `weights` are the features' values."""

    features: Rows
    weights: np.ndarray
    labels: Rows
    feature_count: int
    label_count: int

    def __len__(self) -> int:
        return len(self.labels)


def read_documents(path: Path) -> Documents:
    """Return the documents in `path`; raises DataError naming the line and field that is wrong."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    documents, feature_count, label_count = _header(path, lines)
    if len(lines) - 1 != documents:
        told = f"line 1 says N={documents} documents, {len(lines) - 1} lines follow"
        raise DataError(f"{path}: {told}")
    labels, features, weights = [], [], []
    for number, line in enumerate(lines[1:], start=2):
        where = f"{path}, line {number}"
        first, *pairs = line.split(" ")
        # a line without labels starts with a space, or with its first feature
        if ":" in first:
            first, pairs = "", [first, *pairs]
        given = [text for text in first.split(",") if text]
        labels.append([_index(text, "label", label_count, where) for text in given])
        row = []
        for pair in filter(None, pairs):
            feature, colon, value = pair.partition(":")
            row.append(_index(feature, "feature", feature_count, where))
            weights.append(_value(value if colon else "", pair, where))
        features.append(row)
    return Documents(
        Rows.of(features),
        np.array(weights, np.float32),
        Rows.of(labels),
        feature_count,
        label_count,
    )


def _header(path: Path, lines: list[str]) -> tuple[int, ...]:
    words = lines[0].split() if lines else []
    if len(words) != 3 or not all(word.isascii() and word.isdigit() for word in words):
        found = f"{lines[0][:40]!r}" if lines else "an empty file"
        raise DataError(f"{path}, line 1: header 'N D L' expected (three numbers), found {found}")
    return tuple(map(int, words))


def _index(text: str, what: str, count: int, where: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise DataError(f"{where}: {what} {text!r} is not a whole number from 0")
    if int(text) >= count:
        raise DataError(f"{where}: {what} {text} is not below {count}, which the header says")
    return int(text)


def _value(text: str, pair: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise DataError(f"{where}: feature {pair!r} is not written FEATURE:VALUE with a number")
    return value


def write_documents(path: Path, documents: Documents) -> None:
    """Write `documents` to `path`; `read_documents` gives the same back."""
    sizes = (len(documents), documents.feature_count, documents.label_count)
    lines = [" ".join(map(str, sizes))]
    starts = documents.features.starts
    for row, (features, labels) in enumerate(
        zip(documents.features, documents.labels, strict=True)
    ):
        weights = documents.weights[starts[row] : starts[row + 1]]
        pairs = (f"{f}:{float(w):.6g}" for f, w in zip(features, weights, strict=True))
        lines.append(" ".join([",".join(map(str, labels)), *pairs]))
    write_atomically(path, ("\n".join([*lines, ""]).encode(),))
