from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from slayformer.data.loader import WindowLoader
from slayformer.data.shards import TokenStream
from slayformer.errors import DataError

T = 7
# two pieces; 143 tokens give 20 windows, two tokens are left over
STREAM = TokenStream([np.arange(60, dtype=np.uint16), np.arange(60, 143, dtype=np.uint16)])


def loader(seed: int | None = 0, **options) -> WindowLoader:
    options = {"context_length": T, "end_of_text": 999, **options}
    return WindowLoader(STREAM, seed=seed, **options)


def first_tokens(indices, seed=0) -> list[int]:
    return loader(seed).batch(indices).ids_BT[:, 0].tolist()


def test_windows_and_targets():
    windows = loader(None)
    assert windows.windows == 20
    batch = windows.batch([0, 8, 19, 20])
    starts = torch.tensor([0, 56, 133, 0])
    assert batch.ids_BT.dtype == batch.targets_BT.dtype == torch.int64
    assert torch.equal(batch.ids_BT, starts[:, None] + torch.arange(T))
    assert torch.equal(batch.targets_BT, batch.ids_BT + 1)
    assert batch.document_ids_BT is None
    assert batch.position_ids_BT is None


@pytest.mark.parametrize("rows", [1, 2])
def test_masking_targets_leaves_the_ids(rows):
    batch = loader(None).batch(range(rows))
    before = batch.ids_BT.clone()
    batch.targets_BT[:] = -100
    assert torch.equal(batch.ids_BT, before)


@pytest.mark.parametrize(("tokens", "windows"), [(8, 1), (14, 1), (15, 2)])
def test_last_window_needs_its_last_target(tokens, windows):
    stream = TokenStream([np.arange(tokens)])
    assert WindowLoader(stream, context_length=T, seed=None, end_of_text=9).windows == windows


@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_too_short_for_a_window(tokens):
    stream = TokenStream([np.arange(tokens)], label="the text in FOLDER")
    match = rf"the text in FOLDER holds {tokens} tokens, fewer than one window of 8"
    with pytest.raises(DataError, match=match):
        WindowLoader(stream, context_length=T, seed=0, end_of_text=9)


def test_every_epoch_has_each_window_once_in_its_own_order():
    epochs = [first_tokens(range(20 * e, 20 * e + 20)) for e in range(4)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(0, 140, 7))
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_order_is_numpys_permutation_and_follows_the_seed():
    for seed, epoch in ((0, 0), (0, 3), (5, 1)):
        generator = np.random.Generator(np.random.PCG64([seed, epoch]))
        expected = generator.permutation(np.arange(20, dtype=np.uint32)) * T
        assert first_tokens(range(20 * epoch, 20 * epoch + 20), seed) == expected.tolist()
    assert first_tokens(range(20), seed=1) != first_tokens(range(20), seed=2)


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("samples", [1, 5])
def test_any_partition_sees_the_same_samples(ranks, samples):
    together = first_tokens(range(105))
    seen: Counter[int] = Counter()
    for rank in range(ranks):
        own = loader()
        mine = range(rank, 105, ranks)
        for start in range(0, len(mine), samples):
            batch = own.batch(mine[start : start + samples])
            seen.update(batch.ids_BT[:, 0].tolist())
    assert seen == Counter(together)


def test_resume_at_any_index():
    together = first_tokens(range(50))
    for index in (0, 1, 19, 20, 33):
        assert first_tokens(range(index, 50)) == together[index:]
    # back and forth over the border of two epochs
    again = loader()
    assert [int(again.batch([i]).ids_BT[0, 0]) for i in (21, 3, 22, 3)] == [
        together[i] for i in (21, 3, 22, 3)
    ]


def test_documents_by_hand():
    end = 9
    tokens = [1, 2, 9, 3, 4, 5, 9, 9, 6, 7, 8, 9, 1]
    stream = TokenStream([np.array(tokens)])
    isolated = WindowLoader(
        stream, context_length=6, seed=None, end_of_text=end, isolate_documents=True
    )
    batch = isolated.batch([0, 1])
    assert batch.ids_BT.tolist() == [[1, 2, 9, 3, 4, 5], [9, 9, 6, 7, 8, 9]]
    assert batch.targets_BT.tolist() == [[2, 9, 3, 4, 5, 9], [9, 6, 7, 8, 9, 1]]
    assert batch.document_ids_BT is not None
    assert batch.position_ids_BT is not None
    assert batch.document_ids_BT.tolist() == [[0, 0, 0, 1, 1, 1], [0, 1, 2, 2, 2, 2]]
    assert batch.position_ids_BT.tolist() == [[0, 1, 2, 0, 1, 2], [0, 0, 0, 1, 2, 3]]
    assert batch.document_ids_BT.dtype == batch.position_ids_BT.dtype == torch.int64


@pytest.mark.parametrize("isolate", [False, True])
def test_stretches_of_a_batch_are_its_columns(isolate: bool) -> None:
    batch = loader(end_of_text=10, isolate_documents=isolate).batch(range(20))
    first, second = batch.stretch(slice(0, 3)), batch.stretch(slice(3, T))
    for name in ("ids_BT", "targets_BT", "document_ids_BT", "position_ids_BT"):
        whole, *parts = (getattr(b, name) for b in (batch, first, second))
        if whole is None:
            assert parts == [None, None]
        else:
            assert [part.shape[1] for part in parts] == [3, 4]
            assert torch.equal(torch.cat(parts, dim=1), whole)
