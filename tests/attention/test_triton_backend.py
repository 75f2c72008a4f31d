"""The Triton kernels equal the dense form in fp64, run by Triton's interpreter.

tests/gpu runs them on a GPU.
"""

from __future__ import annotations

import pytest
import torch

from tests.attention.triton_cases import (
    CASES,
    check,
    draw,
    gradients,
    interpreted,
    make,
    outside,
    run_in_the_interpreter,
)

pytestmark = pytest.mark.usefixtures("small_chunks")


@interpreted
@pytest.mark.parametrize("case", ["paper", "best"])
@pytest.mark.parametrize("length", [1, 63, 65, 200])
def test_output_and_gradients_equal_the_dense_form(case: str, length: int) -> None:
    check(case, length)


@interpreted
@pytest.mark.parametrize("case", CASES)
def test_every_map_is_covered(case: str) -> None:
    check(case, 110)


@interpreted
@pytest.mark.parametrize("case", ["paper", "best"])
@pytest.mark.parametrize("width", [20, 32, 64, 128])
def test_head_widths(case: str, width: int) -> None:
    check(case, 50, width=width)


@interpreted
@pytest.mark.parametrize("case", ["paper", "best", "window"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(case: str, dtype: torch.dtype) -> None:
    check(case, 130, dtype, width=32)


@interpreted
@pytest.mark.parametrize("case", ["paper", "best", "window", "based"])
def test_padding_documents_and_all_sides(case: str) -> None:
    length = 115
    mask = torch.ones(2, length, dtype=torch.bool)
    mask[0, :20] = mask[1, -9:] = False
    documents = (torch.arange(length) // torch.tensor([[50], [70]])).contiguous()
    for options in (
        {"mask": mask},
        {"document_ids": documents},
        {"mask": mask, "document_ids": documents},
        {"causal": False, "mask": mask, "document_ids": documents},
    ):
        check(case, length, batch=2, **options)


@interpreted
def test_two_runs_are_bit_equal() -> None:
    attention = make("window")
    *heads, weight = draw(100, torch.float32)
    runs = []
    for _ in range(2):
        given = [x.float().requires_grad_() for x in heads]
        runs.append(gradients(attention, attention(*given)[0], given, weight, torch.zeros(())))
    assert all(torch.equal(x, y) for x, y in zip(*runs, strict=True))


@outside
@pytest.mark.slow
@pytest.mark.parametrize(
    "chosen",
    ["dense", "map or widths", "padding", "not (dense or map or widths or padding)"],
)
def test_in_the_interpreter(chosen: str) -> None:
    run_in_the_interpreter(__file__, chosen)
