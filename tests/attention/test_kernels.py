"""The Yat kernels and their quadrature against closed forms."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slayformer.attention.kernels import (
    gauss_laguerre,
    spherical_yat,
    spherical_yat_derivative,
    unit,
)

EPSILON = 1e-3
X = torch.linspace(-1, 1, 201, dtype=torch.float64)


def test_spherical_yat_by_hand():
    # x = 1/2, ε = 1: 0.25 / (3 − 1)
    assert spherical_yat(torch.tensor(0.5), 1.0).item() == 0.125
    torch.testing.assert_close(
        spherical_yat(torch.tensor([1.0, -1.0, 0.0], dtype=torch.float64), EPSILON),
        torch.tensor([1 / EPSILON, 1 / (4 + EPSILON), 0.0], dtype=torch.float64),
    )


def test_spherical_yat_is_the_yat_kernel_of_unit_vectors():
    q, k = torch.randn(2, 50, 7, dtype=torch.float64)
    q, k = q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True)
    dot = (q * k).sum(-1)
    yat = dot.square() / ((q - k).square().sum(-1) + EPSILON)
    torch.testing.assert_close(spherical_yat(dot, EPSILON), yat)


def test_bounds_and_rounding_above_one():
    values = spherical_yat(X, EPSILON)
    assert values.min() >= 0
    assert values.max() <= 1 / EPSILON * (1 + 1e-9)
    # with ε = 1e-6 a cosine one rounding step above 1 must not turn the kernel negative
    above = torch.tensor(1 + 2e-6)
    assert spherical_yat(above, 1e-6) == spherical_yat(torch.tensor(1.0), 1e-6)


def test_derivative_equals_autograd():
    x = X.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(spherical_yat(x, EPSILON).sum(), x)
    torch.testing.assert_close(spherical_yat_derivative(X, EPSILON), gradient)


def test_gram_matrix_is_positive_semidefinite():
    points = unit(torch.randn(120, 5, dtype=torch.float64))
    eigenvalues = torch.linalg.eigvalsh(spherical_yat(points @ points.T, EPSILON))
    assert eigenvalues.min() > -1e-9 * eigenvalues.max()


@pytest.mark.parametrize("nodes", [1, 2, 3, 5, 8])
def test_quadrature_is_exact_for_polynomials(nodes):
    s, w = gauss_laguerre(nodes, EPSILON)
    c = 2 + EPSILON
    for power in range(2 * nodes):
        # ∫ e^{−sC} s^p ds = p! / C^{p+1}
        exact = np.prod(np.arange(1, power + 1, dtype=float)) / c ** (power + 1)
        assert np.sum(w * s**power) == pytest.approx(exact, rel=1e-12)


def test_quadrature_error_of_three_nodes_as_measured():
    s, w = gauss_laguerre(3, EPSILON)
    for x, percent in ((0.5, -0.3), (0.8, -13), (0.9, -38), (1.0, -99.5)):
        approximate = float(np.sum(w * x**2 * np.exp(2 * s * x)))
        exact = x**2 / (2 + EPSILON - 2 * x)
        assert 100 * (approximate / exact - 1) == pytest.approx(percent, abs=0.5)


def test_unit_vectors():
    u = torch.randn(40, 9, dtype=torch.float64) * 3
    torch.testing.assert_close(
        unit(u), u / (u.square().sum(-1, keepdim=True) + 1e-4).sqrt(), rtol=1e-12, atol=0
    )
    assert torch.equal(unit(torch.zeros(3)), torch.zeros(3))
    zero = torch.zeros(3, requires_grad=True)
    jacobian = torch.autograd.functional.jacobian(unit, zero)
    torch.testing.assert_close(jacobian, 100 * torch.eye(3))
