"""Cross entropy over fixed windows: the one scorer behind validation, `eval.py` and the tables."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from slayformer.errors import DataError
from slayformer.training.distributed import rank, sum_over_ranks, world_size
from slayformer.training.objective import IGNORE_INDEX

if TYPE_CHECKING:
    from slayformer.data.loader import WindowLoader


@dataclass(frozen=True)
class LossTotals:
    """Sums over scored tokens: cross entropy in nats, tokens, and UTF-8 bytes they stand for."""

    nats: float
    tokens: int
    bytes: int

    @property
    def loss(self) -> float:
        """Mean cross entropy in nats per token."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """exp(loss) per token; infinite where that overflows."""
        return math.inf if self.loss > 700 else math.exp(self.loss)

    @property
    def bits_per_byte(self) -> float:
        """Bits of cross entropy per byte, comparable between tokenizers; NaN without bytes."""
        return self.nats / math.log(2) / self.bytes if self.bytes else math.nan


def validation_windows(loader: WindowLoader, tokens: int, context_length: int) -> int:
    """Return how many windows validation on at most `tokens` tokens takes: one at least."""
    return min(max(1, tokens // context_length), loader.windows)


@torch.no_grad()
def score(
    objective: nn.Module,
    loader: WindowLoader,
    *,
    windows: int,
    batch_samples: int,
    byte_lengths: np.ndarray,
    progress: Callable[[int], None] | None = None,
) -> LossTotals:
    """Return the totals of windows 0 … `windows` - 1, the same on every rank.

    `byte_lengths[id]` is the UTF-8 length of a token. Rank r takes windows r, r + world size, …
    and every rank runs the same number of forward passes: one that has run out repeats window 0
    with no target, because sharded weights are gathered by all ranks together. Sums are fp64, so
    neither `batch_samples` nor the world size matters beyond rounding. `progress` is called with
    the number of windows just scored, over all ranks.

    Raises DataError if the loader has fewer windows, or none is asked for.
    """
    if not 0 < windows <= loader.windows:
        raise DataError(f"cannot score {windows} windows: there are {loader.windows}")
    parameter = next(objective.parameters(), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    bytes_of_id = torch.from_numpy(np.asarray(byte_lengths, dtype=np.int64))
    # nats, tokens, bytes; counts are exact in fp64 up to 2^53
    totals = torch.zeros(3, dtype=torch.float64)
    stride = world_size() * batch_samples
    was_training = objective.training
    objective.eval()
    try:
        for start in range(0, windows, stride):
            stop = min(start + stride, windows)
            mine = list(range(start + rank(), stop, world_size()))
            batch = loader.batch(mine or [0])
            targets_BT = batch.targets_BT
            if not mine:
                targets_BT = torch.full_like(targets_BT, IGNORE_INDEX)
            inputs = (batch.ids_BT, targets_BT, batch.document_ids_BT, batch.position_ids_BT)
            nats_BT = objective(*(None if part is None else part.to(device) for part in inputs))
            scored = targets_BT[targets_BT != IGNORE_INDEX]
            totals[0] += nats_BT.sum(dtype=torch.float64).cpu()
            totals[1] += scored.numel()
            totals[2] += bytes_of_id[scored].sum()
            if progress is not None:
                progress(stop - start)
    finally:
        objective.train(was_training)
    nats, tokens, byte_count = sum_over_ranks(totals).tolist()
    return LossTotals(nats, int(tokens), int(byte_count))
