"""The validation loss of every document: what two runs on the same documents are paired by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from slayformer.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from slayformer.data.loader import Batch
    from slayformer.data.shards import TokenStream

DocumentOf = Callable[[Sequence[int], "Batch"], np.ndarray]

FILE = "validation_losses.safetensors"


@dataclass(frozen=True)
class DocumentLosses:
    """Of each validation document, in the order of the stream: its nats and its scored tokens.

    A document cut off by the end of validation counts with the tokens scored; one that has none is
    left out.
    """

    nats_D: np.ndarray
    tokens_D: np.ndarray

    def write(self, folder: Path) -> None:
        """Write both to FILE in `folder`, fp64 and int64, whole or not at all."""
        from safetensors.numpy import save

        from slayformer.data.shards import write_atomically

        arrays = {"nats": self.nats_D, "tokens": self.tokens_D}
        write_atomically(folder / FILE, (save(arrays),))


def read_document_losses(folder: Path) -> DocumentLosses | None:
    """Return what a run wrote to `folder`; None for a run of a version that did not.

    Raises UserError if the file is damaged.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    path = folder / FILE
    if not path.exists():
        return None
    try:
        arrays = load_file(path)
        return DocumentLosses(arrays["nats"], arrays["tokens"])
    except (OSError, KeyError, SafetensorError) as error:
        raise UserError(f"{path}: unreadable: {error}; delete it to report without it") from error


class DocumentSums:
    """What each of `count` documents loses, from what `loss.score` tells its `observe`.

    `document_of(windows, batch)` gives the document of every target of `batch`, [B, T] from 0.
    """

    def __init__(self, document_of: DocumentOf, count: int) -> None:
        self._document_of = document_of
        self._nats_D, self._tokens_D = np.zeros(count), np.zeros(count)

    def add(self, windows: Sequence[int], batch: Batch, own: slice, nats_BT: Tensor) -> None:
        """Add the nats of the stretch `own` of every sample of `batch`, which holds `windows`."""
        # here, and not above: reports read losses without torch
        from slayformer.training.objective import IGNORE_INDEX

        scored_BT = batch.targets_BT[:, own].numpy() != IGNORE_INDEX
        document_N = self._document_of(windows, batch)[:, own][scored_BT]
        nats_N = nats_BT.detach().double().cpu().numpy()[scored_BT]
        self._nats_D += np.bincount(document_N, nats_N, minlength=len(self._nats_D))
        self._tokens_D += np.bincount(document_N, minlength=len(self._nats_D))

    def over_ranks(self) -> DocumentLosses:
        """Return the losses of all ranks together, the same on each; every rank has to call it."""
        import torch

        from slayformer.training.distributed import sum_over_ranks

        both = np.stack([self._nats_D, self._tokens_D])
        nats_D, tokens_D = sum_over_ranks(torch.from_numpy(both)).numpy()
        scored = tokens_D > 0
        return DocumentLosses(nats_D[scored], tokens_D[scored].astype(np.int64))


def sums_of_validation(
    stream: TokenStream, *, windows: int, context_length: int, end_of_text: int
) -> DocumentSums:
    """Return sums over the documents of the first `windows` windows of `stream`."""
    ends_W = [
        np.count_nonzero(stream.read(window * context_length, context_length) == end_of_text)
        for window in range(windows)
    ]
    # documents that ended before each window, and in all of them
    ended_W = np.concatenate([[0], np.cumsum(ends_W, dtype=np.int64)])

    def document_of(windows: Sequence[int], batch: Batch) -> np.ndarray:
        ends_BT = batch.ids_BT.numpy() == end_of_text
        # an end-of-text belongs to the document it ends; what it predicts begins the next
        return ended_W[list(windows), None] + ends_BT.cumsum(axis=1)

    return DocumentSums(document_of, ended_W[-1] + 1)
