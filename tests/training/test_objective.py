"""The cross entropy against torch's own, its gradients, and what it keeps in memory."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from slayformer.model.gpt2 import GPT2
from slayformer.training import objective
from slayformer.training.objective import IGNORE_INDEX, LanguageModelObjective, token_losses

# tokens, width, vocabulary, padded rows
SHAPES = [(1, 1, 2, 2), (7, 5, 11, 16), (33, 17, 1001, 1024), (65, 3, 513, 513)]


def token_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, vocabulary_size: int
) -> torch.Tensor:
    return token_losses(hidden, weight, targets, vocabulary_size, 0.0)[0]


@pytest.fixture(params=["dense", "blocked"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Force the plain or the blocked path, the latter with many uneven blocks."""
    limit = 0 if request.param == "blocked" else 2**40
    monkeypatch.setattr(objective, "DENSE_LIMIT_BYTES", limit)
    monkeypatch.setattr(objective, "SMALLEST_BLOCK", 7)
    monkeypatch.setattr(objective, "BLOCK_BYTES", {"cpu": 1})
    return request.param


def draw(shape: tuple[int, int, int, int], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    tokens, width, vocabulary, rows = shape
    generator = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, width, generator=generator, dtype=torch.float64)
    weight = torch.randn(rows, width, generator=generator, dtype=torch.float64) * 2
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator)
    targets[::5] = IGNORE_INDEX
    targets[0] = vocabulary - 1
    upstream = torch.randn(tokens, generator=generator, dtype=torch.float64)
    return hidden.to(dtype), weight.to(dtype), targets, upstream.to(dtype)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_loss_and_gradients_equal_torch(
    path: str, shape: tuple[int, int, int, int], dtype: torch.dtype, tolerance: float
) -> None:
    hidden, weight, targets, upstream = draw(shape, dtype)
    vocabulary = shape[2]
    exact = [t.double().requires_grad_() for t in (hidden, weight)]
    logits = exact[0] @ exact[1][:vocabulary].t()
    expected = F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="none")
    expected_gradients = torch.autograd.grad(expected, exact, upstream.double())

    own = [t.clone().requires_grad_() for t in (hidden, weight)]
    nats = token_cross_entropy(own[0], own[1], targets, vocabulary)
    gradients = torch.autograd.grad(nats, own, upstream)
    assert nats.dtype == dtype
    for value, wanted in zip((nats, *gradients), (expected, *expected_gradients), strict=True):
        scale = max(1.0, float(wanted.detach().abs().max()))
        torch.testing.assert_close(value.double(), wanted, rtol=0, atol=tolerance * scale)
    # padded rows have no part in it
    assert torch.count_nonzero(gradients[1][vocabulary:]) == 0
    assert torch.count_nonzero(nats[targets == IGNORE_INDEX]) == 0


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_z_loss_and_gradients_equal_the_plain_form(
    path: str, shape: tuple[int, int, int, int], dtype: torch.dtype, tolerance: float
) -> None:
    hidden, weight, targets, upstream = draw(shape, dtype)
    vocabulary = shape[2]
    exact = [t.double().requires_grad_() for t in (hidden, weight)]
    logits = exact[0] @ exact[1][:vocabulary].t()
    real = targets != IGNORE_INDEX
    z = torch.where(real, 0.3 * torch.log(torch.exp(logits).sum(1)) ** 2, 0.0)
    nats = F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="none")
    expected_gradients = torch.autograd.grad(nats + z, exact, upstream.double())

    own = [t.clone().requires_grad_() for t in (hidden, weight)]
    losses, own_z = token_losses(own[0], own[1], targets, vocabulary, 0.3)
    gradients = torch.autograd.grad(losses, own, upstream)
    assert not own_z.requires_grad
    found = (losses, own_z, *gradients)
    for value, wanted in zip(found, (nats + z, z, *expected_gradients), strict=True):
        scale = max(1.0, float(wanted.detach().abs().max()))
        torch.testing.assert_close(value.double(), wanted, rtol=0, atol=tolerance * scale)
    assert torch.count_nonzero(losses[~real]) == torch.count_nonzero(own_z[~real]) == 0


def test_z_loss_counts_in_training_alone(train_config: Any) -> None:
    config = train_config()
    model = GPT2(config.model, config.attention, vocabulary_size=257, seed=0)
    ids = torch.arange(32).view(2, 16)
    with_z, without = (LanguageModelObjective(model, "fp32", z) for z in (0.5, 0.0))
    added = with_z(ids, ids) - without(ids, ids)
    squares = model.logits(model(ids)[0]).logsumexp(-1) ** 2
    torch.testing.assert_close(added, 0.5 * squares, rtol=1e-4, atol=1e-5)
    assert with_z.z_nats is not None
    assert float(with_z.z_nats) == pytest.approx(0.5 * squares.sum().item(), rel=1e-5)
    assert without.z_nats is None
    with_z.eval()
    assert torch.equal(with_z(ids, ids), without(ids, ids))
    assert with_z.z_nats is None


def test_padded_rows_have_no_probability(path: str) -> None:
    hidden, weight, targets, _ = draw((33, 17, 1001, 1024), torch.float32)
    before = token_cross_entropy(hidden, weight, targets, 1001)
    weight[1001:] = 100.0
    assert torch.equal(before, token_cross_entropy(hidden, weight, targets, 1001))


def test_uniform_logits_over_the_gpt2_vocabulary(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objective, "SMALLEST_BLOCK", 5000)
    nats = token_cross_entropy(torch.ones(3, 8), torch.zeros(50304, 8), torch.arange(3), 50257)
    assert nats.tolist() == pytest.approx([math.log(50257)] * 3, rel=1e-6)
    assert nats[0].item() == pytest.approx(10.8249, abs=1e-4)


def test_large_logits_stay_finite(path: str) -> None:
    hidden = torch.tensor([[1e4], [-1e4]], requires_grad=True)
    weight = torch.linspace(-1, 1, 64)[:, None].requires_grad_()
    nats = token_cross_entropy(hidden, weight, torch.tensor([63, 63]), 64)
    assert nats.tolist() == pytest.approx([0.0, 2e4])
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(nats.sum(), (hidden, weight)))


def test_nothing_but_ignored_targets_gives_zero_loss_and_gradients(path: str) -> None:
    hidden, weight, targets, _ = draw((7, 5, 11, 16), torch.float32)
    hidden.requires_grad_()
    weight.requires_grad_()
    nats = token_cross_entropy(hidden, weight, torch.full_like(targets, IGNORE_INDEX), 11)
    gradients = torch.autograd.grad(nats.sum(), (hidden, weight))
    assert torch.count_nonzero(nats) == 0
    assert all(torch.count_nonzero(gradient) == 0 for gradient in gradients)


def test_bf16_autocast_is_close_and_keeps_fp32_sums(path: str) -> None:
    hidden, weight, targets, _ = draw((33, 17, 1001, 1024), torch.float32)
    hidden, weight = hidden / 4, (weight / 4).requires_grad_()
    exact = token_cross_entropy(hidden, weight, targets, 1001)
    (exact_gradient,) = torch.autograd.grad(exact.sum(), weight)
    with torch.autocast("cpu", torch.bfloat16):
        nats = token_cross_entropy(hidden, weight, targets, 1001)
    (gradient,) = torch.autograd.grad(nats.sum(), weight)
    assert nats.dtype == gradient.dtype == torch.float32
    # products rounded to 8 bits: neither equal to fp32 nor far from it
    assert 1e-5 < (nats - exact).abs().max() < 3e-2
    error = (gradient - exact_gradient).norm() / exact_gradient.norm()
    assert 1e-4 < error < 2e-2


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements any operation returned."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def test_blocked_path_never_holds_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objective, "DENSE_LIMIT_BYTES", 2**18)
    monkeypatch.setattr(objective, "BLOCK_BYTES", {"cpu": 2**17})
    tokens, width, vocabulary = 128, 8, 4001
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator).requires_grad_()
    weight = torch.randn(vocabulary, width, generator=generator).requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator)
    with LargestTensor() as largest:
        token_cross_entropy(hidden, weight, targets, vocabulary).sum().backward()
    # 2^17 bytes of fp32 are 256 columns of 128 tokens; the weight has 4001 x 8 elements
    assert largest.elements == 128 * 256
    assert largest.elements < tokens * vocabulary // 10
