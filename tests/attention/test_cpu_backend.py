"""The compiled CPU backend equals the fp64 torch walk: outputs, states and every gradient.

The reference itself is proved against dense forms in test_contract.py. Other builds of the same
source pass these tests too: see test_cpu_build.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from slayformer.attention.linear import LinearAttention
from slayformer.attention.near import LARGEST_SCORE
from tests.attention.cpu_cases import (
    CASES,
    HEADS,
    MORE_CASES,
    WIDTH,
    compare,
    draw,
    make,
    results,
    stepwise,
)

LENGTHS: list[Any] = [1, 7, 63, 64, 65, 1000]
LENGTHS += [pytest.param(length, marks=pytest.mark.slow) for length in (4097, 65537)]


def check(case: str, length: int, dtype: torch.dtype = torch.float32, **sizes: int) -> None:
    """Compare y and all gradients for one sequence."""
    shape = (1, sizes.get("num_heads", HEADS), length, sizes.get("head_dim", WIDTH))
    tensors = draw(*shape, dtype=dtype)
    # a query that sees one key gives its v back: dq and dk vanish
    floor = 1.0 if length == 1 else 0.1
    compare(case, lambda walk, dtype: results(walk, dtype, tensors), dtype, floor, **sizes)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("length", LENGTHS)
def test_output_and_gradients_equal_the_reference(case: str, length: int) -> None:
    check(case, length)


@pytest.mark.parametrize("case", MORE_CASES)
def test_every_map_is_covered(case: str) -> None:
    # in one chunk, and through the state
    check(case, 150)
    check(case, 650)


@pytest.mark.parametrize("case", ["paper", "best"])
@pytest.mark.parametrize("width", [20, 64, 128])
def test_head_widths(case: str, width: int) -> None:
    check(case, 130, head_dim=width, num_heads=1)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(case: str, dtype: torch.dtype) -> None:
    check(case, 70, dtype, head_dim=32)
    check(case, 800, dtype, head_dim=32, num_heads=1)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("length", [*LENGTHS[:-1], 2048])
def test_bf16_at_every_length(case: str, length: int) -> None:
    check(case, length, torch.bfloat16, head_dim=64, num_heads=1)


@pytest.mark.parametrize("case", ["paper", "best"])
def test_half_precision_of_values_far_from_zero(case: str) -> None:
    # what the state gives a gradient is then a small difference of large sums
    q, k, v, weight = draw(1, 1, 800, 32, dtype=torch.bfloat16)
    tensors = [q, k, (v + 1).bfloat16().double(), weight]
    compare(
        case,
        lambda walk, dtype: results(walk, dtype, tensors),
        torch.bfloat16,
        num_heads=1,
        head_dim=32,
    )


@pytest.mark.parametrize("case", ["best", "softmax in chunks"])
def test_scores_beyond_the_largest_exponent(case: str) -> None:
    q, k, v, weight = draw(1, HEADS, 200, WIDTH)
    # of some pairs beyond, of most not, of some e^−40 and less
    tensors = [8 * q, 8 * k, v, weight]
    scores = (tensors[0] @ tensors[1].mT) / WIDTH**0.5
    assert 0.02 < float((scores > LARGEST_SCORE).double().mean()) < 0.3
    compare(case, lambda walk, dtype: results(walk, dtype, tensors))


@pytest.mark.parametrize("case", CASES)
def test_half_precision_with_documents_padding_and_states(case: str) -> None:
    mask = torch.ones(1, 333, dtype=torch.bool)
    mask[:, -9:] = False
    options = {"mask": mask, "document_ids": torch.arange(333)[None] // 170}
    *heads, weight = draw(1, HEADS, 333, WIDTH, dtype=torch.bfloat16)
    real = mask[:, None, :, None]

    def packed(walk: LinearAttention, dtype: torch.dtype) -> list[Tensor]:
        y, *gradients = results(walk, dtype, [*heads, weight * real], **options)
        return [y * real, *gradients]

    compare(case, packed, torch.bfloat16)
    tensors = [*heads, weight]
    compare(case, lambda walk, dtype: stepwise(walk, dtype, tensors, [65, 200]), torch.bfloat16)


@pytest.mark.parametrize("case", CASES)
def test_padding_documents_and_all_sides(case: str) -> None:
    length = 331
    mask = torch.ones(2, length, dtype=torch.bool)
    mask[0, :70] = mask[1, -9:] = False
    documents = (torch.arange(length) // torch.tensor([[50], [130]])).contiguous()
    *heads, weight = draw(2, HEADS, length, WIDTH)
    for options in (
        {"mask": mask},
        {"document_ids": documents},
        {"mask": mask, "document_ids": documents},
        {"causal": False},
        {"causal": False, "mask": mask, "document_ids": documents},
    ):
        real = mask[:, None, :, None] if "mask" in options else torch.ones(1)

        def run(walk: LinearAttention, dtype: torch.dtype, options=options, real=real):
            # a padded query's output means nothing
            y, *gradients = results(walk, dtype, [*heads, weight * real], **options)
            return [y * real, *gradients]

        compare(case, run)


@pytest.mark.parametrize("case", CASES)
def test_states_in_and_out(case: str) -> None:
    draws = torch.Generator().manual_seed(3)
    cuts = sorted(torch.randperm(399, generator=draws)[:4].add(1).tolist())
    tensors = draw(2, HEADS, 400, WIDTH)
    compare(case, lambda walk, dtype: stepwise(walk, dtype, tensors, cuts))


@pytest.mark.parametrize("case", CASES)
def test_other_value_width_and_plain_strides(case: str) -> None:
    q, k = (x.contiguous() for x in draw(1, HEADS, 90, WIDTH, count=2))
    # columns of a wider tensor, and a transpose: the last stride is not 1
    v = draw(1, HEADS, 90, 64)[0][..., 3:40]
    v = v.mT.contiguous().mT
    weight = torch.ones_like(v)
    compare(case, lambda walk, dtype: results(walk, dtype, [q, k, v, weight]))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("threads", [1, 3])
def test_two_runs_are_bit_equal(case: str, threads: int) -> None:
    attention = make(case, "cpu", num_heads=1)
    tensors = draw(1, 1, 900, WIDTH)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        runs = [
            [results(attention, dtype, tensors) for _ in range(2)]
            for dtype in (torch.float32, torch.bfloat16)
        ]
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(x, y) for one, two in runs for x, y in zip(one, two, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_a_head_is_cut_into_stretches_for_more_threads(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    documents = (torch.arange(700) >= 333).long()[None]
    tensors = draw(1, 1, 700, WIDTH)
    compare(case, lambda walk, dtype: results(walk, dtype, tensors), num_heads=1)
    packed = {"document_ids": documents}
    compare(case, lambda walk, dtype: results(walk, dtype, tensors, **packed), num_heads=1)
    compare(case, lambda walk, dtype: stepwise(walk, dtype, tensors, [211]), num_heads=1)
