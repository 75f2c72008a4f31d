"""Losses by document: against sums done token by token, and through a real validation."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from slayformer.data.loader import WindowLoader
from slayformer.data.shards import TokenStream
from slayformer.errors import UserError
from slayformer.evaluation.document_losses import (
    FILE,
    DocumentLosses,
    read_document_losses,
    sums_of_validation,
)
from slayformer.evaluation.loss import score

END = 9


class KnownNats(nn.Module):
    """Gives every target 1 nat and a hundredth of its id more, whatever the context."""

    def forward(self, ids_BT: Any, targets_BT: torch.Tensor, *documents: Any) -> torch.Tensor:
        return 1 + targets_BT.clamp(min=0).double() / 100


@pytest.mark.parametrize("context_length", [1, 5, 7])
@pytest.mark.parametrize("batch_samples", [1, 3])
def test_sums_are_those_of_each_token(context_length: int, batch_samples: int) -> None:
    draw = np.random.default_rng(0)
    # documents of 1, 2, 6, 0, 11 and more tokens, the shortest an end-of-text alone
    lengths = [1, 2, 6, 0, 11, 30]
    ids = np.concatenate([[*draw.integers(0, END, n), END] for n in lengths]).astype(np.uint32)
    stream = TokenStream([ids[:13], ids[13:]])
    loader = WindowLoader(stream, context_length=context_length, seed=None, end_of_text=END)
    windows = min(loader.windows, 40 // context_length)
    sums = sums_of_validation(
        stream, windows=windows, context_length=context_length, end_of_text=END
    )
    totals = score(
        KnownNats(),
        loader,
        windows=windows,
        batch_samples=batch_samples,
        byte_lengths=np.ones(END + 1),
        observe=sums.add,
    )
    losses = sums.over_ranks()

    nats, tokens, document = [0.0] * 9, [0] * 9, 0
    for previous, target in pairwise(ids[: windows * context_length + 1]):
        document += previous == END
        nats[document] += 1 + target / 100
        tokens[document] += 1
    scored = [d for d in range(9) if tokens[d]]
    assert losses.tokens_D.tolist() == [tokens[d] for d in scored]
    np.testing.assert_allclose(losses.nats_D, [nats[d] for d in scored], rtol=1e-14)
    assert losses.tokens_D.sum() == totals.tokens
    assert losses.nats_D.sum() == pytest.approx(totals.nats, rel=1e-14)


def test_a_file_holds_all_digits(tmp_path: Path) -> None:
    assert read_document_losses(tmp_path) is None
    written = DocumentLosses(np.array([1 / 3, 1e9 / 7]), np.array([1, 2**40]))
    written.write(tmp_path)
    read = read_document_losses(tmp_path)
    assert read is not None
    assert read.nats_D.tolist() == written.nats_D.tolist()
    assert read.tokens_D.tolist() == written.tokens_D.tolist()
    (tmp_path / FILE).write_bytes((tmp_path / FILE).read_bytes()[:-3])
    with pytest.raises(UserError, match="unreadable"):
        read_document_losses(tmp_path)


def test_bfloat16_losses_are_summed_in_double() -> None:
    stream = TokenStream([np.array([1] * 3001 + [END], dtype=np.uint32)])
    loader = WindowLoader(stream, context_length=1000, seed=None, end_of_text=END)
    sums = sums_of_validation(stream, windows=3, context_length=1000, end_of_text=END)
    for window in range(3):
        nats_BT = torch.full((1, 1000), 1.0078125, dtype=torch.bfloat16)
        sums.add([window], loader.batch([window]), slice(0, 1000), nats_BT)
    assert sums.over_ranks().nats_D.tolist() == [3000 * 1.0078125]


def test_stretches_of_a_window_add_up_to_it() -> None:
    # documents end within, at the end and at the beginning of a stretch
    ids = np.array([1, END, 2, 3, END, 4, 5, END, END, 6, 7, 8, 2], dtype=np.uint32)
    stream = TokenStream([ids])
    batch = WindowLoader(stream, context_length=6, seed=None, end_of_text=END).batch([0, 1])
    nats_BT = torch.arange(12, dtype=torch.float64).reshape(2, 6)
    whole, parts = (
        sums_of_validation(stream, windows=2, context_length=6, end_of_text=END) for _ in range(2)
    )
    whole.add([0, 1], batch, slice(0, 6), nats_BT)
    for stretch in (slice(0, 2), slice(2, 3), slice(3, 6)):
        parts.add([0, 1], batch, stretch, nats_BT[:, stretch])
    expected = [0, 1 + 2 + 3, 4 + 5 + 6, 7, 8 + 9 + 10 + 11]
    assert whole.over_ranks().nats_D.tolist() == expected
    assert parts.over_ranks().nats_D.tolist() == expected
    assert parts.over_ranks().tokens_D.tolist() == [1, 3, 3, 1, 4]
