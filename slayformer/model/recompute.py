"""Activations computed again in the backward pass instead of being kept (Chen et al., 2016)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint


def call(function: Callable[..., Any], *arguments: Any, recompute: bool) -> Any:
    """Return `function(*arguments)`; with `recompute` only the arguments stay until the backward.

    Dropout draws the same numbers the second time. Without gradients nothing stays anyway.
    """
    if recompute and torch.is_grad_enabled():
        return checkpoint(function, *arguments, use_reentrant=False)
    return function(*arguments)
