"""States as values: the tensors in them, whatever the mechanism."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

from torch import Tensor


def map_tensors(state: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return `state`, dataclasses, tuples and lists of tensors, with `change` applied to each."""
    if isinstance(state, Tensor):
        return change(state)
    if is_dataclass(state) and not isinstance(state, type):
        values = {
            item.name: map_tensors(getattr(state, item.name), change) for item in fields(state)
        }
        return replace(state, **values)
    if isinstance(state, tuple | list):
        return type(state)(map_tensors(part, change) for part in state)
    return state


def tensors_of(state: Any) -> list[Tensor]:
    """Return every tensor in `state`, in order."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(state, note)
    return found


def tensor_bytes(state: Any) -> int:
    """Return the bytes of all tensors in `state`."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(state))
