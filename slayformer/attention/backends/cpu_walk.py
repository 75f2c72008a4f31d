"""The compiled walk as one differentiable function.

Shape suffixes: B batch, H heads, T positions, S = lag + T keys, D width of q and k, E width of v,
F columns of a product, M features.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from slayformer.attention.backends import engine
from slayformer.attention.backends.engine import Rows
from slayformer.attention.kernels import NORM_FLOOR
from slayformer.attention.projection import Columns
from slayformer.attention.walk import Walk

# queries of a chunk where a state carries the past
CHUNK = 64

# kind and block width of every part of the factors
Layout = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Call:
    """What both passes need beside tensors with gradients."""

    walk: Walk
    layout: Layout
    near_kind: int
    # what multiplies the exponential kernel's inner products
    near_factor: float
    # of the normaliser; None: both sums are wanted, not their quotient
    offset_H: Tensor | None
    # what becomes of the product's columns; None: the factors are given
    columns: tuple[Columns, ...] | None

    @property
    def has_near(self) -> bool:
        """Whether near pairs have an exact kernel."""
        return self.near_kind != engine.NO_KERNEL


class Pass:
    """One pass forward or backward: the data structure for the compiled code, being filled in."""

    def __init__(
        self,
        call: Call,
        value: Tensor,
        memory: Tensor,
        parameters: Sequence[Tensor | None],
        given: list[Tensor],
    ) -> None:
        walk = call.walk
        batch, heads, _, width = value.shape
        self.call = call
        # what must outlive the problem
        self.kept: list[Any] = []
        self.problem = engine.Problem(
            batch=batch,
            heads=heads,
            length=walk.length,
            lag=walk.lag,
            # factors that torch made are of filled keys
            absent=walk.lag if walk.is_bare and call.columns is not None else 0,
            strict=walk.strict,
            value_width=width,
            feature_count=memory.shape[2],
            segments=1,
            has_past=walk.has_past,
            has_future=walk.has_future,
            is_bf16=value.dtype == torch.bfloat16,
            is_quotient=call.offset_H is not None,
            parts=len(call.layout),
            near_kind=call.near_kind,
            near_factor=call.near_factor,
            near_size=walk.local_size,
            near_rule=engine.SAME_STRETCH if walk.local == "chunk" else engine.CLOSER,
            value=Rows.of(value),
        )
        self.projections: list[engine.Projection] = []
        epsilon, near_scale, weight, bias = parameters
        if weight is None or bias is None:
            widths = self._give_factors(given)
        else:
            widths = self._give_projections(weight, bias, given)
        for part, (kind, block), columns in zip(
            self.problem.part, call.layout, widths, strict=False
        ):
            part.kind, part.width, part.block = kind, columns, block
        self._cut(memory.shape[2], sum(widths) + width)
        self._point(memory, epsilon, near_scale)

    def _give_factors(self, given: list[Tensor]) -> list[int]:
        """Take the factors of queries and of keys, and return their widths."""
        problem, half = self.problem, len(given) // 2
        for i in range(problem.parts):
            part = problem.part[i]
            part.query, part.key = Rows.of(given[i]), Rows.of(given[half + i])
        if self.call.has_near:
            problem.near_width = given[-1].shape[-1]
            problem.near_query, problem.near_key = Rows.of(given[half - 1]), Rows.of(given[-1])
        return [x.shape[-1] for x in given[: problem.parts]]

    def _give_projections(
        self,
        weight_HDF: Tensor,
        bias_HF: Tensor,
        given: list[Tensor],
    ) -> list[int]:
        """Take q, k and the product that makes factors of both, and return their widths."""
        columns = self.call.columns
        assert columns is not None
        widths = [part.width for part in columns]
        for x in given:
            projection = engine.Projection(
                width=x.shape[-1],
                columns=weight_HDF.shape[-1],
                outputs=sum(widths),
                is_bf16=x.dtype == torch.bfloat16,
                parts=len(columns),
                floor=NORM_FLOOR,
                x=Rows.of(x),
                weight=weight_HDF.data_ptr(),
                bias=bias_HF.data_ptr(),
            )
            for to, part in zip(projection.part, columns, strict=False):
                to.activation = engine.ACTIVATIONS[part.activation]
                to.width, to.block = part.width, part.block
            self.projections.append(projection)
        problem = self.problem
        problem.near_width = given[0].shape[-1] if self.call.has_near else 0
        problem.query_projection, problem.key_projection = map(ctypes.addressof, self.projections)
        return widths

    def _cut(self, features: int, score_width: int) -> None:
        """Choose chunks, and stretches of them if there are fewer heads than threads."""
        problem, walk = self.problem, self.call.walk
        problem.chunk = _chunk(walk, score_width, features * problem.value_width, problem.is_bf16)
        chunks = -(-walk.length // problem.chunk)
        heads, threads = problem.batch * problem.heads, torch.get_num_threads()
        if heads < threads and chunks > 1:
            problem.segments = min(chunks, -(-threads // heads))

    def _point(self, memory: Tensor, epsilon: Tensor | None, near_scale: Tensor | None) -> None:
        """Fill in the plain arrays."""
        walk, keys = self.call.walk, self.call.walk.keys
        if self.problem.absent and self.problem.chunk >= walk.length:
            # nothing ever leaves the lag, and nothing is in it
            keys = keys.after(walk.lag)
            self.problem.lag = self.problem.absent = 0
        pointers = {
            "epsilon": epsilon,
            "near_scale": near_scale,
            "offset": self.call.offset_H,
            "memory": memory if walk.has_past else None,
            "key_mask": keys.mask_BS,
        }
        if self.call.has_near:
            pointers |= {"query_positions": walk.positions_BT, "key_positions": keys.positions_BS}
        if walk.documents_BT is not None and keys.documents_BS is not None:
            pointers["query_documents"] = walk.documents_BT
            pointers["key_documents"] = keys.documents_BS
            pointers["first_document"] = walk.first_document_B
        for name, x in pointers.items():
            if x is not None:
                self.kept.append(x.contiguous())
                setattr(self.problem, name, self.kept[-1].data_ptr())

    def place_gradients(
        self, parameters: Sequence[Tensor | None], d_given: list[Tensor], is_trained: bool
    ) -> Callable[[], list[Tensor | None]]:
        """Tell where gradients go; return what gives those of the parameters afterwards.

        `is_trained`: whether those of W or b are wanted.
        """
        problem, half = self.problem, len(d_given) // 2
        epsilon, near_scale, weight, bias = parameters
        places = (problem.batch, problem.heads, problem.segments)
        # of ε and of the near scale
        d_near = torch.zeros(2, *places, dtype=torch.float64)
        problem.d_epsilon, problem.d_near_scale = (x.data_ptr() for x in d_near)

        def of_near() -> list[Tensor | None]:
            found = d_near.sum(dim=(1, 3)).float()
            return [None if epsilon is None else found[0], None if near_scale is None else found[1]]

        if weight is None or bias is None:
            for i in range(problem.parts):
                part = problem.part[i]
                part.d_query, part.d_key = Rows.of(d_given[i]), Rows.of(d_given[half + i])
            if self.call.has_near:
                problem.d_near_query = Rows.of(d_given[half - 1])
                problem.d_near_key = Rows.of(d_given[-1])
            return lambda: [*of_near(), None, None]
        for projection, d in zip(self.projections, d_given, strict=True):
            projection.d_x = Rows.of(d)
        if not is_trained:
            return lambda: [*of_near(), None, None]
        # of queries and of keys
        d_weight = torch.empty(2, *places, *weight.shape[1:])
        d_bias = torch.empty(2, *places, *bias.shape[1:])
        for i, projection in enumerate(self.projections):
            projection.d_weight, projection.d_bias = d_weight[i].data_ptr(), d_bias[i].data_ptr()

        def gradients() -> list[Tensor | None]:
            return [*of_near(), d_weight.sum(dim=(0, 1, 3)), d_bias.sum(dim=(0, 1, 3))]

        return gradients


def _chunk(walk: Walk, score_width: int, state_size: int, is_bf16: bool) -> int:
    """Return how many queries a chunk has.

    Without a state around it, one chunk saves the way through the state, whose price does not
    depend on the length, at that of more scores.
    """
    chunk = CHUNK
    if walk.near is not None and walk.lag == 0:
        # near pairs never meet through the state
        chunk = walk.local_size * max(1, CHUNK // walk.local_size)
    length = max(1, walk.length)
    if not (walk.has_past or walk.has_future):
        # read and written, in bf16 at half the price
        state = state_size * (1 if is_bf16 else 2)
        if length * score_width / 2 <= state + chunk * score_width:
            return length
    return min(chunk, length)


def _ready(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _arranged(
    value: Tensor, sides: Sequence[Tensor], weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, list[Tensor], Tensor | None, Tensor | None]:
    """Return v, the sides, W and b with the strides that the compiled code takes."""
    if weight is not None and bias is not None:
        weight, bias = weight.contiguous(), bias.contiguous()
    return _ready(value), [_ready(x) for x in sides], weight, bias


def _run_forward(
    call: Call,
    value: Tensor,
    memory: Tensor,
    parameters: Sequence[Tensor | None],
    given: list[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the quotient or the sums, the normaliser, and the state after, empty if not wanted."""
    # it holds what the problem points at
    one = Pass(call, value, memory, parameters, given)
    problem = one.problem
    batch, heads, _, width = value.shape
    length = call.walk.length
    if call.offset_H is not None:
        # a token's heads lie side by side, as a model wants them
        output = torch.empty(batch, length, heads, width).transpose(1, 2)
        normaliser = torch.empty(batch, heads, length, 1)
    else:
        output = torch.empty(batch, heads, length, width + 1)
        normaliser = output[..., width:]
    problem.output, problem.normaliser = Rows.of(output), Rows.of(normaliser)
    after = torch.empty(memory.shape if call.walk.has_future else 0)
    problem.memory_after = after.data_ptr()
    engine.run(problem, backward=False)
    return output, normaliser, after


class _Walked(torch.autograd.Function):
    """The walk with gradients of q and k or of their factors, of v, the state and parameters."""

    @staticmethod
    def forward(
        ctx: Any,
        call: Call,
        value: Tensor,
        memory: Tensor,
        epsilon: Tensor | None,
        near_scale: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        *sides: Tensor,
    ):
        value, given, weight, bias = _arranged(value, sides, weight, bias)
        parameters = (epsilon, near_scale, weight, bias)
        output, normaliser, after = _run_forward(call, value, memory, parameters, given)
        ctx.call = call
        quotient = (output, normaliser) if call.offset_H is not None else (None, None)
        ctx.save_for_backward(value, memory, *parameters, *quotient, *given)
        return output, after

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_output: Tensor, d_after: Tensor):
        call: Call = ctx.call
        walk = call.walk
        value, memory, *rest = ctx.saved_tensors
        parameters, (output, normaliser), given = rest[:4], rest[4:6], rest[6:]
        one = Pass(call, value, memory, parameters, given)
        problem = one.problem
        d_output = _ready(d_output)
        problem.d_output = Rows.of(d_output)
        if output is not None:
            problem.output, problem.normaliser = Rows.of(output), Rows.of(normaliser)
        else:
            problem.d_normaliser = Rows.of(d_output[..., value.shape[-1] :])
        d_value = torch.empty_like(value, dtype=torch.float32)
        problem.d_value = Rows.of(d_value)
        d_memory = None
        if walk.has_past:
            d_memory = torch.empty(memory.shape)
            problem.d_memory = d_memory.data_ptr()
        if walk.has_future:
            d_after = d_after.contiguous()
            problem.d_memory_after = d_after.data_ptr()
        if walk.lag:
            # neighbouring stretches would both write the keys between them
            problem.segments = 1
        d_given = [torch.empty_like(x, dtype=torch.float32) for x in given]
        # of W and b
        is_trained = any(ctx.needs_input_grad[5:7])
        d_parameters = one.place_gradients(parameters, d_given, is_trained)
        engine.run(problem, backward=True)
        return (
            None,
            d_value.to(value.dtype),
            d_memory,
            *d_parameters(),
            *(d.to(x.dtype) for d, x in zip(d_given, given, strict=True)),
        )


def compiled_walk(call: Call, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the quotient or the sums [B, H, T, E (+ 1)], and the state after, if it is wanted.

    `tensors`: v, the state before, ε and the near kernel's scale [H]; W and b with q and k, or
    twice None with the factors of queries and of keys, the near kernel's vectors last.
    """
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        return _Walked.apply(call, *tensors)
    value, memory, epsilon, near_scale, weight, bias, *sides = tensors
    assert value is not None
    assert memory is not None
    value, given, weight, bias = _arranged(value, sides, weight, bias)  # type: ignore[arg-type]
    parameters = (epsilon, near_scale, weight, bias)
    output, _, after = _run_forward(call, value, memory, parameters, given)
    return output, after
