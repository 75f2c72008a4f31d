"""The figures of the exact kernel, its quadrature, the plane and the sphere, in closed form."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from slayformer.paper import kernel_curves, plane, quadrature, sphere
from slayformer.paper.item import FAILS, HOLDS, HOLDS_AT, Request
from slayformer.paper.quadrature import expected_contributions, quadrature_kernel, relative_error
from slayformer.paper.run import plain


def request(folder: Path) -> Request:
    """Return a small request."""
    return Request("quick", 2, 1, folder)


def test_quadrature_by_hand() -> None:
    # one node: t = α = 1, so w e^{2sx} = e^{2x/C}/C
    c = 2.001
    assert relative_error(0.0, 1, "gauss_laguerre") == pytest.approx(0, abs=1e-6)
    expected = math.exp(1 / c) / c * (c - 1) - 1
    assert relative_error(0.5, 1, "gauss_laguerre") == pytest.approx(expected)
    value = quadrature_kernel(torch.tensor([-1.0]).double(), 1, 1e-3)
    assert float(value) == pytest.approx(math.exp(-2 / c) / c)
    # what the paper's default of three nodes does
    for cosine, error in ((0.5, -0.003), (0.8, -0.13), (0.9, -0.38), (1.0, -0.995)):
        assert relative_error(cosine, 3, "gauss_laguerre") == pytest.approx(error, abs=0.005)


def test_expected_contribution_in_three_dimensions() -> None:
    # there the cosine is uniform: ½ ∫ x² e^{ax} dx with a = 2/C
    c = 2.001
    a = 2 / c

    def antiderivative(x: float) -> float:
        return math.exp(a * x) * (x * x / a - 2 * x / a**2 + 2 / a**3)

    expected = (antiderivative(1) - antiderivative(-1)) / 2 / c
    assert expected_contributions(1, 3)[0] == pytest.approx(expected)
    # in 64 dimensions x² has the mean 1/64, and e^{2sx} hardly matters
    assert expected_contributions(1, 64)[0] == pytest.approx(1 / 64 / c, rel=0.05)


def test_quadrature_claims(tmp_path: Path) -> None:
    data = quadrature.compute(request(tmp_path))
    assert data["errors"]["fitted"][2][data["cosines"].index(0.8)] < 0.05
    assert len(quadrature.draw(data)) == 4
    decay, three, _ = quadrature.claims(data)
    assert decay.verdict.startswith(f"{HOLDS_AT} x ≤ 0.9")
    assert three.verdict == f"{HOLDS_AT} x ≤ 0.5"
    # verdicts follow from the figures
    rows = data["errors"]["gauss_laguerre"]
    for row, errors in enumerate(([0.1] * 9, *([0.1 / 2**n] * 9 for n in range(1, len(rows))))):
        rows[row] = errors
    assert quadrature.claims(data)[0].verdict == HOLDS
    data["errors"]["gauss_laguerre"] = [[0.1] * 9] * len(rows)
    assert quadrature.claims(data)[0].verdict == FAILS


def test_kernel_curves(tmp_path: Path) -> None:
    data = kernel_curves.compute(request(tmp_path))
    x = data["cosines"]
    np.testing.assert_allclose(data["responses"]["spherical"], x**2 / (2.001 - 2 * x), rtol=1e-9)
    # the mechanism's own scores, for vectors of length √64
    np.testing.assert_allclose(data["responses"]["softmax_typical"], np.exp(8 * x), rtol=1e-9)
    # the slope by finite differences, where they are good
    inner = np.linspace(-0.9, 0.9, 19)
    step = 1e-6
    after, before = (kernel_curves.responses(inner + d)["spherical"] for d in (step, -step))
    slope = np.abs(after - before) / (2 * step)
    np.testing.assert_allclose(
        kernel_curves.slopes(inner)["spherical"], slope, rtol=1e-5, atol=1e-9
    )
    assert len(kernel_curves.draw(data)) == 3
    assert len(kernel_curves.claims(data)) == 4
    unbounded = {**data, "responses": {**data["responses"], "spherical": [1001.0]}}
    verdicts = [kernel_curves.claims(one)[0].verdict for one in (data, unbounded)]
    assert verdicts == [f"{HOLDS_AT} vectors of free length", FAILS]


def test_plane(tmp_path: Path) -> None:
    points = torch.tensor([[2.0, 0.0], [0.0, 3.0], [-1.0, 0.1]]).double()
    keys = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-2.0, 0.0]]).double()
    owner, share = plane.owners("yat_spherical", points, keys, 0)
    assert owner.tolist() == [0, 1, 2]
    assert float(share[0]) > 0.99
    # softmax: the largest product wins, whatever the direction
    point = torch.tensor([[1.0, 0.9]]).double()
    keys = torch.tensor([[1.0, 1.0], [5.0, 0.0]]).double()
    assert plane.owners("softmax", point, keys, 0)[0].tolist() == [1]
    assert plane.owners("yat_spherical", point, keys, 0)[0].tolist() == [0]

    data = plane.compute(request(tmp_path))
    assert data["agreement"]["yat_spherical"] == [1, 1]
    (picture,) = plane.draw(json.loads(json.dumps(data, default=plain)))
    picture.figure.savefig(tmp_path / "plane.png")
    assert len(plane.tables(data)[0].rows) == len(plane.MECHANISMS)


def test_sphere(tmp_path: Path) -> None:
    data = sphere.compute(request(tmp_path))
    assert data["uniform"] == pytest.approx((1 - math.cos(math.pi / 6)) / 2, rel=1e-3)
    # ∫ x²/(C − 2x) dx over the cap and over the sphere
    c = 2.001

    def antiderivative(x: float) -> float:
        return -x * x / 4 - c * x / 4 - c * c / 8 * math.log(c - 2 * x)

    whole = antiderivative(1) - antiderivative(-1)
    share = (antiderivative(1) - antiderivative(math.cos(math.pi / 6))) / whole
    assert data["found"]["yat_spherical"]["cap_share"] == pytest.approx(share, abs=0.02)
    area = np.sin(np.deg2rad(data["angles"]))
    for part in data["found"].values():
        mean = np.trapezoid(part["profile"] * area) / np.trapezoid(area)
        assert mean == pytest.approx(1)
    (claim,) = sphere.claims(data)
    assert claim.verdict in (HOLDS, f"{HOLDS_AT} the exact kernels")
    # drawn, the surfaces take long: the profiles are enough here
    sphere.draw(data)[1].figure.savefig(tmp_path / "polar.png")
