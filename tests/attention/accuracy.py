"""How far a gradient may be off: relative to its own size, or to that of what it is the sum of."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 5e-3}
DRAWS = 16


def addends_norms(parts: Tensor, parameters: Iterable[Tensor]) -> list[float]:
    """Return for every parameter of one number a head the norm of ∂parts/∂parameter, else 0.

    Such a gradient of Σ parts is a sum over all tokens that can come out anywhere near 0, but its
    rounding error is one of the addends. With random signs s, the mean square of ∂(s · parts) is
    the sum of the addends' squares.
    """
    draws = torch.Generator().manual_seed(0)
    signs = [torch.randint(2, parts.shape, generator=draws) * 2.0 - 1.0 for _ in range(DRAWS)]
    norms = []
    for parameter in parameters:
        square = 0.0
        if parameter.ndim > 1 and parameter.shape[1:].numel() == 1:
            for sign in signs:
                (found,) = torch.autograd.grad(
                    parts, parameter, sign.to(parts), retain_graph=True, materialize_grads=True
                )
                square += float(found.square().sum()) / DRAWS
        norms.append(square**0.5)
    return norms


def compare(
    found: list[Tensor],
    expected: list[Tensor],
    tolerance: float,
    norms: list[float],
    length: int,
) -> None:
    """Compare y, the gradients of q, k, v and of the parameters, and what follows.

    Errors are relative to the largest of the expected norm, the parameter's of `norms`, and a tenth
    of dv's RMS (for tensors of more than a number a head).
    """
    # a query that sees one key gives its v back: all gradients but dv vanish
    floor, known = (1.0, {}) if length == 1 else (0.1, dict(enumerate(norms, start=4)))
    least = floor * float(expected[3].norm()) / expected[3].numel() ** 0.5
    for number, (x, y) in enumerate(zip(found, expected, strict=True)):
        size = known.get(number) or least * y.numel() ** 0.5
        error = float((x.double() - y).norm()) / max(float(y.norm()), size)
        assert error <= tolerance, f"result {number}: {error:.1e}"
