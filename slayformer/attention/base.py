"""The contract every attention mechanism keeps.

Shape suffixes: B batch, H heads, T query positions, S key positions, D head width of q and k,
E head width of v.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from slayformer.config import AttentionConfig


class Attention(nn.Module):
    """One head-wise mechanism: heads in, heads out.

    Projections, residuals and dropout belong to the block, so weights can be shared between
    mechanisms. Everything random is drawn in the constructor from `seed` alone, the same on every
    rank, and kept as persistent fp32 buffers.
    """

    # whether no weight can be negative
    positive: bool = True
    # what `attention.backend` can be
    backends: tuple[str, ...] = ("auto", "torch")
    # a comparison's control rather than a mechanism of its own
    control: bool = False
    # whether positions beyond max_sequence_length cannot be computed
    bounded_length: bool = False

    def __init__(
        self, config: Any, *, num_heads: int, head_dim: int, max_sequence_length: int, seed: int
    ) -> None:
        super().__init__()
        assert isinstance(config, AttentionConfig)
        config.check()
        self.config: Any = config
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.max_sequence_length = max_sequence_length
        self.seed = seed

    def forward(
        self,
        q_BHTD: Tensor,
        k_BHTD: Tensor,
        v_BHTE: Tensor,
        *,
        causal: bool = True,
        mask: Tensor | None = None,
        document_ids: Tensor | None = None,
        state: Any = None,
    ) -> tuple[Tensor, Any]:
        """Return (y_BHTE in the dtype of v, the new state or None if `state` is None).

        `mask` [B, T] bool: True where a token is real; padding is neither seen nor counted.
        `document_ids` [B, T] int of any width: tokens see only their own document; ids never fall
        along T.
        `state`: what came before these tokens, from `init_state` or an earlier call; causal only.
        """
        raise NotImplementedError

    def init_state(self, batch_size: int, device: torch.device | str = "cpu") -> Any:
        """Return the state before the first token."""
        raise NotImplementedError

    def flops_per_token(self, sequence_length: int) -> int:
        """Return the multiply-adds ×2 of one token's forward pass, mean over a causal sequence."""
        raise NotImplementedError

    def state_bytes(self, sequence_length: int) -> int:
        """Return the bytes one sequence's state takes after `sequence_length` tokens, fp32."""
        raise NotImplementedError


@dataclass(frozen=True)
class Place:
    """How far a sequence has come: the current document and its real tokens.

    Tokens without ids are of document 0.
    """

    document_B: Tensor
    position_B: Tensor

    @staticmethod
    def start(batch_size: int, device: torch.device | str) -> Place:
        """Return the place before the first token."""
        zero = torch.zeros(batch_size, dtype=torch.long, device=device)
        return Place(zero, zero)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for features, states and normalisers: fp64 stays, all else is fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def is_recording() -> bool:
    """Return whether a CUDA graph is being recorded: no number of the GPU can be read then."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Return a context without autocast, which costs nothing where there is none anyway."""
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def mechanism_parameter(value: Tensor, learning_rate_scale: float) -> nn.Parameter:
    """Return a parameter of a mechanism: never decayed, its learning rate scaled.

    `training.optimizer` reads both from the parameter's attributes.
    """
    parameter = nn.Parameter(value)
    parameter.no_weight_decay = True  # type: ignore[attr-defined]
    parameter.learning_rate_scale = learning_rate_scale  # type: ignore[attr-defined]
    return parameter


# for maps and directions, and for the few numbers a head has of a kind
MAP_LEARNING_RATE = 2.0
SCALAR_LEARNING_RATE = 5.0


def log_spread(first: float, last: float | None, heads: int) -> Tensor:
    """Return logs of numbers from `first` to `last` in equal ratios, [H, 1, 1].

    `last` None stands for `first`.
    """
    end = first if last is None else last
    return torch.linspace(math.log(first), math.log(end), heads)[:, None, None]


def generator(seed: int) -> torch.Generator:
    """Return a CPU generator: the same draws on every rank and device."""
    return torch.Generator(device="cpu").manual_seed(seed)


def real_document_ids(
    mask: Tensor | None, document_ids: Tensor | None, before_B: Tensor | None = None
) -> Tensor | None:
    """Return `document_ids` as int64, padding with the id of the real token before it.

    Where there is none, padding gets that of `before_B`, the document that these tokens follow
    (None: -1).
    """
    if document_ids is None:
        return None
    # compiled code reads them as such
    document_ids = document_ids.long()
    if mask is None:
        return document_ids
    index = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
    last_real = torch.where(mask, index, -1).cummax(dim=1).values
    filled = document_ids.gather(1, last_real.clamp_min(0))
    none = -1 if before_B is None else before_B[:, None]
    return torch.where(last_real < 0, none, filled)


def following_positions(length: int, place: Place) -> Tensor:
    """Return the positions of `length` real tokens that go on with the document, [B, T]."""
    return place.position_B[:, None] + torch.arange(length, device=place.position_B.device)


def token_positions(mask_BT: Tensor, documents_BT: Tensor | None, place: Place) -> Tensor:
    """Return each token's position in its document, [B, T] from 0, padding not counted.

    Padding has the position of the real token before it, −1 before the first. `place` says where
    the tokens before these ended.
    """
    real = mask_BT.long()
    seen = real.cumsum(dim=1)
    offset = -place.position_B[:, None].expand_as(seen)
    if documents_BT is not None:
        before = torch.cat([place.document_B[:, None], documents_BT[:, :-1]], dim=1)
        starts = documents_BT != before
        lowest = torch.iinfo(torch.long).min
        start_seen = torch.where(starts, seen - real, lowest).cummax(dim=1).values
        offset = torch.maximum(offset, start_seen)
    return seen - 1 - offset


def place_after(place: Place, positions_BT: Tensor, documents_BT: Tensor | None) -> Place:
    """Return the place after tokens at `positions_BT` of `documents_BT`."""
    document_B = place.document_B if documents_BT is None else documents_BT[:, -1]
    return Place(document_B, positions_BT[:, -1] + 1)
