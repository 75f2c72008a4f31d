from __future__ import annotations

import math

import numpy as np
import pytest

from slayformer.data import unigram
from slayformer.data.shards import TokenStream


def test_closed_form(monkeypatch):
    # counts 3, 2, 0, 1 of 6 tokens; smoothed 4/10, 3/10, 1/10, 2/10
    train = TokenStream([np.array([0, 0, 1], np.uint16), np.array([3, 1, 0], np.uint16)])
    targets = [np.array([0, 2]), np.array([[1], [0], [3]])]
    expected = -(2 * math.log(0.4) + math.log(0.1) + math.log(0.3) + math.log(0.2)) / 5
    assert unigram.unigram_cross_entropy(train, targets, 4) == pytest.approx(expected, rel=1e-14)
    monkeypatch.setattr(unigram, "READ_TOKENS", 4)
    assert unigram.unigram_cross_entropy(train, targets, 4) == pytest.approx(expected, rel=1e-14)


def test_uniform_tokens_cost_the_logarithm_of_the_vocabulary():
    train = TokenStream([np.arange(50_257, dtype=np.uint16)])
    loss = unigram.unigram_cross_entropy(train, [np.arange(100)], 50_257)
    assert loss == pytest.approx(10.8249, abs=5e-5)


def test_counts_are_kept_and_fit_or_are_made_anew(tmp_path, monkeypatch):
    kept = tmp_path / "counts.npy"
    train = TokenStream([np.array([0, 0, 1, 3, 1, 0], np.uint16)])
    expected = unigram.unigram_cross_entropy(train, [np.arange(4)], 4)

    def loss(vocabulary_size=4):
        return unigram.unigram_cross_entropy(train, [np.arange(4)], vocabulary_size, kept)

    assert loss() == expected
    assert np.load(kept).tolist() == [3, 2, 0, 1]
    # of another vocabulary, of other tokens, damaged
    assert loss(5) != expected
    for content in (np.load(kept), np.array([3, 2, 0, 2]), np.array([3.0, 2, 0, 1])):
        np.save(kept, content)
        assert loss() == expected
    for content in (b"", b"no numbers", kept.read_bytes()[:-3]):
        kept.write_bytes(content)
        assert loss() == expected
    assert np.load(kept).tolist() == [3, 2, 0, 1]
    # and nothing is counted again
    monkeypatch.setattr(unigram, "_count", None)
    assert loss() == expected
    # where nobody may write they are counted again
    monkeypatch.undo()
    monkeypatch.setattr(unigram, "write_atomically", _refuse)
    assert loss(5) == unigram.unigram_cross_entropy(train, [np.arange(4)], 5)


def _refuse(path, chunks):
    raise PermissionError(13, "Permission denied")
