"""Speed counts training alone; memory is in bytes."""

from __future__ import annotations

import pytest
import torch

from slayformer.training import meters
from slayformer.training.meters import Meter, peak_memory_bytes


def test_speed_leaves_out_what_lies_between_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 12.0, 100.0, 104.0])
    monkeypatch.setattr(meters.time, "perf_counter", lambda: next(clock))
    meter = Meter(tokens_before=1000, seconds_before=4.0)
    meter.start_update()
    assert meter.end_update(200) == (100.0, 2000.0)
    meter.start_update()
    assert meter.end_update(200) == (50.0, 4000.0)
    assert meter.tokens_per_second == 1400 / 10
    assert Meter().tokens_per_second == 0


def test_peak_memory_of_the_process_is_in_bytes() -> None:
    held = torch.ones(2**26)
    # 256 MiB of it are `held`; no test process has a TiB
    assert held.numel() * 4 < peak_memory_bytes(torch.device("cpu")) < 2**40
