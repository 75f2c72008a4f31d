"""The scorer against known per-token losses, batch sizes and world sizes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from slayformer.config import ModelConfig
from slayformer.config_loading import load_attention_config
from slayformer.data.loader import WindowLoader
from slayformer.data.shards import TokenStream
from slayformer.errors import DataError
from slayformer.evaluation.loss import LossTotals, score
from slayformer.model.gpt2 import GPT2
from slayformer.training.objective import LanguageModelObjective

ONE_BYTE_EACH = np.ones(50257, dtype=np.int64)


def windows_of(ids: list[int], context_length: int) -> WindowLoader:
    stream = TokenStream([np.array(ids)])
    return WindowLoader(stream, context_length=context_length, seed=None, end_of_text=50256)


class KnownLosses(nn.Module):
    """An objective whose loss depends on the target alone."""

    def __init__(self, nats: list[float]) -> None:
        super().__init__()
        self.nats = torch.tensor(nats)

    def forward(self, ids_BT: Tensor, targets_BT: Tensor, *rest: Any) -> Tensor:
        assert not self.training
        assert not torch.is_grad_enabled()
        return self.nats[targets_BT.clamp_min(0)] * (targets_BT >= 0)


def test_loss_by_position_is_that_of_the_targets_there() -> None:
    # two windows of 6 targets: 0 1 0 0 1 1 and 0 0 1 1 0 0, at 2 and 8 nats
    loader = windows_of([0, 0, 1, 0, 0, 1, 1, 0, 0, 1, 1, 0, 0], context_length=6)
    objective = KnownLosses([2.0, 8.0])
    totals = score(objective, loader, windows=2, batch_samples=1, byte_lengths=ONE_BYTE_EACH)
    assert totals.nats_T == (4.0, 10.0, 10.0, 10.0, 10.0, 10.0)
    assert totals.tokens_T == (2, 2, 2, 2, 2, 2)
    assert totals.by_position() == [
        {"first": 0, "last": 0, "tokens": 2, "loss": 2.0},
        {"first": 1, "last": 1, "tokens": 2, "loss": 5.0},
        {"first": 2, "last": 3, "tokens": 4, "loss": 5.0},
        {"first": 4, "last": 5, "tokens": 4, "loss": 5.0},
    ]


def test_tokens_count_equally_whatever_the_batches() -> None:
    # 1,000 targets at 2 nats and 10 at 8 nats; the mean of the two means would be 5
    loader = windows_of([0] * 1001 + [1] * 10, context_length=101)
    totals = {
        score(
            KnownLosses([2.0, 8.0]),
            loader,
            windows=10,
            batch_samples=batch_samples,
            byte_lengths=np.array([3, 1]),
        )
        for batch_samples in (1, 3, 7, 10, 64)
    }
    (only,) = totals
    assert (only.nats, only.tokens, only.bytes) == (2080.0, 1010, 3010)
    assert only.loss == pytest.approx(2.0594059406)
    assert only.perplexity == pytest.approx(7.8413099)
    assert only.bits_per_byte == pytest.approx(2080 / 0.69314718056 / 3010)


def test_uniform_logits_over_the_gpt2_vocabulary() -> None:
    shape = ModelConfig(layers=1, heads=1, width=4, context_length=7)
    options = load_attention_config({"name": "softmax"})
    model = GPT2(shape, options, vocabulary_size=50257, seed=0)
    # no embedding, no difference between tokens
    nn.init.zeros_(model.token_embedding.weight)
    ids = np.random.default_rng(0).integers(0, 50257, size=7 * 3 + 1).tolist()
    totals = score(
        LanguageModelObjective(model, "fp32"),
        windows_of(ids, context_length=7),
        windows=3,
        batch_samples=2,
        byte_lengths=ONE_BYTE_EACH,
    )
    assert totals.tokens == 21
    assert totals.loss == pytest.approx(10.8249, abs=5e-5)
    assert totals.perplexity == pytest.approx(50257, rel=1e-5)
    assert totals.bits_per_byte == pytest.approx(15.617, abs=5e-4)


def test_sums_are_wider_than_fp32() -> None:
    # in fp32 a sum of 2^25 nats no longer notices single nats
    loader = windows_of([0, 1] + [0] * 299, context_length=3)
    totals = score(
        KnownLosses([1.0, 2.0**25]),
        loader,
        windows=100,
        batch_samples=100,
        byte_lengths=np.array([1, 1]),
    )
    assert totals.nats == 2**25 + 299


def test_only_the_asked_windows_are_scored_and_reported() -> None:
    loader = windows_of([0, 0, 0, 1, 1, 1, 1], context_length=2)
    told: list[int] = []
    totals = score(
        KnownLosses([1.0, 100.0]),
        loader,
        windows=1,
        batch_samples=5,
        byte_lengths=np.array([1, 1]),
        progress=told.append,
    )
    assert (totals.nats, totals.tokens, totals.bytes) == (2.0, 2, 2)
    assert told == [1]


@pytest.mark.parametrize("training", [True, False])
def test_mode_is_restored_even_after_a_failure(training: bool) -> None:
    objective = KnownLosses([1.0]).train(training)
    loader = windows_of([0] * 9, context_length=4)
    score(objective, loader, windows=2, batch_samples=1, byte_lengths=np.array([1]))
    assert objective.training is training
    with pytest.raises(IndexError):
        score(
            objective,
            windows_of([5] * 9, 4),
            windows=2,
            batch_samples=1,
            byte_lengths=ONE_BYTE_EACH,
        )
    assert objective.training is training


@pytest.mark.parametrize("windows", [0, 3])
def test_windows_that_are_not_there_are_refused(windows: int) -> None:
    loader = windows_of([0] * 9, context_length=4)
    with pytest.raises(DataError, match=f"cannot score {windows} windows: there are 2"):
        score(
            KnownLosses([1.0]), loader, windows=windows, batch_samples=1, byte_lengths=ONE_BYTE_EACH
        )


def test_totals_without_text_or_with_a_huge_loss() -> None:
    assert math.isnan(LossTotals(nats=2.0, tokens=1, bytes=0).bits_per_byte)
    assert LossTotals(nats=1e6, tokens=1, bytes=1).perplexity == math.inf


@pytest.mark.slow
def test_same_result_on_one_two_and_three_processes(run_command: Any, tmp_path: Path) -> None:
    results = []
    for processes in (1, 2, 3):
        out = tmp_path / str(processes)
        out.mkdir()
        command = ["torchrun", "--standalone", f"--nproc-per-node={processes}"]
        finished = run_command([*command, "tests/evaluation/score_worker.py", str(out)])
        assert finished.code == 0, finished.stderr
        ranks = [json.loads(path.read_text()) for path in sorted(out.iterdir())]
        assert len(ranks) == processes
        # the same totals everywhere, after as many forward passes
        assert all(one == ranks[0] for one in ranks)
        results.append(ranks[0])
    # 10 windows in batches of 3: the last batch of three ranks leaves two of them without a window
    assert [result["forwards"] for result in results] == [4, 2, 2]
    assert {(r["tokens"], r["bytes"]) for r in results} == {(results[0]["tokens"], 50 * 2)}
    nats = np.random.default_rng(1).uniform(0, 9, size=40).astype(np.float32).astype(np.float64)
    targets = np.random.default_rng(2).integers(0, 40, size=51)[1:]
    for result in results:
        assert result["tokens"] == 50
        assert result["nats"] == pytest.approx(nats[targets].sum(), rel=1e-7)
