"""The validation loss of every document: what two runs on the same documents are paired by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from slayformer.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from slayformer.data.loader import Batch
    from slayformer.data.shards import TokenStream

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
    """Sums over the documents of the first `windows` windows of `stream`, one rank's share."""

    def __init__(
        self, stream: TokenStream, *, windows: int, context_length: int, end_of_text: int
    ) -> None:
        self._end_of_text = end_of_text
        ends_W = [
            np.count_nonzero(stream.read(window * context_length, context_length) == end_of_text)
            for window in range(windows)
        ]
        # documents that ended before each window, and in all of them
        self._ended_W = np.concatenate([[0], np.cumsum(ends_W, dtype=np.int64)])
        self._nats_D = np.zeros(self._ended_W[-1] + 1)
        self._tokens_D = np.zeros(self._ended_W[-1] + 1)

    def add(self, windows: Sequence[int], batch: Batch, nats_BT: Tensor) -> None:
        """Add the nats of the targets of `batch`, which holds `windows`."""
        ends_BT = batch.ids_BT.numpy() == self._end_of_text
        # an end-of-text belongs to the document it ends; what it predicts begins the next
        document_BT = self._ended_W[list(windows), None] + ends_BT.cumsum(axis=1)
        document, count = document_BT.ravel(), len(self._nats_D)
        nats = nats_BT.detach().double().cpu().numpy().ravel()
        self._nats_D += np.bincount(document, nats, minlength=count)
        self._tokens_D += np.bincount(document, minlength=count)

    def over_ranks(self) -> DocumentLosses:
        """Return the losses of all ranks together, the same on each; every rank has to call it."""
        import torch

        from slayformer.training.distributed import sum_over_ranks

        both = np.stack([self._nats_D, self._tokens_D])
        nats_D, tokens_D = sum_over_ranks(torch.from_numpy(both)).numpy()
        scored = tokens_D > 0
        return DocumentLosses(nats_D[scored], tokens_D[scored].astype(np.int64))
