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
