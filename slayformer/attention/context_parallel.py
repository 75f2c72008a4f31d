"""One sequence over many ranks: linear attention hands its state on, and stays exact.

Rank r of a group holds the r-th stretch of every sequence. What its queries need of the stretches
before is the state Σ φ(k) [v, 1]ᵀ of their keys and, with near pairs, the last W keys themselves.
Each rank adds up the keys of its own stretch, all ranks exchange these sums, and each takes the
sum over the ranks before it; gradients take the way back.

Shape suffixes: R ranks, B batch, H heads, T own positions, W remembered keys, D width of q and k,
E width of v, M features, N = E + 1.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from slayformer.attention.base import (
    Attention,
    Place,
    accumulation_dtype,
    token_positions,
    without_autocast,
)
from slayformer.attention.linear import LinearAttention
from slayformer.attention.linear_state import LinearState, RecentKeys
from slayformer.config import ModelConfig
from slayformer.errors import ConfigError
from slayformer.model.short_convolution import ConvolutionState, ShortConvolution
from slayformer.registry import build_attention

FIELD = "engine.context_parallel"


@dataclass(frozen=True)
class Stretch:
    """The part of a sequence that this rank holds: tokens `start` … `start + length` − 1 of T.

    `documents_BS` and `positions_BS` are of the whole sequence: document ids (zeros where none
    were given) and each token's position in its document.
    """

    group: Any
    start: int
    length: int
    # the index after the last token of every rank's stretch
    stops: tuple[int, ...]
    documents_BS: Tensor
    positions_BS: Tensor

    @property
    def stop(self) -> int:
        """The index after the last own token."""
        return self.start + self.length

    @property
    def own(self) -> slice:
        """The own tokens in the sequence."""
        return slice(self.start, self.stop)

    def document(self, index: int) -> Tensor:
        """Return the document ids [B] at `index`; −1 before the sequence."""
        if index < 0:
            return torch.full_like(self.documents_BS[:, 0], -1)
        return self.documents_BS[:, index]


def check_context_parallel(model: ModelConfig, options: Any, ranks: int) -> None:
    """Raise ConfigError unless `ranks` can share the context of `model`, attention by `options`."""
    if ranks == 1:
        return
    length = model.context_length
    if ranks > length:
        hint = f"each needs a token of model.context_length={length}; use at most {length}"
        raise ConfigError(FIELD, ranks, hint)
    with torch.device("meta"):
        attention = build_attention(
            options,
            num_heads=model.heads,
            head_dim=model.width // model.heads,
            max_sequence_length=length,
            seed=0,
        )
    shortest = length // ranks
    _check_long_enough(shortest, _linear(attention, ranks).local_size, NEAR_PAIRS, ranks)
    _check_long_enough(shortest, model.short_convolution - 1, CONVOLUTION, ranks)


def _linear(attention: Attention, ranks: int) -> LinearAttention:
    """Return `attention` if it is linear; raises ConfigError with the reason it must be."""
    if isinstance(attention, LinearAttention):
        return attention
    hint = (
        f"{attention.config.name} compares all pairs of tokens and has no state to hand on; use a "
        f"linear mechanism, such as attention=slay_best, or {FIELD}=1"
    )
    raise ConfigError(FIELD, ranks, hint)


# what reaches back over a cut, as a user knows it
NEAR_PAIRS, CONVOLUTION = "its near pairs", "model.short_convolution"


def _check_long_enough(length: int, reach: int, who: str, ranks: int) -> None:
    """Raise ConfigError for a stretch shorter than what reaches back into the one before."""
    if length >= reach:
        return
    hint = (
        f"leaves a device {length} tokens, fewer than the {reach} that {who} reach back; use a "
        f"smaller number or a longer context"
    )
    raise ConfigError(FIELD, ranks, hint)


def make_stretch(
    group: Any,
    batch_size: int,
    length: int,
    document_ids_BT: Tensor | None,
    device: torch.device | str,
) -> Stretch:
    """Return this rank's stretch of `length` tokens; every rank of `group` calls it."""
    lengths = [0] * dist.get_world_size(group)
    dist.all_gather_object(lengths, length, group=group)
    if document_ids_BT is None:
        documents_BS = torch.zeros(batch_size, sum(lengths), dtype=torch.long, device=device)
    else:
        # stretches may differ by a few tokens: gather them padded to the longest
        padded = torch.nn.functional.pad(document_ids_BT.long(), (0, max(lengths) - length))
        gathered = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(gathered, padded.contiguous(), group=group)
        pieces = [one[:, :size] for one, size in zip(gathered, lengths, strict=True)]
        documents_BS = torch.cat(pieces, dim=1)
    positions_BS = token_positions(
        torch.ones_like(documents_BS, dtype=torch.bool),
        documents_BS,
        Place.start(batch_size, device),
    )
    start = sum(lengths[: dist.get_rank(group)])
    stops = tuple(itertools.accumulate(lengths))
    return Stretch(group, start, length, stops, documents_BS, positions_BS)


def attend(
    attention: Attention, q_BHTD: Tensor, k_BHTD: Tensor, v_BHTE: Tensor, stretch: Stretch
) -> Tensor:
    """Return this rank's stretch of causal `attention` over the whole sequence, [B, H, T, E].

    Equal to one rank's result up to rounding, gradients of all inputs and parameters too (those of
    the parameters add up over the ranks). Every rank of the group calls it, forward and backward.
    Raises ConfigError for a mechanism without a state, and for a stretch shorter than the keys that
    near pairs reach back.
    """
    ranks = len(stretch.stops)
    attention = _linear(attention, ranks)
    reach = attention.local_size
    _check_long_enough(stretch.length, reach, NEAR_PAIRS, ranks)
    recent = _recent_keys(attention, k_BHTD, v_BHTE, stretch)
    own_BHMN = _sum_of_keys(attention, recent, k_BHTD, v_BHTE, stretch)
    memory_BHMN = _sum_of_earlier(own_BHMN, stretch, reach)
    state = LinearState(
        memory_BHMN=memory_BHMN,
        memory_document_B=stretch.document(stretch.start - reach - 1),
        place=Place(
            stretch.document(stretch.start - 1),
            torch.zeros_like(stretch.documents_BS[:, 0])
            if stretch.start == 0
            else stretch.positions_BS[:, stretch.start - 1] + 1,
        ),
        recent=recent,
    )
    documents_BT = stretch.documents_BS[:, stretch.own]
    y_BHTE, _ = attention(q_BHTD, k_BHTD, v_BHTE, document_ids=documents_BT, state=state)
    return y_BHTE


def convolve(convolution: ShortConvolution, x_BTC: Tensor, stretch: Stretch) -> Tensor:
    """Return this rank's stretch of a short convolution over the whole sequence, [B, T, C].

    Raises ConfigError for a stretch shorter than the inputs that it reaches back.
    """
    reach, start = convolution.width - 1, stretch.start
    _check_long_enough(stretch.length, reach, CONVOLUTION, len(stretch.stops))
    before = convolution.init_state(x_BTC.shape[0], x_BTC.device)
    ends_BKC = _end_of_stretch_before(x_BTC[:, stretch.length - reach :], stretch)
    documents_BK = before.documents_BK
    if start > 0:
        documents_BK = stretch.documents_BS[:, start - reach : start]
    state = ConvolutionState(ends_BKC, documents_BK)
    y_BTC, _ = convolution(x_BTC, None, stretch.documents_BS[:, stretch.own], state)
    return y_BTC


def _recent_keys(
    attention: LinearAttention, k_BHTD: Tensor, v_BHTE: Tensor, stretch: Stretch
) -> RecentKeys:
    """Return the last W keys before this stretch: the end of the stretch before."""
    reach, start = attention.local_size, stretch.start
    width = k_BHTD.shape[-1]
    ends = torch.cat([k_BHTD, v_BHTE], dim=-1)[:, :, stretch.length - reach :]
    end_BHWF = _end_of_stretch_before(ends, stretch) if reach else ends
    span = slice(max(start - reach, 0), start)
    batch_size = k_BHTD.shape[0]
    slots = torch.zeros(batch_size, reach, dtype=torch.long, device=k_BHTD.device)
    there = start > 0
    return RecentKeys(
        k_BHWD=end_BHWF[..., :width],
        v_BHWE=end_BHWF[..., width:],
        mask_BW=torch.full_like(slots, there, dtype=torch.bool),
        document_BW=stretch.documents_BS[:, span] if there else slots - 1,
        position_BW=stretch.positions_BS[:, span] if there else slots,
    )


def _sum_of_keys(
    attention: LinearAttention,
    recent: RecentKeys,
    k_BHTD: Tensor,
    v_BHTE: Tensor,
    stretch: Stretch,
) -> Tensor:
    """Return Σ φ(k) [v, 1]ᵀ over the keys that enter the state in this stretch, [B, H, M, N].

    These are W keys earlier than the stretch itself, and of them those of the last one's document.
    """
    reach, dtype = attention.local_size, accumulation_dtype(k_BHTD.dtype)
    last_B1 = stretch.document(stretch.stop - reach - 1)[:, None]
    documents_BT, positions_BT = (
        x[:, stretch.own] for x in (stretch.documents_BS, stretch.positions_BS)
    )
    pieces = []
    if reach:
        counts_BW = recent.mask_BW & (recent.document_BW == last_B1)
        pieces.append((recent.k_BHWD, recent.v_BHWE, recent.position_BW, counts_BW))
    entering = stretch.length - reach
    for start in range(0, entering, attention.chunk):
        span = slice(start, min(start + attention.chunk, entering))
        k, v = k_BHTD[:, :, span], v_BHTE[:, :, span]
        pieces.append((k, v, positions_BT[:, span], documents_BT[:, span] == last_B1))

    def summed(k: Tensor, v: Tensor, positions: Tensor, counts: Tensor, *tensors: Tensor) -> Tensor:
        features = attention.feature_map(k.to(dtype), *tensors, is_query=False, positions=positions)
        phi, values = features.expand() * counts[:, None, :, None], v.to(dtype)
        return phi.mT @ torch.cat([values, torch.ones_like(values[..., :1])], dim=-1)

    with without_autocast(k_BHTD.device.type):
        tensors = attention.feature_tensors(dtype)
        # the features of one chunk at a time: they are what is large
        first, *others = pieces
        total = checkpoint(summed, *first, *tensors, use_reentrant=False)
        for piece in others:
            total = total + checkpoint(summed, *piece, *tensors, use_reentrant=False)
    return total


def _sum_of_earlier(own_BHMN: Tensor, stretch: Stretch, reach: int) -> Tensor:
    """Return the sum of the ranks' states before this one, as far as the document goes on."""
    at_start = stretch.document(stretch.start - reach - 1)
    # a rank's sum is of the document that its last entering key belongs to
    same = [
        (stretch.document(stop - reach - 1) == at_start).to(own_BHMN.dtype)
        for stop in stretch.stops
    ]
    rank = dist.get_rank(stretch.group)
    weights = [one if r < rank else torch.zeros_like(one) for r, one in enumerate(same)]
    return _weighted(own_BHMN, [one[:, None, None, None] for one in weights], stretch.group)


def _end_of_stretch_before(end: Tensor, stretch: Stretch) -> Tensor:
    """Return the `end` that the rank before this one gave; zeros on the first."""
    rank = dist.get_rank(stretch.group)
    before = [float(r == rank - 1) for r in range(len(stretch.stops))]
    return _weighted(end, before, stretch.group)


def _weighted(x: Tensor, weights: Sequence[Tensor | float], group: Any) -> Tensor:
    """Return Σ_r weight_r x_r over the ranks' x; a rank with no weight takes part all the same."""
    everyone = _Gathered.apply(x, group)
    total = everyone[0] * weights[0]
    for one, weight in zip(everyone[1:], weights[1:], strict=True):
        total = total + one * weight
    return total


class _Gathered(torch.autograd.Function):
    """Every rank's tensor, [R, …]; a rank's gradient is the sum of what all ranks made of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        world = dist.get_world_size(group)
        gathered = [
            torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(world)
        ]
        dist.all_gather(gathered, x.contiguous(), group=group)
        return torch.stack(gathered)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.contiguous()
        dist.all_reduce(total, group=ctx.group)
        return total[dist.get_rank(ctx.group)], None
