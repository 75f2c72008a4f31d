"""Activations computed again in the backward pass instead of being kept (Chen et al., 2016)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

# calls a function so that only its arguments stay; dropout draws the same numbers again
Checkpoint = Callable[..., Any]
CHECKPOINT: Checkpoint = partial(checkpoint, use_reentrant=False)


def call(function: Callable[..., Any], *arguments: Any, recompute: Checkpoint | None) -> Any:
    """Return `function(*arguments)`; with `recompute` only the arguments stay until the backward.

    Without gradients nothing stays anyway.
    """
    if recompute is not None and torch.is_grad_enabled():
        return recompute(function, *arguments)
    return function(*arguments)
