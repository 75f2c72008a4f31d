"""Which updates are judged bad, and what is decided, by hand-made losses."""

from __future__ import annotations

import math

import pytest
import torch

from slayformer.config import BadUpdateConfig
from slayformer.errors import UserError
from slayformer.training.bad_updates import RECENT, BadUpdates, poisoned


def after(config: BadUpdateConfig, losses: list[float]) -> BadUpdates:
    watch = BadUpdates(config)
    for loss in losses:
        watch.accept(loss)
    return watch


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_bad_whatever_came_before(value: float) -> None:
    watch = BadUpdates(BadUpdateConfig())
    assert watch.of_loss(value) is not None
    assert watch.of_gradient(value) is not None
    assert watch.of_loss(3.0) is watch.of_gradient(1e30) is None


def test_a_spike_is_measured_against_fifty_good_losses() -> None:
    losses = [4.0] * (RECENT - 1)
    assert after(BadUpdateConfig(spike_factor=1.5), losses).of_loss(100.0) is None
    watch = after(BadUpdateConfig(spike_factor=1.5), [9.0, *losses, 4.0])
    # the first, 9, is forgotten: the mean is 4
    assert watch.of_loss(6.0) is None
    fault = watch.of_loss(6.01)
    assert fault is not None
    assert fault.is_spike
    assert "6.0100 nats/token, from 4.0000" in fault.what
    assert after(BadUpdateConfig(), losses * 2).of_loss(1e9) is None
    # a resumed run judges as this one does
    assert BadUpdates(BadUpdateConfig(spike_factor=1.5), watch.state).of_loss(6.01) == fault


def test_the_policy_stops_or_skips_up_to_a_limit() -> None:
    stopping = BadUpdates(BadUpdateConfig())
    fault = stopping.of_loss(math.nan)
    assert fault is not None
    with pytest.raises(UserError, match=r"the loss became nan in update 7 \(samples 0 to 3\)"):
        stopping.decide(fault, "update 7 (samples 0 to 3)")
    watch = BadUpdates(BadUpdateConfig(not_finite="skip", most_skipped=2))
    for _ in range(2):
        watch.decide(fault, "update 7")
    watch.accept(3.0)
    for _ in range(2):
        watch.decide(fault, "update 8")
    with pytest.raises(UserError, match=r"most_skipped=2 updates were skipped in a row"):
        watch.decide(fault, "update 9")


def test_a_poisoned_loss_spoils_every_gradient() -> None:
    weight = torch.ones(3, requires_grad=True)
    fault = BadUpdates(BadUpdateConfig()).of_loss(math.inf)
    poisoned((weight * 2).sum(), fault).backward()
    assert weight.grad is not None
    assert bool(weight.grad.isnan().all())
    sound = torch.ones(3, requires_grad=True)
    poisoned((sound * 2).sum(), None).backward()
    assert sound.grad is not None
    assert sound.grad.tolist() == [2.0, 2.0, 2.0]
