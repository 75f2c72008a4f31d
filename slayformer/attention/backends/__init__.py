"""Engines that walk: one meaning, and `attention.backend` chooses by name.

`auto` takes the first engine that can, in the order of `BACKENDS`, and says once which and why.
"""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slayformer.attention.backends import cpu, triton_engine
from slayformer.attention.backends.build import BuildError
from slayformer.attention.walk import Walk, apply_walk
from slayformer.errors import ConfigError


@dataclass(frozen=True)
class Backend:
    """An engine: `apply` has the arguments and results of `walk.apply_walk`.

    `obstacle(q, v)` tells what keeps it from taking such tensors, or None. Both raise BuildError
    where it cannot be compiled; `apply` raises NotCovered for a map it does not know.
    """

    apply: Callable[..., tuple[Tensor, Tensor]]
    obstacle: Callable[[Tensor, Tensor], str | None]


BACKENDS: dict[str, Backend] = {
    "cpu": Backend(cpu.apply, cpu.obstacle),
    "triton": Backend(triton_engine.apply, triton_engine.obstacle),
    "torch": Backend(apply_walk, lambda q, v: None),
}


def attend(
    wanted: str,
    walk: Walk,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    memory: Tensor,
    tensors: Sequence[Tensor],
    offset: Tensor | float | None = None,
) -> tuple[Tensor, Tensor]:
    """Walk with the backend `wanted`; arguments and results are those of `walk.apply_walk`.

    Raises ConfigError if a backend named outright cannot do it.
    """
    if torch.compiler.is_compiling():
        from slayformer.attention.backends import eager

        return eager.attend(wanted, walk, q, k, v, memory, tensors, offset)
    return attend_now(wanted, walk, q, k, v, memory, tensors, offset)


def attend_now(
    wanted: str,
    walk: Walk,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    memory: Tensor,
    tensors: Sequence[Tensor],
    offset: Tensor | float | None,
) -> tuple[Tensor, Tensor]:
    """Do what `attend` does, outside of any graph."""
    if memory.device != q.device:
        raise ValueError(f"the state is on {memory.device}, and q on {q.device}")
    refusals: list[str] = []
    for name in BACKENDS if wanted == "auto" else (wanted,):
        backend = BACKENDS[name]
        try:
            obstacle = backend.obstacle(q, v)
            if obstacle is None:
                result = backend.apply(walk, q, k, v, memory, tensors, offset)
                # fp64 is for reference values: nobody expects an engine there
                if wanted == "auto" and q.dtype != torch.float64:
                    _say(f"linear attention runs on {'; '.join([name, *refusals])}")
                return result
        except cpu.NotCovered as error:
            obstacle = f"it does not know {error}"
        except BuildError as error:
            obstacle = str(error)
            if wanted == "auto":
                _warn(f"linear attention runs on torch, which is slower: {error}")
        if wanted != "auto":
            raise ConfigError("attention.backend", wanted, f"cannot be used: {obstacle}")
        refusals.append(f"not on {name}: {obstacle}")
    raise AssertionError("the backend torch takes everything")


@functools.cache
def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=3)


@functools.cache
def _say(text: str) -> None:
    """Print `text` once, under a launcher on the first rank alone."""
    if os.environ.get("RANK", "0") == "0":
        print(f"slayformer: {text}", file=sys.stderr, flush=True)
