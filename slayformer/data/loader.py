"""Windows of a token stream as training samples, found by one global sample index.

The index is the loader's whole state: which tokens sample i holds depends on the seed alone, so
any number of ranks, any micro-batch and any resume see the same samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from slayformer.data.shards import TokenStream
from slayformer.errors import DataError


@dataclass(frozen=True)
class Batch:
    """Samples as int64 tensors [B, T]; the last two are None unless documents are isolated.

    document_ids_BT count the documents of a window from 0; position_ids_BT restart in each.
    """

    ids_BT: torch.Tensor
    targets_BT: torch.Tensor
    document_ids_BT: torch.Tensor | None = None
    position_ids_BT: torch.Tensor | None = None

    def stretch(self, span: slice) -> Batch:
        """Return the tokens `span` of every sample."""
        parts = (self.ids_BT, self.targets_BT, self.document_ids_BT, self.position_ids_BT)
        return Batch(*(None if part is None else part[:, span] for part in parts))  # type: ignore[arg-type]


class WindowLoader:
    """Samples of `context_length` tokens and their successors.

    Window w covers tokens w*T to w*T + T of `stream`, T = context_length. Sample i is window
    permutation(seed, epoch)[i % windows] of epoch i // windows, endlessly; with `seed` None, window
    i % windows.
    """

    def __init__(
        self,
        stream: TokenStream,
        *,
        context_length: int,
        seed: int | None,
        end_of_text: int,
        isolate_documents: bool = False,
    ) -> None:
        """Prepare to read `stream`; raises DataError if it is shorter than one window."""
        self.windows = (len(stream) - 1) // context_length
        if self.windows < 1:
            raise DataError(
                f"{stream.label} holds {len(stream):,} tokens, fewer than one window of "
                f"{context_length + 1:,} (model.context_length={context_length} and one target): "
                f"use more text or a shorter context"
            )
        self._stream = stream
        self.context_length = context_length
        self._seed = seed
        self._end_of_text = end_of_text
        self._isolate_documents = isolate_documents
        self._epoch: int | None = None
        self._permutation = np.empty(0, dtype=np.uint32)

    def batch(self, sample_indices: Sequence[int]) -> Batch:
        """Return the samples with these global indices, in this order."""
        tokens = np.empty((len(sample_indices), self.context_length + 1), dtype=np.int64)
        for row, index in zip(tokens, sample_indices, strict=True):
            self._stream.read_into(row, self.window(index) * self.context_length)
        # copies, also of a single row: whoever masks targets must not reach the ids
        ids_BT, targets_BT = tokens[:, :-1].copy(), tokens[:, 1:].copy()
        documents: tuple[torch.Tensor, ...] = ()
        if self._isolate_documents:
            pair = document_positions(ids_BT, self._end_of_text)
            documents = tuple(torch.from_numpy(array) for array in pair)
        return Batch(torch.from_numpy(ids_BT), torch.from_numpy(targets_BT), *documents)

    def window(self, sample_index: int) -> int:
        """Return which window sample `sample_index` is."""
        epoch, position = divmod(sample_index, self.windows)
        if self._seed is None:
            return position
        if epoch != self._epoch:
            generator = np.random.Generator(np.random.PCG64([self._seed, epoch]))
            order = np.arange(self.windows, dtype=np.uint32)
            generator.shuffle(order)
            self._epoch, self._permutation = epoch, order
        return int(self._permutation[position])


def document_positions(ids_BT: np.ndarray, end_of_text: int) -> tuple[np.ndarray, np.ndarray]:
    """Return document_ids and position_ids, int64 [B, T]: a document ends with its end-of-text."""
    is_first_BT = np.zeros(ids_BT.shape, dtype=bool)
    is_first_BT[:, 1:] = ids_BT[:, :-1] == end_of_text
    position_T = np.arange(ids_BT.shape[1])
    start_BT = np.maximum.accumulate(np.where(is_first_BT, position_T, 0), axis=1)
    return np.cumsum(is_first_BT, axis=1, dtype=np.int64), position_T - start_BT
