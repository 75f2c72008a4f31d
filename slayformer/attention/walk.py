"""The walk of linear attention over a sequence: scores inside a chunk, a state for the rest.

Keys enter the state with a lag of W positions. With W = 0 a chunk's queries meet the chunk's own
keys one by one and all earlier keys through the state. With W > 0 they also meet the last W
earlier keys one by one, so that an exact kernel can replace the features for near pairs; the W
keys not yet in the state are part of what a mechanism remembers.

The backward pass keeps q, k and v only and walks twice: forward in time to rebuild the states
(for q), backward in time carrying the states' gradients (for k and v). Nothing of size T × M is
ever held.

Shape suffixes: B batch, H heads, T positions, C queries of a chunk, S = C + W keys of a chunk,
D width of q and k, E width of v, M features, N = E + 1 (a column of ones beside v sums the
normaliser).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from slayformer.attention.base import without_autocast
from slayformer.attention.features import Features
from slayformer.attention.near import NearKernel
from slayformer.attention.projection import Projection


@dataclass(frozen=True)
class Keys:
    """What is known of each key besides its vectors; with a lag, the W earlier keys come first.

    They do so whether they exist or not: those that do not are masked out.
    """

    positions_BS: Tensor
    mask_BS: Tensor | None
    documents_BS: Tensor | None

    def after(self, first: int) -> Keys:
        """Return what is known of the keys but the first ones."""
        mask, documents = (
            None if x is None else x[:, first:] for x in (self.mask_BS, self.documents_BS)
        )
        return Keys(self.positions_BS[:, first:], mask, documents)


@dataclass(frozen=True)
class Walk:
    """What a walk needs besides q, k, v and the state; no gradients flow here.

    `feature_map(x, *tensors, is_query, positions)` gives features of both sides. `near(q, k,
    *tensors)` gives the exact kernel for pairs that `is_near(query positions, key positions)`
    picks, or without `is_near` for every pair inside a chunk. `projection(*tensors)` is both in
    the form that compiled code on the CPU computes by itself, if they have it.
    """

    feature_map: Callable[..., Features]
    projection: Callable[..., Projection | None]
    near: Callable[..., NearKernel] | None
    is_near: Callable[[Tensor, Tensor], Tensor] | None
    # the rule behind `is_near` as LinearAttention names it, for engines that apply it themselves
    local: str
    local_size: int
    positions_BT: Tensor
    documents_BT: Tensor | None
    keys: Keys
    # the document whose keys the state before the first token holds
    first_document_B: Tensor
    lag: int
    # keys strictly before the query only
    strict: bool
    # whether there is a state before the first token, and whether one is wanted after the last
    has_past: bool
    has_future: bool
    length: int
    chunk: int

    @property
    def is_bare(self) -> bool:
        """Whether k and v leave the lag's keys before the first token out: there are none."""
        return self.lag > 0 and not self.has_past

    def filled(self, k_BHSD: Tensor, v_BHSE: Tensor) -> tuple[Tensor, Tensor]:
        """Return k and v with the lag's keys before the first token, zeros where there are none."""
        if not self.is_bare:
            return k_BHSD, v_BHSE
        k_BHSD, v_BHSE = (pad(x, (0, 0, self.lag, 0)) for x in (k_BHSD, v_BHSE))
        return k_BHSD, v_BHSE

    def chunks(self) -> list[Chunk]:
        """Return the chunks of the sequence in order."""
        starts = range(0, self.length, self.chunk)
        return [self._cut(start, min(start + self.chunk, self.length)) for start in starts]

    def _cut(self, start: int, stop: int) -> Chunk:
        """Return the chunk of queries start … stop − 1 with its masks."""
        queries, keys = slice(start, stop), slice(start, stop + self.lag)
        count = stop - start
        shape = (count, count + self.lag)
        visible = torch.ones(shape, dtype=torch.bool, device=self.positions_BT.device)
        visible = visible.tril(self.lag - self.strict)
        near = reads = writes = keeps = None
        if self.keys.mask_BS is not None:
            mask_BS = self.keys.mask_BS[:, keys]
            visible = visible & mask_BS[:, None, None, :]
            writes = mask_BS[:, :count]
        if self.documents_BT is not None and self.keys.documents_BS is not None:
            documents_BC = self.documents_BT[:, queries]
            documents_BS = self.keys.documents_BS[:, keys]
            visible = visible & (documents_BC[:, None, :, None] == documents_BS[:, None, None, :])
            # the state holds one document: that of the last key which has entered it
            before_B1 = self.first_document_B[:, None]
            if start > 0:
                before_B1 = self.keys.documents_BS[:, start - 1 : start]
            after_B1 = documents_BS[:, count - 1 : count]
            reads = documents_BC == before_B1
            keeps = before_B1 == after_B1
            enters = documents_BS[:, :count] == after_B1
            writes = enters if writes is None else writes & enters
        if self.is_near is not None:
            query_positions = self.positions_BT[:, queries, None]
            key_positions = self.keys.positions_BS[:, None, keys]
            near = self.is_near(query_positions, key_positions)[:, None]
        reads, writes, keeps = (
            None if mask is None else mask[:, None, :, None] for mask in (reads, writes, keeps)
        )
        return Chunk(
            queries=queries,
            keys=keys,
            visible=visible,
            near=near,
            reads=reads,
            writes=writes,
            keeps=keeps,
            has_past=self.has_past or start > 0,
            has_future=self.has_future or stop < self.length,
            query_positions_BC=self.positions_BT[:, queries],
            key_positions_BS=self.keys.positions_BS[:, keys],
        )

    def query(self, chunk: Chunk, q_BHCD: Tensor, tensors: Sequence[Tensor]) -> Features:
        """Return the features of a chunk's queries."""
        positions = chunk.query_positions_BC
        return self.feature_map(q_BHCD, *tensors, is_query=True, positions=positions)

    def key(self, chunk: Chunk, k_BHSD: Tensor, tensors: Sequence[Tensor]) -> Features:
        """Return the features of a chunk's keys."""
        positions = chunk.key_positions_BS
        return self.feature_map(k_BHSD, *tensors, is_query=False, positions=positions)

    def inside(
        self,
        chunk: Chunk,
        sides: tuple[Tensor, Features],
        others: tuple[Tensor, Features],
        values_BHSN: Tensor,
        tensors: Sequence[Tensor],
    ) -> Tensor:
        """Return what a chunk's keys give its queries one by one, [B, H, C, N].

        `sides` and `others` are the vectors and features of the queries and of the keys.
        """
        if self.near is None:
            scores_BHCS = sides[1].scores(others[1])
        else:
            scores_BHCS = self.near(sides[0], others[0], *tensors).scores()
            if chunk.near is not None:
                scores_BHCS = torch.where(chunk.near, scores_BHCS, sides[1].scores(others[1]))
        return (scores_BHCS * chunk.visible) @ values_BHSN


@dataclass(frozen=True)
class Chunk:
    """A stretch of queries and its keys. Masks broadcast to [B, H, C, …]; None means everything."""

    queries: slice
    keys: slice
    visible: Tensor
    near: Tensor | None
    # queries that see the state before the chunk
    reads: Tensor | None
    # keys, of the first C, that belong in the state after the chunk
    writes: Tensor | None
    # whether the state before the chunk goes on after it
    keeps: Tensor | None
    has_past: bool
    has_future: bool
    query_positions_BC: Tensor
    key_positions_BS: Tensor

    def from_state(self, query: Features, memory_BHMN: Tensor) -> Tensor:
        """Return what the state gives the queries, [B, H, C, N]."""
        return _masked(query.expand(), self.reads) @ memory_BHMN

    def into_state(self, key: Features, values_BHSN: Tensor) -> Tensor:
        """Return what the keys that leave the lag add to the state, [B, H, M, N]."""
        count = self.queries.stop - self.queries.start
        entering = _masked(key.first(count).expand(), self.writes)
        return entering.mT @ values_BHSN[:, :, :count]

    def kept(self, memory_BHMN: Tensor) -> Tensor:
        """Return what remains of the state, or of its gradient, across the chunk."""
        return _masked(memory_BHMN, self.keeps)


def _masked(x: Tensor, mask: Tensor | None) -> Tensor:
    return x if mask is None else x * mask


def _with_ones(v_BHSE: Tensor) -> Tensor:
    return torch.cat([v_BHSE, torch.ones_like(v_BHSE[..., :1])], dim=-1)


def _walk(
    walk: Walk, q: Tensor, k: Tensor, v: Tensor, memory: Tensor, tensors: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Return (Σ score [v, 1] for every query, [B, H, T, N], and the state after the last).

    Autograd can follow a walk of one chunk only.
    """
    dtype = memory.dtype
    sums = torch.empty(0)
    if walk.length > walk.chunk:
        sums = torch.empty(*q.shape[:-1], v.shape[-1] + 1, dtype=dtype, device=v.device)
    for chunk in walk.chunks():
        q_chunk = q[:, :, chunk.queries].to(dtype)
        k_chunk = k[:, :, chunk.keys].to(dtype)
        query, key = walk.query(chunk, q_chunk, tensors), walk.key(chunk, k_chunk, tensors)
        values = _with_ones(v[:, :, chunk.keys].to(dtype))
        part = walk.inside(chunk, (q_chunk, query), (k_chunk, key), values, tensors)
        if chunk.has_past:
            part = part + chunk.from_state(query, memory)
        if chunk.has_future:
            memory = chunk.kept(memory) + chunk.into_state(key, values)
        if walk.length <= walk.chunk:
            return part, memory
        sums[:, :, chunk.queries] = part
    return sums, memory


class _Walked(torch.autograd.Function):
    """`_walk` with a backward pass that recomputes every chunk."""

    @staticmethod
    def forward(ctx: Any, walk: Walk, q: Tensor, k: Tensor, v: Tensor, memory: Tensor, *tensors):
        ctx.walk = walk
        ctx.save_for_backward(q, k, v, memory, *tensors)
        return _walk(walk, q, k, v, memory, tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_sums: Tensor, d_memory: Tensor):
        q, k, v, memory, *tensors = ctx.saved_tensors
        walk: Walk = ctx.walk
        pull = _Pull(tensors)
        with without_autocast(q.device.type):
            chunks = walk.chunks()
            dq = _backward_to_queries(walk, chunks, pull, q, k, v, memory, d_sums)
            dk, dv, d_memory = _backward_to_keys(walk, chunks, pull, q, k, v, d_sums, d_memory)
        return None, dq, dk.to(k.dtype), dv.to(v.dtype), d_memory, *pull.gradients


class _Pull:
    """Gradients of one chunk's graph; those of the map's tensors add up over the chunks."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.leaves = [t.detach().requires_grad_(t.requires_grad) for t in tensors]
        self.gradients: list[Tensor | None] = [None] * len(tensors)
        self.wanted = [i for i, leaf in enumerate(self.leaves) if leaf.requires_grad]

    def __call__(
        self, outputs: list[Tensor], inputs: list[Tensor], cotangents: list[Tensor]
    ) -> list[Tensor]:
        """Return the gradients of `inputs` for `outputs` weighted by `cotangents`."""
        sources = [*inputs, *(self.leaves[i] for i in self.wanted)]
        found = torch.autograd.grad(
            outputs, sources, cotangents, allow_unused=True, materialize_grads=True
        )
        for i, gradient in zip(self.wanted, found[len(inputs) :], strict=True):
            so_far = self.gradients[i]
            self.gradients[i] = gradient if so_far is None else so_far + gradient
        return list(found[: len(inputs)])


def _backward_to_queries(
    walk: Walk,
    chunks: list[Chunk],
    pull: _Pull,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    memory: Tensor,
    d_sums: Tensor,
) -> Tensor:
    """Walk forward in time, rebuilding the states, and return dq."""
    dq = torch.empty_like(q)
    # the map's tensors get the keys' share of their gradients in the other walk
    fixed = [leaf.detach() for leaf in pull.leaves]
    for chunk in chunks:
        k_chunk = k[:, :, chunk.keys].to(memory.dtype)
        key = walk.key(chunk, k_chunk, fixed)
        values = _with_ones(v[:, :, chunk.keys].to(memory.dtype))
        with torch.enable_grad():
            leaf = q[:, :, chunk.queries].to(memory.dtype).detach().requires_grad_()
            query = walk.query(chunk, leaf, pull.leaves)
            # near scores are one function of both sides: their tensors count here, once
            part = walk.inside(chunk, (leaf, query), (k_chunk, key), values, pull.leaves)
            if chunk.has_past:
                part = part + chunk.from_state(query, memory)
        (dq[:, :, chunk.queries],) = pull([part], [leaf], [d_sums[:, :, chunk.queries]])
        if chunk.queries.stop < walk.length:
            memory = chunk.kept(memory) + chunk.into_state(key, values)
    return dq


def _backward_to_keys(
    walk: Walk,
    chunks: list[Chunk],
    pull: _Pull,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_sums: Tensor,
    d_memory: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Walk backward in time, carrying the state's gradient, and return (dk, dv, d_memory)."""
    dtype = d_memory.dtype
    # neighbouring chunks share the lag's keys, so their gradients are added up
    dk, dv = torch.zeros_like(k, dtype=dtype), torch.zeros_like(v, dtype=dtype)
    fixed = [leaf.detach() for leaf in pull.leaves]
    for chunk in reversed(chunks):
        q_chunk = q[:, :, chunk.queries].to(dtype)
        query = walk.query(chunk, q_chunk, fixed)
        d_part = d_sums[:, :, chunk.queries]
        with torch.enable_grad():
            leaf_k = k[:, :, chunk.keys].to(dtype).detach().requires_grad_()
            leaf_v = v[:, :, chunk.keys].to(dtype).detach().requires_grad_()
            key = walk.key(chunk, leaf_k, pull.leaves)
            values = _with_ones(leaf_v)
            part = walk.inside(chunk, (q_chunk, query), (leaf_k, key), values, fixed)
            outputs, cotangents = [part], [d_part]
            if chunk.has_future:
                outputs.append(chunk.into_state(key, values))
                cotangents.append(d_memory)
        d_key, d_value = pull(outputs, [leaf_k, leaf_v], cotangents)
        dk[:, :, chunk.keys] += d_key
        dv[:, :, chunk.keys] += d_value
        if chunk.has_past:
            read = _masked(query.expand(), chunk.reads).mT @ d_part
            d_memory = chunk.kept(d_memory) + read
    return dk, dv, d_memory


def apply_walk(
    walk: Walk,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    memory: Tensor,
    tensors: Sequence[Tensor],
    offset: Tensor | float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (Σ score [v, 1] for every query, the state after the last), with gradients.

    `k` and `v` hold `walk.lag` earlier keys before the T new ones, or none if `walk.is_bare`. With
    `offset` the first is Σ score v / (Σ score + offset) instead.
    """
    k, v = walk.filled(k, v)
    if walk.length <= walk.chunk or not torch.is_grad_enabled():
        sums, memory = _walk(walk, q, k, v, memory, tensors)
    else:
        sums, memory = _Walked.apply(walk, q, k, v, memory, *tensors)
    if offset is None:
        return sums, memory
    return (sums[..., :-1] / (sums[..., -1:] + offset)).to(v.dtype), memory
