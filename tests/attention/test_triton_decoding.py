"""The Triton kernel of one decoded token equals the dense form, in requests of any length."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.attention.accuracy import TOLERANCE
from tests.attention.triton_cases import (
    CASES,
    dense,
    draw,
    interpreted,
    make,
    outside,
    run_in_the_interpreter,
)

pytestmark = pytest.mark.usefixtures("small_chunks")


@interpreted
@pytest.mark.parametrize(
    ("case", "marked"), [("paper", False), ("best", False), *((case, True) for case in CASES)]
)
def test_decoding_token_by_token(case: str, marked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt at once and the rest one by one, in requests of different lengths if `marked`."""
    from slayformer.attention.backends import triton_start, triton_step

    kept, started = triton_start.launch, []

    def launch(kernel: Any, *rest: Any) -> None:
        started.append(kernel)
        kept(kernel, *rest)

    monkeypatch.setattr(triton_start, "launch", launch)
    attention = make(case, heads=2)
    prompt, length = 30, 62
    *heads, _ = draw(length, torch.float32, batch=2, heads=2)
    options: dict[str, Any] = {}
    real = torch.ones(2, length, dtype=torch.bool)
    if marked:
        # padding at the left, and after a request that ended; another document in each
        real[0, :11] = real[1, -5:] = False
        documents = (torch.arange(length) // torch.tensor([[45], [52]])).contiguous()
        options = {"mask": real, "document_ids": documents}
    expected = dense(attention, *heads, **options)
    given = [x.float() for x in heads]
    state = attention.init_state(2)
    pieces = []
    with torch.no_grad():
        for start, stop in [(0, prompt), *((t, t + 1) for t in range(prompt, length))]:
            part = {name: x[:, start:stop] for name, x in options.items()}
            piece, state = attention(*(x[:, :, start:stop] for x in given), state=state, **part)
            pieces.append(piece)
        _, whole = attention(*given, state=attention.init_state(2), **options)
    assert started.count(triton_step.step_forward) == length - prompt
    seen = real[:, None, :, None]
    error = ((torch.cat(pieces, dim=2) - expected) * seen).norm() / (expected * seen).norm()
    assert error <= 1e-5
    for field in ("memory_BHMN", "memory_document_B"):
        torch.testing.assert_close(
            getattr(state, field), getattr(whole, field), rtol=1e-5, atol=1e-5
        )


@interpreted
@pytest.mark.parametrize("case", ["paper", "best"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [20, 64])
def test_decoding_in_half_precision(case: str, dtype: torch.dtype, width: int) -> None:
    attention = make(case, width=width)
    length = 40
    *heads, _ = draw(length, dtype, width=width)
    given = [x.to(dtype) for x in heads]
    with torch.no_grad():
        state = attention.init_state(1)
        pieces = []
        for t in range(length):
            piece, state = attention(*(x[:, :, t : t + 1] for x in given), state=state)
            pieces.append(piece.double())
    assert piece.dtype == dtype
    expected = dense(attention, *heads)
    error = (torch.cat(pieces, dim=2) - expected).norm() / expected.norm()
    assert error <= TOLERANCE[dtype]


@outside
@pytest.mark.slow
def test_in_the_interpreter() -> None:
    run_in_the_interpreter(__file__)
