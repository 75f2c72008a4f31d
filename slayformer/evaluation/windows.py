"""A text cut into windows, side by side or overlapping, in which every token is scored once.

Shape suffixes: B windows of a batch, T positions of a window.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from slayformer.data.loader import Batch, document_positions
from slayformer.data.shards import TokenStream
from slayformer.data.tokenizer import Tokenizer
from slayformer.errors import DataError
from slayformer.evaluation.document_losses import DocumentLosses, DocumentSums
from slayformer.training.objective import IGNORE_INDEX

READ_TOKENS = 1 << 20


@dataclass(frozen=True)
class Text:
    """The first `tokens` tokens of `stream`: documents that each end with `end_of_text`.

    `label` says in words what they are. Raises DataError for fewer than two tokens, of which
    none could be scored.
    """

    stream: TokenStream
    tokens: int
    end_of_text: int
    label: str

    def __post_init__(self) -> None:
        if self.tokens < 2:
            raise DataError(f"{self.label} has {self.tokens} token: the first is never scored")

    @cached_property
    def ends(self) -> np.ndarray:
        """Places of the end-of-text tokens, ascending."""
        found = []
        for start in range(0, self.tokens, READ_TOKENS):
            ids = self.stream.read(start, min(READ_TOKENS, self.tokens - start))
            found.append(np.flatnonzero(ids == self.end_of_text) + start)
        return np.concatenate(found)

    def words(self, tokenizer: Tokenizer) -> int:
        """Return the number of words, divided by white space, in the text of all but the first."""
        return sum(len(tokenizer.decode(ids).split()) for ids in self._documents(start=1))

    def digest(self, tokenizer: Tokenizer) -> str:
        """Return the SHA-256 of the documents: the same text, whatever its tokens are."""
        found = hashlib.sha256()
        for ids in self._documents(start=0):
            # an end-of-text ends each, as one byte that no UTF-8 has
            found.update(tokenizer.decode(ids).encode() + b"\xff")
        return found.hexdigest()

    def _documents(self, *, start: int) -> Iterator[np.ndarray]:
        """Yield the ids of each document from token `start` on, without its end-of-text."""
        for end in [*self.ends.tolist(), self.tokens]:
            if end > start:
                yield self.stream.read(start, end - start)
            start = end + 1


class TextWindows:
    """Windows of a text in which every token but the first is a target exactly once.

    Window w scores the tokens that windows before it did not. Without `stride` windows lie side by
    side, and the last may be shorter: what fills it up is no target. With it every window after
    the first scores `stride` new tokens behind as much context as fits; the last begins early
    enough to be full.
    """

    def __init__(
        self, text: Text, *, context_length: int, stride: int | None, isolate_documents: bool
    ) -> None:
        self.context_length = context_length
        self._text = text
        self._stride = stride or context_length
        self._isolate_documents = isolate_documents
        beyond_first = max(0, text.tokens - 1 - context_length)
        self.windows = 1 + math.ceil(beyond_first / self._stride)
        # where the last window begins; side by side it is where its turn comes
        self._latest = beyond_first if stride else text.tokens

    def batch(self, sample_indices: Sequence[int], /) -> Batch:
        """Return the windows with these numbers, targets scored elsewhere as IGNORE_INDEX."""
        text, length = self._text, self.context_length
        tokens = np.full((len(sample_indices), length + 1), text.end_of_text, dtype=np.int64)
        begin_B = self._begin(sample_indices)
        for row, begin in zip(tokens, begin_B, strict=True):
            text.stream.read_into(row[: min(length + 1, text.tokens - begin)], int(begin))
        place_BT = self._places(begin_B)
        # the first window scores all its targets, window w goes on where window w - 1 ended
        window_B = np.asarray(sample_indices)
        first_B = np.where(window_B == 0, 1, 1 + length + (window_B - 1) * self._stride)
        scored_BT = (place_BT >= first_B[:, None]) & (place_BT < text.tokens)
        ids_BT = tokens[:, :-1].copy()
        targets_BT = np.where(scored_BT, tokens[:, 1:], IGNORE_INDEX)
        documents: tuple[torch.Tensor, ...] = ()
        if self._isolate_documents:
            pair = document_positions(ids_BT, text.end_of_text)
            documents = tuple(torch.from_numpy(array) for array in pair)
        return Batch(torch.from_numpy(ids_BT), torch.from_numpy(targets_BT), *documents)

    def document_sums(self) -> DocumentSums:
        """Return sums over the documents of the text, for what these windows score."""

        def document_of(sample_indices: Sequence[int], batch: Batch) -> np.ndarray:
            place_BT = self._places(self._begin(sample_indices))
            return np.searchsorted(self._text.ends, place_BT)

        # the last document may have no end here
        return DocumentSums(document_of, len(self._text.ends) + 1)

    def _begin(self, sample_indices: Sequence[int]) -> np.ndarray:
        return np.minimum(np.asarray(sample_indices) * self._stride, self._latest)

    def _places(self, begin_B: np.ndarray) -> np.ndarray:
        """Return the place in the text of each target of windows that begin there, [B, T]."""
        return begin_B[:, None] + 1 + np.arange(self.context_length)


def standard_error(losses: DocumentLosses) -> float | None:
    """Return the standard error of the mean loss per token, documents being what was drawn.

    Tokens of a document are alike, so the mean over all tokens is a ratio of two means over
    documents (Cochran, 1977, "Sampling techniques", section 6.4): for documents of one length it
    is their losses' standard deviation over √D. None for a single document.
    """
    nats_D, tokens_D = losses.nats_D, losses.tokens_D
    count = len(nats_D)
    if count < 2:
        return None
    rest_D = nats_D - nats_D.sum() / tokens_D.sum() * tokens_D
    return math.sqrt(count / (count - 1) * np.square(rest_D).sum()) / float(tokens_D.sum())
