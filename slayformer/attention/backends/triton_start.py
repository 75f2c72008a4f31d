"""How kernels start: where, with what blocks, and how their products take operands."""

from __future__ import annotations

import subprocess
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.errors import TritonError

from slayformer.attention.backends.triton_math import BF16, FP32, ROUNDED, TF32
from slayformer.attention.backends.triton_sides import INTERPRETED

# kernels that cannot be compiled, or not started with what the GPU has; C code beside them likewise
FAILURES = (TritonError, subprocess.CalledProcessError)
# the assembler would rather spill a little and run more programs at a time
MOST_REGISTERS = 255


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    arguments: dict[str, Any],
    constants: dict[str, Any],
    warps: int,
) -> None:
    """Run a kernel where its tensors are; the one place where any starts."""
    device = next(x.device for x in arguments.values() if isinstance(x, Tensor))
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel[grid](**arguments, **constants, **options_of(warps))


def options_of(warps: int) -> dict[str, int]:
    """Return what every kernel is compiled with."""
    return {"num_warps": warps, "num_stages": 1, "maxnreg": MOST_REGISTERS}


def architecture_of(device: torch.device) -> int:
    """Return the compute capability without the dot; for the interpreter that of most kernels."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def form_of(dtype: torch.dtype) -> int:
    """Return how products take operands in a call on tensors of `dtype`."""
    if dtype == torch.bfloat16:
        return ROUNDED.value if INTERPRETED else BF16.value
    return TF32.value if dtype == torch.float16 else FP32.value


def block_of(width: int) -> int:
    """Return the block that holds a row of this width."""
    return max(16, triton.next_power_of_2(width))


def strides_of(x: Tensor, name: str) -> dict[str, int]:
    """Return the strides of [B, H, T, ...] as kernels take those of an argument of this name."""
    return {f"{name}_{axis}": x.stride(i) for i, axis in enumerate(("batch", "head", "token"))}


@dataclass(frozen=True)
class Blocks:
    """Blocks and warps that keep every kernel within the registers: scripts/check_kernels.py."""

    # own tokens, others and features of a program for outputs, and its warps
    tokens: int
    others: int
    features: int
    warps: int
    # features of a program that carries states
    carry_features: int
    # as the first four, backward; the states' kernels always take 8 warps
    backward_tokens: int
    backward_others: int
    backward_features: int
    backward_warps: int

    @classmethod
    def choose(
        cls, *, form: int, architecture: int, length: int, width: int, has_near: bool
    ) -> Blocks:
        """Return those for `length` tokens whose values are `width` wide."""
        is_bf16, is_wide = form == BF16.value, block_of(width) > 64
        # before Hopper both operands of a product lie in registers
        is_heavy = not is_bf16 or is_wide or architecture < 90
        tokens = 16 if length <= 16 else 32 if is_heavy and has_near else 64
        others = 16 if not is_bf16 and has_near else 32 if is_heavy or has_near else 64
        carry_features = 16 if is_heavy else 64
        if not is_bf16 and block_of(width) <= 32:
            carry_features = 32
        backward_others = 32 if not is_bf16 else 16 if is_heavy or has_near else 32
        return cls(
            tokens=tokens,
            others=min(others, tokens),
            features=16 if not is_bf16 else 32 if is_heavy else 64,
            warps=8 if is_heavy else 4,
            carry_features=carry_features,
            backward_tokens=min(16 if not is_bf16 else 32 if is_heavy else 64, tokens),
            backward_others=min(backward_others, tokens),
            backward_features=16 if not is_bf16 or is_wide else 32,
            backward_warps=8 if is_bf16 else 4,
        )
