"""The ablation of maps of x²: its exact and uniform rows, equal budgets, published protocol."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slayformer.paper import ablation
from slayformer.paper.ablation import LABELS, SCALES, Scale, attend, claims, errors, options
from slayformer.paper.item import FAILS, HOLDS, Request
from slayformer.presets import make_attention

TINY = Scale(tokens=24, exponential=4, polynomial=4)


def test_exact_uniform_and_quadrature_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    found = errors(TINY, biases=False, seed=0)
    assert list(found) == list(LABELS)
    exact = found["exact"]
    assert (exact["relative_error"], exact["squared_error"]) == (0, 0)
    assert exact["cosine"] == pytest.approx(1)
    assert found["anchor"]["relative_error"] > 0.3
    # at enough nodes the quadrature is the kernel, for these cosines below 0.9
    assert found["quadrature"]["relative_error"] > 1e-3
    monkeypatch.setattr(ablation, "NODES", 64)
    q, k, v = torch.randn(3, 2, 4, 24, 16, generator=torch.Generator().manual_seed(0))
    exact_y, near = (attend(name, TINY, 0)(q, k, v) for name in ("exact", "quadrature"))
    assert (exact_y - near).norm() < 1e-3 * exact_y.norm()
    uniform = v.cumsum(2) / torch.arange(1, 25)[:, None]
    torch.testing.assert_close(attend("uniform", TINY, 0)(q, k, v), uniform, rtol=1e-5, atol=1e-6)


def test_every_method_has_the_same_number_of_features() -> None:
    counts = {}
    for method in LABELS:
        if method in ("exact", "quadrature", "exact_poly", "uniform"):
            continue
        attention: Any = make_attention(
            "slay", num_heads=1, head_dim=16, max_sequence_length=8, **options(method, TINY)
        )
        counts[method] = attention.feature_count
    assert set(counts.values()) == {2 * 4 * 4}


def test_tables_say_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SCALES:
        monkeypatch.setitem(SCALES, name, TINY)
    data = ablation.compute(Request("quick", 2, 1, tmp_path))
    large, sweep = ablation.tables(data)
    assert large.rows[0][:3] == ["exact spherical Yat", "0.000 ± 0.000", "1.000 ± 0.000"]
    # the published exact row, its mistake as printed
    assert large.rows[0][6:8] == ["0.789", "0.732"]
    anchor = data["scales"]["large"]["bias-free"]["anchor"]["relative_error"]
    assert large.rows[3][1].startswith(f"{sum(anchor) / 2:.3f} ± ")
    assert sweep.rows[3][-3:] == ["0.663", "0.567", "0.494"]
    assert len(sweep.columns) == 10
    assert "mean of v" in sweep.note
    # the verdicts follow the data
    by_text = {claim.text: claim for claim in claims(data)}
    unstable = next(claim for text, claim in by_text.items() if "unstable" in text)
    for name in ("tensor_sketch", "random_maclaurin"):
        data["scales"]["large"]["bias-free"][name]["relative_error"] = [0.5, 0.6]
    changed = next(claim for claim in claims(data) if claim.text == unstable.text)
    assert changed.verdict == FAILS
    assert "0.55" in changed.measured


@pytest.mark.slow
def test_published_protocol() -> None:
    # values of independent code, which the published ones with biases are near to
    methods = ("exact", "anchor", "uniform", "tensor_sketch", "random_maclaurin")
    expected = {False: (0.841, 0.789, 0.741), True: (0.671, 0.574, 0.479)}
    for biases, values in expected.items():
        for scale, value in zip(SCALES.values(), values, strict=True):
            rows = [errors(scale, biases=biases, seed=s, methods=methods) for s in range(2)]
            mean = {
                name: sum(row[name]["relative_error"] for row in rows) / len(rows)
                for name in methods
            }
            assert mean["exact"] == 0
            assert mean["anchor"] == pytest.approx(value, abs=0.05)
            assert 0.5 < mean["uniform"] < 1
            assert min(mean["tensor_sketch"], mean["random_maclaurin"]) > 10


def test_the_verdict_on_the_published_numbers() -> None:
    """Data like the published table would make its claims hold."""
    row = {"relative_error": [0.5], "cosine": [0.8], "squared_error": [1e-3], "latency_ms": [5.0]}
    data: Any = {"seeds": 1, "scales": {}}
    for scale, anchor in zip(SCALES, (0.663, 0.567, 0.494), strict=True):
        rows = {name: dict(row) for name in LABELS}
        rows["anchor"] = {**row, "relative_error": [anchor]}
        rows["hadamard"] = rows["uniform"] = {**row, "relative_error": [0.9]}
        rows["laplace"] = {**row, "latency_ms": [20.0]}
        rows["nystrom"] = {**row, "relative_error": [70.0]}
        rows["tensor_sketch"] = rows["random_maclaurin"] = {**row, "relative_error": [1e5]}
        data["scales"][scale] = {"bias-free": rows, "biases": rows}
    verdicts = [claim.verdict for claim in claims(data)]
    assert verdicts[1:] == [HOLDS] * 5
    # the thresholds stand in the claims
    rows["anchor"]["relative_error"], rows["uniform"]["relative_error"] = [0.8], [0.9]
    for error, verdict in ((1.01, HOLDS), (0.99, FAILS)):
        rows["nystrom"]["relative_error"] = [error]
        nystrom = claims(data)[4]
        assert nystrom.verdict == verdict
        assert "an error 1.25× theirs or more" in nystrom.text
        assert nystrom.measured.endswith(f"{error / 0.8:.2f}× (mean of v 0.90)")
