"""Figures 13 to 18 come from the real map: where the map changes, their data changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from slayformer.attention.features import Dense, Features
from slayformer.attention.kernels import gauss_laguerre
from slayformer.attention.polynomial import Anchor
from slayformer.attention.positive_features import ExponentialFeatures
from slayformer.attention.slay import QUADRATURES
from slayformer.evaluation.attention_sample import COSINES
from slayformer.paper import normalisers, reconstruction, selectivity
from slayformer.paper.item import Data, Request
from slayformer.paper.reconstruction import kernel_values
from slayformer.paper.run import plain

anchor_features = Anchor.features
exponential_features = ExponentialFeatures.features


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (reconstruction, selectivity, normalisers):
        monkeypatch.setattr(module, "HEAD_WIDTH", 8)
        monkeypatch.setattr(module, "TOKENS", 20)
    monkeypatch.setattr(selectivity, "SIMILARITIES", (0.0,))
    monkeypatch.setattr(selectivity, "SCATTER_POINTS", 100)
    families = {label: family[:2] for label, family in reconstruction.FAMILIES.items()}
    monkeypatch.setattr(reconstruction, "FAMILIES", families)


def figures(folder: Path) -> dict[str, np.ndarray]:
    """Return the data of SLAY in each figure."""
    request = Request("quick", 1, 1, folder)
    first: Data = reconstruction.compute(request)
    second: Data = selectivity.compute(request)
    return {
        "figure 13": first["maps"]["anchors, P = 8, D = 16 (SLAY)"]["median"],
        "figure 14": np.array(first["errors"]["more exponentials (P = 8)"]),
        "figure 15": np.array(second["by_similarity"]["slay"]),
        "figure 16": second["random"]["slay"],
        "figure 17": second["patterns"]["slay"].numpy(),
        "figure 18": np.array(second["outputs"]["slay"]["output"]),
    }


def cubed(self: Anchor, u_BHTD: Tensor, *tensors: Tensor) -> Features:
    """Return another map in the anchors' place."""
    return Dense(anchor_features(self, u_BHTD, *tensors).expand() ** 1.5)


def flat(self: ExponentialFeatures, u_BHTD: Tensor, *tensors: Tensor) -> Dense:
    """Return exponentials of half the exponent."""
    return Dense(exponential_features(self, u_BHTD, *tensors).phi_BHTM.sqrt())


def test_changed_maps_change_every_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = figures(tmp_path)
    again = figures(tmp_path)
    assert all(np.array_equal(before[name], again[name]) for name in before)
    changes: list[tuple[Any, str, Any]] = [
        (Anchor, "features", cubed),
        (ExponentialFeatures, "features", flat),
    ]
    for owner, name, value in changes:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            after = figures(tmp_path)
        for figure in before:
            assert not np.allclose(before[figure], after[figure], rtol=1e-3), (name, figure)
    with monkeypatch.context() as patch:
        fewer = lambda nodes, epsilon: gauss_laguerre(1, epsilon)  # noqa: E731
        patch.setitem(QUADRATURES, "gauss_laguerre", fewer)
        after = figures(tmp_path)
    for figure in before:
        assert not np.allclose(before[figure], after[figure], rtol=1e-3), figure


def test_kernel_values_stand_at_their_cosines() -> None:
    # with x² exact and many draws the features' mean is the quadrature at every cosine
    changes = {"polynomial": "exact", "exponential_features": 4096, "nodes": 1}
    values = kernel_values(changes, seed=0, width=4).mean(1)
    s, w = gauss_laguerre(1, 1e-3)
    expected = COSINES**2 * w[0] * np.exp(2 * s[0] * COSINES)
    np.testing.assert_allclose(values, expected, rtol=0.25, atol=2e-3)


def test_entropy_of_uniform_rows_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = selectivity.similar_heads(0.0, 20, 0)
    rows = selectivity.relative_entropy("uniform", heads, 0)
    np.testing.assert_allclose(rows, 1.0, atol=1e-6)
    monkeypatch.setattr(selectivity, "HEAD_WIDTH", 512)
    q, k = selectivity.similar_heads(0.7, 200, 0)
    cosine = torch.nn.functional.cosine_similarity(q, k, dim=-1)
    assert float(cosine.mean()) == pytest.approx(0.7, abs=0.02)


def test_pictures_and_claims(tmp_path: Path) -> None:
    request = Request("quick", 2, 1, tmp_path)
    for item in (reconstruction.ITEM, selectivity.ITEM, normalisers.ITEM):
        data = json.loads(json.dumps(item.compute(request), default=plain))
        assert len(item.draw(data)) == len(item.sources)
        assert item.claims(data)
        for picture in item.draw(data):
            picture.figure.savefig(tmp_path / f"{picture.name}.png")


def test_normalisers_of_signed_maps(tmp_path: Path) -> None:
    data = normalisers.compute(Request("quick", 3, 1, tmp_path))
    assert data["shares"]["slay"] == [0, 0, 0]
    assert data["smallest"]["yat_spherical"] > 0
    assert max(data["shares"]["slay_tensor_sketch"]) > 0
    for counts in data["histograms"].values():
        assert counts.sum() == pytest.approx(1)
