"""The theorems as numbers, the properties of Table 1, and the longest context."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from slayformer.attention.features import Dense
from slayformer.attention.positive_features import ExponentialFeatures
from slayformer.benchmark.memory import is_out_of_memory
from slayformer.errors import UserError
from slayformer.paper import context_length, properties, theory
from slayformer.paper.context_length import EXPLICIT, longest, search
from slayformer.paper.published import TABLE_1
from slayformer.paper.theory import anchor_means, bounds, exponential_means

exponential_features = ExponentialFeatures.features


def test_means_of_exponentials(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = exponential_means(features=4000, blocks=2)
    assert len(rows) == 12
    first = rows[2]
    assert (first["cosine"], first["target"]) == (0, 1)
    # the standard error from the estimator's variance: e^{4s} − 1 at x = 0
    assert first["error"] == pytest.approx(math.sqrt((math.exp(4 * first["node"]) - 1) / 8000))
    sure = [row for row in rows if row["error"] < 0.2 * row["target"]]
    assert all(abs(row["mean"] - row["target"]) < 4 * row["error"] for row in sure)

    def larger(self: ExponentialFeatures, u_BHTD: Tensor, *tensors: Tensor) -> Dense:
        return Dense(1.1 * exponential_features(self, u_BHTD, *tensors).phi_BHTM)

    # features that are off by 10 % are found out
    monkeypatch.setattr(ExponentialFeatures, "features", larger)
    wrong = exponential_means(features=4000, blocks=2)
    assert any(abs(row["mean"] - row["target"]) > 4 * row["error"] for row in wrong[:4])


def test_means_of_anchors_and_bounds() -> None:
    for row in anchor_means(20_000):
        assert abs(row["mean"] - row["target"]) < 4 * row["error"]
    by_epsilon = {row["epsilon"]: row for row in bounds()}
    for epsilon, row in by_epsilon.items():
        assert row["largest"] == pytest.approx(1 / epsilon)
        assert row["slope"] == pytest.approx(row["slope_bound"])
    # with u = 1 − x small the gradient is 2√(2u)/(ε + 2u)², largest at u = ε/6
    u = 1e-3 / 6
    largest = 2 * math.sqrt(2 * u) / (1e-3 + 2 * u) ** 2
    assert by_epsilon[1e-3]["gradient"] == pytest.approx(largest, rel=0.01)
    assert theory.autograd_gradient(400) == pytest.approx(largest, rel=0.02)
    for row in theory.smallest_eigenvalues(60):
        assert row["smallest"] > -1e-12 * row["largest"]


def test_theory_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(theory, "FEATURES", 1000)
    data = theory.compute(theory.Request("quick", 1, 1, tmp_path))
    statements, means = theory.tables(data)
    assert len(statements.rows) == len(theory.claims(data)) == 8
    assert len(means.rows) == 12 + 5
    assert statements.rows[-1][3].startswith("holds at x ≤ 0.9")
    data["bounds"][0]["largest"] *= 2
    assert theory.tables(data)[0].rows[4][3] == "does not hold"


def test_maps_of_table_1() -> None:
    rows = {name: properties.map_statistics(name, 150) for name in TABLE_1}
    unbiased = [name for name, row in rows.items() if properties.is_unbiased(row)]
    assert unbiased == ["exact", "tensor_sketch", "random_maclaurin"]
    # anchors with the scale of x² are above it by the constant ½, most surely where x² is 0
    assert float(rows["anchor"]["bias"][2]) == pytest.approx(0.5, abs=0.15)
    never_negative = [name for name, row in rows.items() if row["lowest"] >= -1e-12]
    assert never_negative == ["exact", "anchor"]
    assert rows["exact"]["features"] == 64 * 65 // 2


def test_properties_of_mechanisms() -> None:
    slay = properties.mechanism_statistics("slay", length=20)
    # features × (width + 1) numbers of four bytes
    assert slay["state_bytes"] == 4 * 384 * 65
    assert slay["state_ratio"] == 1
    assert slay["flops_ratio"] == pytest.approx(2, abs=0.15)
    assert slay["score_growth"] == pytest.approx(1, abs=0.01)
    assert slay["smallest_weight"] >= 0
    best = properties.mechanism_statistics("slay_best", length=20)
    # and 3 keys and values of width 64
    assert best["state_bytes"] == 4 * (330 * 65 + 3 * 128)
    assert best["state_ratio"] == 1
    softmax = properties.mechanism_statistics("softmax", length=20)
    assert softmax["flops_ratio"] == pytest.approx(4)
    assert softmax["state_ratio"] == 2
    assert softmax["score_growth"] > 1e6
    assert slay["leak"] == softmax["leak"] == 0
    assert properties.mechanism_statistics("slay_tensor_sketch", 20)["smallest_weight"] < 0


def test_memory_alone_is_called_memory() -> None:
    with pytest.raises(RuntimeError) as much:
        torch.empty(2**60, dtype=torch.uint8)
    with pytest.raises(RuntimeError) as shapes:
        torch.ones(2, 3) @ torch.ones(2, 3)
    assert is_out_of_memory(much.value)
    assert is_out_of_memory(RuntimeError("std::bad_alloc"))
    assert not is_out_of_memory(shapes.value)
    with pytest.raises(UserError, match=r"no_such_mechanism did not run: .*no_such_mechanism"):
        longest("no_such_mechanism", 2**28, 1.0)


def test_search_for_the_longest_context() -> None:
    tried = []

    def attempt(tokens: int) -> str:
        tried.append(tokens)
        return "worked" if tokens <= 5500 else "memory"

    assert search(attempt) == "memory"
    assert tried == [1024, 2048, 4096, 8192, 6144, 5120]
    # without a length that worked there is no gap to halve
    for outcome in ("time", "memory"):
        once = iter([outcome])
        assert search(lambda tokens, once=once: next(once)) == outcome  # type: ignore[misc]


@pytest.mark.parametrize(
    ("slay", "fused", "verdict"),
    [
        (30_000, 900, "holds"),
        (30_000, 1001, "holds at softmax with its matrix written out"),
        (23_000, 700, "not settled: 23× in 256 MiB"),
        (1000, 2000, "does not hold"),
    ],
)
def test_thirty_times_longer_is_thirty_times(slay: int, fused: int, verdict: str) -> None:
    found = {
        name: {"tokens": tokens, "ended": "memory"}
        for name, tokens in (("slay", slay), (EXPLICIT, 1000), ("softmax", fused))
    }
    (claim,) = context_length.claims({"found": found, "limit_bytes": 2**28})
    assert claim.verdict == verdict
    assert f"({slay / fused:.1f}×), stopped by memory" in claim.measured


@pytest.mark.slow
def test_memory_really_ends_it() -> None:
    # 32 MiB for 8 heads: a matrix of 1,024 tokens takes as much
    with pytest.raises(context_length.UserError, match="matrix written out did not run"):
        longest(EXPLICIT, 2**25, 60.0)
    explicit = longest(EXPLICIT, 2**27, 60.0)
    assert explicit["ended"] == "memory"
    # scores and weights are two matrices of 4 bytes a pair and head
    assert 2 * 4 * 8 * explicit["tokens"] ** 2 <= 2**27
    linear = longest("linear_elu", 2**27, 60.0)
    assert linear["ended"] == "memory"
    assert linear["tokens"] > 4 * explicit["tokens"]
    assert longest("linear_elu", 2**27, 1e-9)["ended"] == "time"
