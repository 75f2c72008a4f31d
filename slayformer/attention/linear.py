"""The one normalised causal linear attention: parallel, chunked and recurrent.

y_t = Σ_{s≤t} φ(q_t)·φ(k_s) v_s / (Σ_{s≤t} φ(q_t)·φ(k_s) + δ)   (paper, section 2.5)

A column of ones beside v carries the normaliser along: the state is Z = Σ φ(k) [v, 1]ᵀ, of shape
[M, E + 1], whatever the length. The sequence is walked in chunks: scores inside a chunk, the
state for everything before it. The backward pass keeps q, k and v only and walks twice: forward
in time to rebuild the states (for q), backward in time carrying the states' gradients (for k and
v). Nothing of size T × M is ever held.

Shape suffixes: B batch, H heads, T positions, C positions of a chunk, D width of q and k,
E width of v, M features, N = E + 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from slayformer.attention.base import Attention, accumulation_dtype, real_document_ids
from slayformer.attention.features import Features

FeatureMap = Callable[..., Features]

CHUNK = 128


@dataclass(frozen=True)
class LinearState:
    """Everything a linear mechanism remembers; its size does not depend on the length."""

    # Σ φ(k) [v, 1]ᵀ over the current document, fp32
    memory_BHMN: Tensor
    # real tokens seen in the current document
    position_B: Tensor
    # id of the current document, -1 before the first
    document_B: Tensor


@dataclass(frozen=True)
class Walk:
    """What a pass over the sequence needs besides q, k and v; no gradients flow here."""

    feature_map: FeatureMap
    positions_BT: Tensor
    mask_BT: Tensor | None
    documents_BT: Tensor | None
    first_document_B: Tensor | None
    # keys strictly before the query only
    strict: bool
    # whether there is a state before the first token, and whether one is wanted after the last
    has_past: bool
    has_future: bool
    length: int
    chunk: int

    def query(self, chunk: Chunk, q_BHTD: Tensor, tensors: Sequence[Tensor]) -> Features:
        """Return the features of a chunk of queries."""
        return self.feature_map(q_BHTD, *tensors, is_query=True, positions=chunk.positions_BT)

    def key(self, chunk: Chunk, k_BHTD: Tensor, tensors: Sequence[Tensor]) -> Features:
        """Return the features of a chunk of keys."""
        return self.feature_map(k_BHTD, *tensors, is_query=False, positions=chunk.positions_BT)

    def chunks(self) -> list[Chunk]:
        """Return the chunks of the sequence in order."""
        starts = range(0, self.length, self.chunk)
        return [self.cut(start, min(start + self.chunk, self.length)) for start in starts]

    def cut(self, start: int, stop: int) -> Chunk:
        """Return the chunk of positions start … stop − 1 with its masks."""
        span = slice(start, stop)
        shape = (stop - start, stop - start)
        visible = torch.ones(shape, dtype=torch.bool, device=self.positions_BT.device)
        visible = visible.tril(-1 if self.strict else 0)
        reads = writes = keeps = None
        if self.mask_BT is not None:
            writes = self.mask_BT[:, span]
            visible = visible & writes[:, None, None, :]
        if self.documents_BT is not None:
            documents = self.documents_BT[:, span]
            before = self.first_document_B if start == 0 else self.documents_BT[:, start - 1]
            assert before is not None
            last = documents[:, -1:]
            visible = visible & (documents[:, None, :, None] == documents[:, None, None, :])
            reads = documents == before[:, None]
            keeps = before[:, None] == last
            writes = documents == last if writes is None else writes & (documents == last)
        reads, writes, keeps = (
            None if mask is None else mask[:, None, :, None] for mask in (reads, writes, keeps)
        )
        return Chunk(
            span=span,
            visible=visible,
            reads=reads,
            writes=writes,
            keeps=keeps,
            has_past=self.has_past or start > 0,
            has_future=self.has_future or stop < self.length,
            positions_BT=self.positions_BT[:, span],
        )


@dataclass(frozen=True)
class Chunk:
    """A stretch of positions. Masks broadcast to [B, H, C, …]; None lets everything through."""

    span: slice
    visible: Tensor
    # queries that see the state before the chunk
    reads: Tensor | None
    # keys that belong in the state after the chunk
    writes: Tensor | None
    # whether the state before the chunk goes on after it
    keeps: Tensor | None
    has_past: bool
    has_future: bool
    positions_BT: Tensor

    def cut(self, x_BHTD: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the chunk of `x`, in the dtype of the state."""
        return x_BHTD[:, :, self.span].to(dtype)


def _masked(x: Tensor, mask: Tensor | None) -> Tensor:
    return x if mask is None else x * mask


def _with_ones(v_BHCE: Tensor) -> Tensor:
    return torch.cat([v_BHCE, torch.ones_like(v_BHCE[..., :1])], dim=-1)


def _inside(chunk: Chunk, query: Features, key: Features, v_BHCN: Tensor) -> Tensor:
    """Return what the chunk's keys give its queries, [B, H, C, N]."""
    return (query.scores(key) * chunk.visible) @ v_BHCN


def _from_state(chunk: Chunk, query: Features, memory_BHMN: Tensor) -> Tensor:
    """Return what the state gives the chunk's queries, [B, H, C, N]."""
    return _masked(query.expand(), chunk.reads) @ memory_BHMN


def _into_state(chunk: Chunk, key: Features, v_BHCN: Tensor) -> Tensor:
    """Return what the chunk adds to the state, [B, H, M, N]."""
    return _masked(key.expand(), chunk.writes).mT @ v_BHCN


def _walk(
    walk: Walk, q: Tensor, k: Tensor, v: Tensor, memory: Tensor, tensors: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Return (Σ φ(q)·φ(k) [v, 1] for every query, [B, H, T, N], and the state after the last).

    Autograd can follow a walk of one chunk only.
    """
    dtype = memory.dtype
    sums = torch.empty(0)
    if walk.length > walk.chunk:
        sums = torch.empty(*v.shape[:-1], v.shape[-1] + 1, dtype=dtype, device=v.device)
    for chunk in walk.chunks():
        query = walk.query(chunk, chunk.cut(q, dtype), tensors)
        key = walk.key(chunk, chunk.cut(k, dtype), tensors)
        values = _with_ones(chunk.cut(v, dtype))
        part = _inside(chunk, query, key, values)
        if chunk.has_past:
            part = part + _from_state(chunk, query, memory)
        if chunk.has_future:
            memory = _masked(memory, chunk.keeps) + _into_state(chunk, key, values)
        if walk.length <= walk.chunk:
            return part, memory
        sums[:, :, chunk.span] = part
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
    def backward(ctx: Any, d_out: Tensor, d_memory: Tensor):
        q, k, v, memory, *tensors = ctx.saved_tensors
        walk: Walk = ctx.walk
        pull = _Pull(tensors)
        with torch.autocast(q.device.type, enabled=False):
            chunks = walk.chunks()
            dq = _backward_to_queries(walk, chunks, pull, q, k, v, memory, d_out)
            dk, dv, d_memory = _backward_to_keys(walk, chunks, pull, q, k, v, d_out, d_memory)
        return None, dq, dk, dv, d_memory, *pull.gradients


class _Pull:
    """Gradients of one chunk's graph; those of the feature map's tensors add up over chunks."""

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
    d_out: Tensor,
) -> Tensor:
    """Walk forward in time, rebuilding the states, and return dq."""
    dq = torch.empty_like(q)
    for chunk in chunks:
        key = walk.key(chunk, chunk.cut(k, memory.dtype), pull.leaves)
        values = _with_ones(chunk.cut(v, memory.dtype))
        with torch.enable_grad():
            leaf = chunk.cut(q, memory.dtype).detach().requires_grad_()
            query = walk.query(chunk, leaf, pull.leaves)
            part = _inside(chunk, query, key, values)
            if chunk.has_past:
                part = part + _from_state(chunk, query, memory)
        (dq[:, :, chunk.span],) = pull([part], [leaf], [d_out[:, :, chunk.span]])
        if chunk.span.stop < walk.length:
            memory = _masked(memory, chunk.keeps) + _into_state(chunk, key, values)
    return dq


def _backward_to_keys(
    walk: Walk,
    chunks: list[Chunk],
    pull: _Pull,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_out: Tensor,
    d_memory: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Walk backward in time, carrying the state's gradient, and return (dk, dv, d_memory)."""
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    for chunk in reversed(chunks):
        query = walk.query(chunk, chunk.cut(q, d_memory.dtype), pull.leaves)
        d_part = d_out[:, :, chunk.span]
        with torch.enable_grad():
            leaf_k = chunk.cut(k, d_memory.dtype).detach().requires_grad_()
            leaf_v = chunk.cut(v, d_memory.dtype).detach().requires_grad_()
            key = walk.key(chunk, leaf_k, pull.leaves)
            values = _with_ones(leaf_v)
            outputs, cotangents = [_inside(chunk, query, key, values)], [d_part]
            if chunk.has_future:
                outputs.append(_into_state(chunk, key, values))
                cotangents.append(d_memory)
        found = pull(outputs, [leaf_k, leaf_v], cotangents)
        dk[:, :, chunk.span], dv[:, :, chunk.span] = found
        if chunk.has_past:
            read = _masked(query.expand(), chunk.reads).mT @ d_part
            d_memory = _masked(d_memory, chunk.keeps) + read
    return dk, dv, d_memory


# the backward pass differentiates chunk by chunk itself, which a graph compiler cannot trace
@torch.compiler.disable
def _apply_walk(
    walk: Walk, q: Tensor, k: Tensor, v: Tensor, memory: Tensor, tensors: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    if walk.length <= walk.chunk or not torch.is_grad_enabled():
        return _walk(walk, q, k, v, memory, tensors)
    return _Walked.apply(walk, q, k, v, memory, *tensors)


def token_positions(mask_BT: Tensor, documents_BT: Tensor | None, state: LinearState) -> Tensor:
    """Return each token's place in its document, [B, T] from 0, padding not counted.

    `state` says how far the document that was current before these tokens had come.
    """
    real = mask_BT.long()
    seen = real.cumsum(dim=1)
    offset = -state.position_B[:, None].expand_as(seen)
    if documents_BT is not None:
        before = torch.cat([state.document_B[:, None], documents_BT[:, :-1]], dim=1)
        starts = documents_BT != before
        lowest = torch.iinfo(torch.long).min
        start_seen = torch.where(starts, seen - real, lowest).cummax(dim=1).values
        offset = torch.maximum(offset, start_seen)
    return (seen - 1 - offset).clamp_min(0)


class LinearAttention(Attention):
    """Base of every linear mechanism: a subclass gives a feature map and its sizes.

    Chunking, decoding, padding, documents and the non-causal form come from this module.
    """

    # added to the normaliser
    delta: float
    # M, and the summed widths of the factors whose scores are multiplied inside a chunk
    feature_count: int
    score_width: int
    chunk: int = CHUNK

    def feature_tensors(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return every tensor the feature map reads, built once per forward pass.

        Parameters reach the recomputing backward pass only through here.
        """
        return ()

    def feature_map(
        self, x_BHTD: Tensor, *tensors: Tensor, is_query: bool, positions: Tensor
    ) -> Features:
        """Return φ(x) for `tensors` as `feature_tensors` gave them; `positions` is [B, T]."""
        raise NotImplementedError

    def feature_flops(self) -> int:
        """Return the FLOPs of one vector's features in one head."""
        raise NotImplementedError

    def init_state(self, batch_size: int, device: torch.device | str = "cpu") -> LinearState:
        """Return the state before the first token: zeros of [B, H, M, E + 1], with E = D."""
        size = (batch_size, self.num_heads, self.feature_count, self.head_dim + 1)
        return LinearState(
            memory_BHMN=torch.zeros(size, device=device),
            position_B=torch.zeros(batch_size, dtype=torch.long, device=device),
            document_B=torch.full((batch_size,), -1, dtype=torch.long, device=device),
        )

    def flops_per_token(self, sequence_length: int) -> int:
        """Return features of q and k, half a chunk's scores, the state read and written."""
        walked = sequence_length > 2 * self.chunk
        inside = self.chunk if walked else sequence_length
        inside *= self.score_width + self.head_dim + 1
        outside = 4 * self.feature_count * (self.head_dim + 1) if walked else 0
        return self.num_heads * (2 * self.feature_flops() + inside + outside)

    def forward(
        self,
        q_BHTD: Tensor,
        k_BHTD: Tensor,
        v_BHTE: Tensor,
        *,
        causal: bool = True,
        mask: Tensor | None = None,
        document_ids: Tensor | None = None,
        state: LinearState | None = None,
    ) -> tuple[Tensor, LinearState | None]:
        """See `Attention.forward`."""
        if state is not None and not causal:
            raise ValueError("a state carries the past of causal attention; pass causal=True")
        with torch.autocast(q_BHTD.device.type, enabled=False):
            sums_BHTN, after = self._sums(
                q_BHTD, k_BHTD, v_BHTE, mask, document_ids, state, strict=False
            )
            if not causal:
                # the keys after each query: the strict walk over the reversed sequence
                q, k, v = (x.flip(2) for x in (q_BHTD, k_BHTD, v_BHTE))
                mask, document_ids = (
                    None if x is None else x.flip(1) for x in (mask, document_ids)
                )
                later_BHTN, _ = self._sums(q, k, v, mask, document_ids, None, strict=True)
                sums_BHTN = sums_BHTN + later_BHTN.flip(2)
            y_BHTE = sums_BHTN[..., :-1] / (sums_BHTN[..., -1:] + self.delta)
        return y_BHTE.to(v_BHTE.dtype), after

    def _sums(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        document_ids: Tensor | None,
        state: LinearState | None,
        *,
        strict: bool,
    ) -> tuple[Tensor, LinearState | None]:
        """Return Σ φ(q)·φ(k) [v, 1] and the state after the last token (None without one)."""
        batch_size, _, length, _ = q.shape
        documents = real_document_ids(mask, document_ids)
        before = state or LinearState(
            memory_BHMN=torch.zeros(1, 1, 1, 1, device=q.device),
            position_B=torch.zeros(batch_size, dtype=torch.long, device=q.device),
            document_B=torch.full((batch_size,), -1, dtype=torch.long, device=q.device),
        )
        memory = before.memory_BHMN.to(accumulation_dtype(q.dtype))
        everything = torch.ones(batch_size, length, dtype=torch.bool, device=q.device)
        positions = token_positions(everything if mask is None else mask, documents, before)
        walk = Walk(
            feature_map=self.feature_map,
            positions_BT=positions,
            mask_BT=mask,
            documents_BT=documents,
            first_document_B=before.document_B,
            strict=strict,
            has_past=state is not None,
            has_future=state is not None,
            length=length,
            # scores of one larger chunk cost less than a second one's trip through the state
            chunk=self.chunk if length > 2 * self.chunk else length,
        )
        sums, memory = _apply_walk(walk, q, k, v, memory, self.feature_tensors(memory.dtype))
        if state is None:
            return sums, None
        document = state.document_B if documents is None else documents[:, -1]
        return sums, LinearState(memory, positions[:, -1] + 1, document)
