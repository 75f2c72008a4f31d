"""The walk on a GPU as one differentiable function.

Kept for the backward pass are q, k, v, the map's tensors, y (in bf16 with what rounding took) and
its normaliser; factors and states are computed again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from slayformer.attention.backends import triton_start
from slayformer.attention.backends.triton_pass import Call, Pass
from slayformer.attention.backends.triton_sides import (
    compute_dtype,
    rounded_to,
    with_last_stride_1,
)
from slayformer.attention.backends.triton_step import step
from slayformer.attention.base import without_autocast
from slayformer.errors import ConfigError


class _Walked(torch.autograd.Function):
    """The walk with gradients of q, k, v, the state and the map's tensors."""

    @staticmethod
    def forward(ctx: Any, call: Call, v: Tensor, memory: Tensor, *inputs: Tensor):
        sides = call.sides(*inputs)
        value = with_last_stride_1(v.to(compute_dtype(v.dtype)))
        one = Pass(call, sides, value, memory, v.dtype)
        batch, heads, _, width = v.shape
        length, fp32 = call.walk.length, torch.float32
        rest = None
        if call.offset_H is not None:
            # a token's heads lie side by side, as a model wants them
            shape = (batch, length, heads, width)
            dtype = compute_dtype(v.dtype) if v.dtype == torch.bfloat16 else v.dtype
            output = torch.empty(shape, dtype=dtype, device=v.device).transpose(1, 2)
            if v.dtype == torch.bfloat16 and any(ctx.needs_input_grad):
                rest = torch.empty_like(output)
            normaliser = torch.empty(batch, heads, length, 1, dtype=fp32, device=v.device)
        else:
            output = torch.empty(batch, heads, length, width + 1, dtype=fp32, device=v.device)
            normaliser = output[..., width:]
        after = one.forward(output, rest, normaliser)
        ctx.call = call
        kept: tuple[Tensor | None, ...] = (None, None, None)
        if call.offset_H is not None:
            output = output.to(v.dtype)
            kept = output, rest, normaliser
        ctx.save_for_backward(v, memory, *kept, *inputs)
        return output, after

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_output: Tensor, d_after: Tensor):
        call: Call = ctx.call
        v, memory, output, rest, normaliser, *inputs = ctx.saved_tensors
        wanted = ctx.needs_input_grad[3:]
        with torch.enable_grad(), without_autocast(v.device.type):
            leaves = [x.detach().requires_grad_(w) for x, w in zip(inputs, wanted, strict=True)]
            sides = call.sides(*leaves)
        d_output = d_output.float()
        if output is None:
            d_sums, d_norm = rounded_to(d_output[..., :-1], v.dtype), d_output[..., -1]
        else:
            d_sums = rounded_to(d_output / normaliser, v.dtype)
            # of dN as it is rounded and y as it was not: otherwise the gradients of a query's
            # scores, whose weighted sum is zero, would all be off to one side
            y = output.float() if rest is None else output.float() + rest.float()
            d_norm = -(d_sums.float() * y).sum(-1)
        value = with_last_stride_1(v.to(compute_dtype(v.dtype)))
        one = Pass(call, sides, value, memory, v.dtype)
        try:
            given = d_sums.contiguous(), d_norm.contiguous(), d_after
            found, d_value, d_memory = one.backward(*given)
        except triton_start.FAILURES as error:
            # another engine cannot take over what this one began
            hint = f"could not compile the backward pass; use attention.backend=torch ({error})"
            raise ConfigError("attention.backend", "triton", hint) from error
        pairs = zip(sides.differentiable(), found, strict=True)
        outputs = [(x, d.to(x.dtype)) for x, d in pairs if x is not None and x.requires_grad]
        gradients: Iterator[Tensor | None] = itertools.repeat(None)
        if outputs:
            gradients = iter(
                torch.autograd.grad(
                    [x for x, _ in outputs],
                    [x for x in leaves if x.requires_grad],
                    [d for _, d in outputs],
                    allow_unused=True,
                )
            )
        return (
            None,
            d_value.to(v.dtype),
            d_memory,
            *(next(gradients) if x.requires_grad else None for x in leaves),
        )


def walked(call: Call, v: Tensor, memory: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the quotient or the sums [B, H, T, E (+ 1)], and the state after.

    `inputs` are q, k and the map's tensors, as `call.sides` takes them.
    """
    walk = call.walk
    if (
        walk.length == 1
        and walk.has_past
        and walk.has_future
        and not _is_traced(v, memory, *inputs)
    ):
        value = with_last_stride_1(v.to(compute_dtype(v.dtype)))
        return step(Pass(call, call.sides(*inputs), value, memory, v.dtype), v.dtype)
    return _Walked.apply(call, v, memory, *inputs)


def _is_traced(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
