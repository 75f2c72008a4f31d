"""The kernels of one pass, forward or backward: which run, on what, in which order.

Shape suffixes: B batch, H heads, T queries, S = lag + T keys, C chunks, D width of near vectors,
E width of v, F columns of factors, M features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from slayformer.attention.backends import triton_start
from slayformer.attention.backends.cpu import NotCovered
from slayformer.attention.backends.triton_carry import Carrier
from slayformer.attention.backends.triton_layout import tables_of
from slayformer.attention.backends.triton_math import (
    EXPONENTIAL,
    FP32,
    NO_KERNEL,
    SAME_STRETCH,
    YAT,
)
from slayformer.attention.backends.triton_outputs import chunk_outputs
from slayformer.attention.backends.triton_pairs import pairs_backward
from slayformer.attention.backends.triton_sides import Sides
from slayformer.attention.backends.triton_start import Blocks, block_of, strides_of
from slayformer.attention.backends.triton_states import states_backward
from slayformer.attention.walk import Walk

# queries of a chunk where a state carries the past: the states around all chunks are written and
# read, and a longer chunk has fewer of them
CHUNK = 128
# up to here a sequence is one chunk, which needs no state
ONE_CHUNK = 256
NEAR_KERNELS = {"none": NO_KERNEL.value, "yat": YAT.value, "exponential": EXPONENTIAL.value}


@dataclass(frozen=True)
class Call:
    """What both passes need beside tensors with gradients."""

    walk: Walk
    # gives the sides of (q, k, *tensors), differentiably; raises NotCovered
    sides: Callable[..., Sides]
    # of the normaliser; None: both sums are wanted, not their quotient
    offset_H: Tensor | None


class Pass:
    """One pass forward or backward over one call's tensors."""

    def __init__(
        self, call: Call, sides: Sides, v: Tensor, memory: Tensor, dtype: torch.dtype
    ) -> None:
        """Raises NotCovered for a sequence that is too long."""
        walk = call.walk
        self.call, self.walk, self.sides, self.v, self.memory = call, walk, sides, v, memory
        self.batch, self.heads, self.total, self.width = v.shape
        self.length, self.features = walk.length, memory.shape[2]
        self._check_length()
        self.tables = tables_of(sides.layout, v.device)
        self.form = triton_start.form_of(dtype)
        self.chunk = self._chunk()
        self.chunks = max(1, triton.cdiv(self.length, self.chunk))
        self.blocks = Blocks.choose(
            form=self.form,
            architecture=triton_start.architecture_of(v.device),
            length=self.length,
            width=self.width,
            has_near=sides.near_query is not None,
        )
        self.has_state = walk.has_past or walk.has_future or self.chunks > 1
        self._mask()
        self.carrier = Carrier(
            tables=self.tables,
            blocks=self.blocks,
            form=self.form,
            features=self.features,
            length=self.length,
            chunk=self.chunk,
            chunks=self.chunks,
            keeps_BC=self.keeps,
        )

    def _check_length(self) -> None:
        """Raise NotCovered where places in a head's sequence take more than 32 bits."""
        sides = self.sides
        rows = (self.v, sides.query, sides.key, sides.near_query, sides.near_key)
        # of the output, whose heads lie side by side
        steps = [self.heads * self.width, *(x.stride(2) for x in rows if x is not None)]
        if self.total * max(steps) >= 2**31:
            raise NotCovered(f"sequences as long as {self.length:,} tokens")

    def _chunk(self) -> int:
        walk, length = self.walk, max(1, self.walk.length)
        if not (walk.has_past or walk.has_future) and length <= ONE_CHUNK:
            return length
        chunk = CHUNK
        if walk.near is not None and walk.lag == 0:
            # near pairs never meet through the state
            chunk = walk.local_size * max(1, CHUNK // walk.local_size)
        return min(chunk, length)

    def _mask(self) -> None:
        """Set which queries read the state, which keys enter it, and where it goes on."""
        keys, walk = self.walk.keys, self.walk
        self.reads = self.enters = self.keeps = None
        self.key_mask = None if keys.mask_BS is None else keys.mask_BS.to(torch.int8).contiguous()
        if self.key_mask is not None:
            self.enters = self.key_mask[:, : self.length]
        if walk.documents_BT is None or keys.documents_BS is None:
            if self.enters is not None:
                self.enters = self.enters.contiguous()
                self.keeps = self.enters.new_ones(self.batch, self.chunks)
            return
        # the state holds one document: that of the last key which has entered it
        starts = torch.arange(self.chunks, device=self.v.device) * self.chunk
        stops = (starts + self.chunk).clamp_max(self.length)
        last_BC = keys.documents_BS[:, stops - 1]
        before_BC = torch.cat([walk.first_document_B[:, None], last_BC[:, :-1]], dim=1)
        chunk_T = torch.arange(self.length, device=self.v.device) // self.chunk
        enters = keys.documents_BS[:, : self.length] == last_BC[:, chunk_T]
        self.reads = (walk.documents_BT == before_BC[:, chunk_T]).to(torch.int8)
        self.enters = enters.to(torch.int8) * (1 if self.enters is None else self.enters)
        self.keeps = (before_BC == last_BC).to(torch.int8)

    def _sizes(self) -> dict[str, int]:
        return {"H": self.heads, "E": self.width, "F": self.tables.width, "FORM": self.form}

    def _tiles(self, block_t: int) -> int:
        """Return how many blocks of tokens a chunk is cut into."""
        return triton.cdiv(self.chunk, block_t)

    def places(self, block_t: int) -> dict[str, Any]:
        """Return where tokens are, as the kernels of pairs take it."""
        walk, keys = self.walk, self.walk.keys
        documents: dict[str, Any] = {"query_documents": self.v, "key_documents": self.v}
        if walk.documents_BT is not None and keys.documents_BS is not None:
            documents = {
                "query_documents": walk.documents_BT.contiguous(),
                "key_documents": keys.documents_BS.contiguous(),
            }
        return {
            **documents,
            "key_mask": self.v if self.key_mask is None else self.key_mask,
            "query_positions": walk.positions_BT.int().contiguous(),
            "key_positions": keys.positions_BS.int().contiguous(),
            "length": self.length,
            "chunk": self.chunk,
            "tiles": self._tiles(block_t),
            "lag": walk.lag,
            "strict": int(walk.strict),
            "near_size": max(1, walk.local_size),
            "squares": self.tables.squares,
        }

    def pairs(self, block_t: int) -> dict[str, Any]:
        """Return the constants of the kernels of pairs."""
        near = self.sides.near_query
        kind = NEAR_KERNELS[self.sides.near]
        width = 1 if near is None else near.shape[-1]
        # q and k lose nothing as they are, computed vectors might
        near_form = self.form if self.sides.normalises else FP32.value
        return {
            **self._sizes(),
            "D": width,
            "HAS_SQUARES": self.tables.squares > 0,
            "HAS_LINEAR": self.tables.has_linear,
            "HAS_FACTOR": self.tables.has_factor,
            "NEAR": kind,
            "RULE": SAME_STRETCH.value if self.walk.local == "chunk" else 0,
            "NORMALISE": self.sides.normalises,
            "BT": block_t,
            "BE": block_of(self.width),
            "BF": self.tables.block,
            "BD": block_of(width),
            "HAS_MASK": self.key_mask is not None,
            "HAS_DOCUMENTS": self.reads is not None,
            "NEAR_FORM": near_form,
        }

    def near(self, query: str, key: str) -> dict[str, Any]:
        """Return the near kernel's tensors, those of queries and keys under these names."""
        sides = self.sides
        if sides.near_query is None or sides.near_key is None:
            none = dict.fromkeys([query, key, "epsilon", "near_scale"], self.v)
            strides = {
                f"{n}_{axis}": 0 for n in (query, key) for axis in ("batch", "head", "token")
            }
            return {**none, **strides}
        numbers = {"epsilon": sides.epsilon, "near_scale": sides.near_scale}
        return {
            query: sides.near_query,
            key: sides.near_key,
            **{name: self.v if x is None else x for name, x in numbers.items()},
            **strides_of(sides.near_query, query),
            **strides_of(sides.near_key, key),
        }

    def states_of_keys(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the states in front of every chunk, and after the last."""
        before = self.memory.contiguous() if self.walk.has_past else None
        return self.carrier.carry(self.sides.key, self.v, None, self.enters, before, False)

    def forward(self, output: Tensor, rest: Tensor | None, normaliser: Tensor) -> Tensor:
        """Fill in what is given; return the state after the last token."""
        around = sums_around = self.v
        after = self.memory
        if self.has_state:
            around, sums_around, after = self.states_of_keys()
        offset = self.call.offset_H
        arguments = {
            "x_query": self.sides.query,
            "x_key": self.sides.key,
            "value": self.v,
            **self.near("near_query", "near_key"),
            "offset": self.v if offset is None else offset,
            "around": around,
            "sums_around": sums_around,
            "output": output,
            "rest": output if rest is None else rest,
            "normaliser": normaliser,
            "groups": self.tables.groups,
            "table": self.tables.columns,
            "scale": self.tables.scale,
            "reads": self.v if self.reads is None else self.reads,
            **strides_of(self.v, "value"),
            **strides_of(output, "output"),
            "normaliser_head": normaliser.stride(1),
            "normaliser_token": normaliser.stride(2),
            **self.places(self.blocks.tokens),
            "chunks": self.chunks,
        }
        constants = {
            **self.pairs(self.blocks.tokens),
            "M": self.features,
            "TERMS": self.tables.terms,
            "BO": self.blocks.others,
            "BM": self.blocks.features,
            "HAS_STATE": self.has_state,
            "IS_QUOTIENT": offset is not None,
            "HAS_REST": rest is not None,
        }
        grid = (self.chunks * self._tiles(self.blocks.tokens), self.batch * self.heads)
        triton_start.launch(chunk_outputs, grid, arguments, constants, self.blocks.warps)
        return after

    def backward(
        self, d_sums: Tensor, d_norm: Tensor, d_after: Tensor
    ) -> tuple[tuple[Tensor, ...], Tensor, Tensor | None]:
        """Return the gradients of the sides (fp32), of v [B, H, S, E], and of the state before.

        d_sums [B, H, T, E] and d_norm [B, H, T] are dN and dZ.
        """
        query, of_query, d_near, d_value = self._pairs_backward(d_sums, d_norm, False)
        key, of_key, _, d_value = self._pairs_backward(d_sums, d_norm, True)
        d_memory = None
        if self.has_state:
            around, sums_around, _ = self.states_of_keys()
            self._states_backward(d_sums, d_norm, around, sums_around, query, d_value, False)
            later = d_after.contiguous() if self.walk.has_future else None
            around, sums_around, d_memory = self.carrier.carry(
                self.sides.query, d_sums, d_norm, self.reads, later, True
            )
            self._states_backward(self.v, d_norm, around, sums_around, key, d_value, True)
        return (
            (query, key, of_query, of_key, *d_near),
            d_value,
            d_memory if self.walk.has_past else None,
        )

    def _pairs_backward(
        self, d_sums: Tensor, d_norm: Tensor, is_key: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the pairs' share: d factors, d near vectors, dε and d scale [2, H], keys' dv."""
        sides, b, h = self.sides, self.batch, self.heads
        own = self.total if is_key else self.length
        tiles = max(1, triton.cdiv(own, self.chunk)) * self._tiles(self.blocks.backward_tokens)
        fp32: dict[str, Any] = {"dtype": torch.float32, "device": self.v.device}
        near_width = 1 if sides.near_query is None else sides.near_query.shape[-1]
        d_x = torch.empty(b, h, own, self.tables.width, **fp32)
        d_near = torch.empty(b, h, own if sides.near_query is not None else 0, near_width, **fp32)
        d_value = torch.empty(b, h, own if is_key else 0, self.width, **fp32)
        d_numbers = torch.zeros(2, b, h, tiles, **fp32)
        x, y, a, other_a = sides.query, sides.key, d_sums, self.v
        names = ("near_x", "near_y")
        if is_key:
            x, y, a, other_a = y, x, other_a, a
            names = ("near_y", "near_x")
        arguments = {
            "x": x,
            "y": y,
            "a": a,
            "weight": d_norm,
            "other_a": other_a,
            **self.near(*names),
            "d_x": d_x,
            "d_near": d_near,
            "d_value": d_value,
            "d_epsilon": d_numbers[0],
            "d_near_scale": d_numbers[1],
            "groups": self.tables.groups,
            **strides_of(a, "a"),
            **strides_of(other_a, "other_a"),
            **self.places(self.blocks.backward_tokens),
        }
        grid = (tiles, b * h, triton.cdiv(self.tables.width, self.tables.block))
        constants = {
            **self.pairs(self.blocks.backward_tokens),
            "BO": self.blocks.backward_others,
            "IS_KEY": is_key,
        }
        triton_start.launch(pairs_backward, grid, arguments, constants, self.blocks.backward_warps)
        return d_x, d_near, d_numbers.sum(dim=(1, 3)), d_value

    def _states_backward(
        self,
        a: Tensor,
        d_norm: Tensor,
        around: Tensor,
        sums_around: Tensor,
        d_x: Tensor,
        d_value: Tensor,
        is_key: bool,
    ) -> None:
        """Add the states' share to d_x and, for keys, to d_value."""
        meets = self.enters if is_key else self.reads
        x = self.sides.key if is_key else self.sides.query
        arguments = {
            "x": x,
            "a": a,
            "weight": d_norm,
            "meets": x if meets is None else meets,
            "around": around,
            "sums_around": sums_around,
            "d_x": d_x,
            "d_value": d_value,
            "table": self.tables.columns,
            "scale": self.tables.scale,
            **strides_of(a, "a"),
            "x_length": x.shape[2],
            "length": self.length,
            "chunk": self.chunk,
            "chunks": self.chunks,
            "tiles": self._tiles(self.blocks.backward_tokens),
        }
        constants = {
            **self._sizes(),
            "M": self.features,
            "TERMS": self.tables.terms,
            "BT": self.blocks.backward_tokens,
            "BM": self.blocks.backward_features,
            "BE": block_of(self.width),
            "BF": self.tables.block,
            "IS_KEY": is_key,
            "HAS_MASKS": meets is not None,
        }
        grid = (self.chunks * self._tiles(self.blocks.backward_tokens), self.batch * self.heads)
        triton_start.launch(states_backward, grid, arguments, constants, 8)
