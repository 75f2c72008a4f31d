"""Gradients of some inputs alone, beside those that they have among all inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor


def subsets(items: Iterable[int]) -> list[tuple[int, ...]]:
    """Return every subset of `items` in their order."""
    found: list[tuple[int, ...]] = [()]
    for item in items:
        found += [(*one, item) for one in found]
    return found


def alone_and_among_all(
    groups: Sequence[Sequence[Tensor]],
    choices: Iterable[Sequence[int]],
    total: Callable[[], Tensor],
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield for each of `choices` what `total` has as gradients then, and among all.

    A choice names the groups whose tensors require gradients; the first one names all of them.
    """
    whole: list[list[Tensor]] = []
    for chosen in choices:
        for number, group in enumerate(groups):
            for x in group:
                x.requires_grad_(number in chosen)
        sources = [x for i in chosen for x in groups[i]]
        if not sources:
            continue
        found = iter(torch.autograd.grad(total(), sources, materialize_grads=True))
        gradients = [[next(found) for _ in groups[i]] for i in chosen]
        whole = whole or gradients
        for i, ours in zip(chosen, gradients, strict=True):
            yield from zip(ours, whole[i], strict=True)
