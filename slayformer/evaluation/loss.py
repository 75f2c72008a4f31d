"""Cross entropy over fixed windows: the one scorer behind validation, `eval.py` and the tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from slayformer.errors import DataError
from slayformer.training import distributed
from slayformer.training.objective import IGNORE_INDEX

if TYPE_CHECKING:
    from slayformer.data.loader import Batch, WindowLoader


class Windows(Protocol):
    """Fixed windows by their number; a target that is IGNORE_INDEX is not scored."""

    windows: int
    context_length: int

    def batch(self, sample_indices: Sequence[int], /) -> Batch:
        """Return the windows with these numbers."""


@dataclass(frozen=True)
class LossTotals:
    """Sums over scored tokens: cross entropy in nats, tokens, and UTF-8 bytes they stand for.

    `nats_T` and `tokens_T` are the same sums for each position in the context, if kept: in the
    window, or in the document where documents are isolated.
    """

    nats: float
    tokens: int
    bytes: int
    nats_T: tuple[float, ...] = ()
    tokens_T: tuple[int, ...] = ()

    @property
    def loss(self) -> float:
        """Mean cross entropy in nats per token."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """exp(loss) per token; infinite where that overflows."""
        return perplexity(self.nats, self.tokens)

    @property
    def bits_per_byte(self) -> float:
        """Bits of cross entropy per byte, comparable between tokenizers; NaN without bytes."""
        return self.nats / math.log(2) / self.bytes if self.bytes else math.nan

    def by_position(self) -> list[dict[str, float]]:
        """Return the loss at positions 0, 1, 2–3, 4–7, …: {first, last, tokens, loss} each.

        A mechanism that uses its context has a loss that falls along it. Position t predicts from
        t + 1 tokens.
        """
        stretches = []
        first, last = 0, 0
        while first < len(self.nats_T):
            last = min(last, len(self.nats_T) - 1)
            here = slice(first, last + 1)
            tokens = sum(self.tokens_T[here])
            if tokens:
                loss = sum(self.nats_T[here]) / tokens
                stretches.append({"first": first, "last": last, "tokens": tokens, "loss": loss})
            first, last = last + 1, max(1, 2 * last + 1)
        return stretches


def perplexity(nats: float, units: int) -> float:
    """Return exp(nats / units): infinite where that overflows, NaN without units."""
    if units == 0:
        return math.nan
    return math.inf if nats / units > 700 else math.exp(nats / units)


def validation_windows(loader: WindowLoader, tokens: int, context_length: int) -> int:
    """Return how many windows validation on at most `tokens` tokens takes: one at least."""
    return min(max(1, tokens // context_length), loader.windows)


@torch.no_grad()
def score(
    objective: nn.Module,
    loader: Windows,
    *,
    windows: int,
    batch_samples: int,
    byte_lengths: np.ndarray,
    progress: Callable[[int], None] | None = None,
    observe: Callable[[Sequence[int], Batch, slice, Tensor], None] | None = None,
) -> LossTotals:
    """Return the totals of windows 0 … `windows` - 1, the same on every rank.

    `byte_lengths[id]` is the UTF-8 length of a token. Of N data-parallel ranks, r takes windows r,
    r + N, … (the ranks of a context-parallel group their stretches of them), and every rank runs
    the same number of forward passes: one that has run out repeats window 0 with no target, because
    sharded weights are gathered by all ranks together. Sums are fp64, so neither `batch_samples`
    nor the world size matters beyond rounding. `progress` is called with the number of windows just
    scored, over all ranks; `observe` with the windows this rank has just scored, their whole batch,
    its stretch of it, and the nats_BT of that stretch.

    Raises DataError if the loader has fewer windows, or none is asked for.
    """
    if not 0 < windows <= loader.windows:
        raise DataError(f"cannot score {windows} windows: there are {loader.windows}")
    parameter = next(objective.parameters(), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    bytes_of_id = torch.from_numpy(np.asarray(byte_lengths, dtype=np.int64))
    # bytes, then nats and tokens by position; counts are exact in fp64 up to 2^53
    length = loader.context_length
    byte_count = torch.zeros(1, dtype=torch.float64)
    nats_T, tokens_T = (torch.zeros(length, dtype=torch.float64) for _ in range(2))
    own, groups = distributed.own_stretch(length), distributed.data_world_size()
    stride = groups * batch_samples
    was_training = objective.training
    objective.eval()
    try:
        for start in range(0, windows, stride):
            stop = min(start + stride, windows)
            mine = list(range(start + distributed.data_rank(), stop, groups))
            whole = loader.batch(mine or [0])
            batch = whole.stretch(own)
            targets_BT = batch.targets_BT
            if not mine:
                targets_BT = torch.full_like(targets_BT, IGNORE_INDEX)
            inputs = (batch.ids_BT, targets_BT, batch.document_ids_BT, batch.position_ids_BT)
            nats_BT = objective(*(None if part is None else part.to(device) for part in inputs))
            nats_BT = nats_BT.double().cpu()
            scored_BT = targets_BT != IGNORE_INDEX
            position_BT = batch.position_ids_BT
            if position_BT is None:
                position_BT = torch.arange(length)[own].expand_as(targets_BT)
            nats_T.index_add_(0, position_BT.flatten(), nats_BT.flatten())
            tokens_T.index_add_(0, position_BT.flatten(), scored_BT.flatten().double())
            byte_count += bytes_of_id[targets_BT[scored_BT]].sum()
            if observe is not None and mine:
                observe(mine, whole, own, nats_BT)
            if progress is not None:
                progress(stop - start)
    finally:
        objective.train(was_training)
    totals = distributed.sum_over_ranks(torch.cat([byte_count, nats_T, tokens_T]))
    byte_count, nats_T, tokens_T = totals.split([1, length, length])
    return LossTotals(
        nats=nats_T.sum().item(),
        tokens=int(tokens_T.sum()),
        bytes=int(byte_count),
        nats_T=tuple(nats_T.tolist()),
        tokens_T=tuple(int(count) for count in tokens_T.tolist()),
    )
