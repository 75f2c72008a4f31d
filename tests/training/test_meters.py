"""Speed counts training alone; every part is told; memory is in bytes."""

from __future__ import annotations

import pytest
import torch

from slayformer.training import meters
from slayformer.training.devices import Device
from slayformer.training.meters import Meter, model_flops_utilisation, peak_memory_bytes

CPU = torch.device("cpu")


def test_an_update_is_split_and_speed_is_of_training_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(meters.time, "perf_counter", lambda: now)

    def take(meter: Meter, part: str, seconds: float) -> None:
        nonlocal now
        with meter.part(part):
            now += seconds

    before = {"data": 1.0, "forward_backward": 2.0, "optimizer": 1.0, "validation": 0.0}
    meter = Meter(CPU, tokens_before=1000, before={**before, "saving": 5.0})
    # two passes
    for part, seconds in (("data", 0.25), ("forward_backward", 0.5)) * 2:
        take(meter, part, seconds)
    take(meter, "optimizer", 0.5)
    assert meter.end_update(200) == {
        "tokens_per_second": 100.0,
        "milliseconds": 2000.0,
        "data_milliseconds": 500.0,
        "forward_backward_milliseconds": 1000.0,
        "optimizer_milliseconds": 500.0,
        "validation_milliseconds": 0.0,
        "saving_milliseconds": 0.0,
    }
    take(meter, "validation", 3.0)
    take(meter, "saving", 1.0)
    # the first update of a process also compiles, and tells nothing about the others
    assert meter.warm_tokens_per_second is None
    # what belongs to no part, a sample for instance, does not count
    now += 50
    take(meter, "forward_backward", 4.0)
    told = meter.end_update(200)
    assert (told["tokens_per_second"], told["milliseconds"]) == (50.0, 4000.0)
    assert (told["validation_milliseconds"], told["saving_milliseconds"]) == (3000.0, 1000.0)
    assert meter.tokens_per_second == (1000 + 200) / (4 + 4)
    assert meter.warm_tokens_per_second == 50.0
    take(meter, "optimizer", 1.0)
    meter.end_update(200)
    assert meter.warm_tokens_per_second == 400 / 5
    assert meter.seconds["saving"] == 6.0
    assert Meter(CPU).tokens_per_second == 0


def test_speed_leaves_out_the_first_update_of_every_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, state, tokens = 0.0, None, 0
    monkeypatch.setattr(meters.time, "perf_counter", lambda: now)
    # two processes; each compiles for a minute, then an update takes a second
    for _ in range(2):
        meter = Meter(CPU, tokens_before=tokens, before=state)
        for seconds in (61.0, 1.0, 1.0):
            with meter.part("forward_backward"):
                now += seconds
            meter.end_update(100)
        assert meter.tokens_per_second == pytest.approx(100)
        state, tokens = meter.state, meter.tokens
    assert meter.seconds["forward_backward"] == 126
    # one that has done its first update alone has nothing else to tell
    meter = Meter(CPU)
    with meter.part("optimizer"):
        now += 4
    meter.end_update(100)
    assert meter.tokens_per_second == 25


def test_utilisation_counts_the_backward_pass_twice() -> None:
    h100 = Device("H100", 1e15)
    # 3 x 10^9 FLOPs a token at 10^6 tokens/s, on 4 devices of 10^15
    used = model_flops_utilisation(1e6, forward_flops=10**9, device=h100, devices=4)
    assert used == pytest.approx(0.75)
    unknown = Device("CPU", None)
    assert model_flops_utilisation(1e6, forward_flops=1, device=unknown, devices=1) is None


def test_peak_memory_of_the_process_is_in_bytes() -> None:
    held = torch.ones(2**26)
    # 256 MiB of it are `held`; no test process has a TiB
    assert held.numel() * 4 < peak_memory_bytes(CPU) < 2**40
