"""Learning rates at the points where schedules go wrong."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from slayformer.config import ScheduleConfig
from slayformer.errors import ConfigError
from slayformer.training.schedule import check_schedule, learning_rate


def rates(schedule: ScheduleConfig, total: int, peak: float = 1.0) -> list[float]:
    return [learning_rate(u, total, peak=peak, schedule=schedule) for u in range(total)]


def test_warm_up_starts_above_zero_and_ends_at_the_peak() -> None:
    values = rates(ScheduleConfig("linear", warmup_updates=5), 25, peak=2.0)
    assert values[:5] == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0])


def test_linear_decay_reaches_its_end_in_the_last_update() -> None:
    values = rates(ScheduleConfig("linear", 5, final_fraction=0.1), 25)
    # the peak is update 4, the last 24: half way is 14
    assert values[14] == pytest.approx(0.55)
    assert values[24] == pytest.approx(0.1)
    steps = [a - b for a, b in pairwise(values[4:])]
    assert steps == pytest.approx([0.9 / 20] * 20)


def test_cosine_decay() -> None:
    values = rates(ScheduleConfig("cosine", 5, final_fraction=0.1), 25)
    assert values[4] == 1.0
    assert values[14] == pytest.approx(0.55)
    # a quarter of the way: 0.1 + 0.9 (1 + cos 45°) / 2
    assert values[9] == pytest.approx(0.1 + 0.45 * (1 + math.sqrt(0.5)))
    assert values[24] == pytest.approx(0.1)


def test_constant_stays_at_the_peak() -> None:
    assert rates(ScheduleConfig("constant", 2), 6) == pytest.approx([0.5, 1, 1, 1, 1, 1])


def test_without_warm_up_the_first_update_has_the_peak() -> None:
    assert rates(ScheduleConfig("linear", 0), 3) == pytest.approx([1.0, 0.5, 0.0])


@pytest.mark.parametrize("decay", ["linear", "cosine", "constant"])
def test_run_of_one_update(decay: str) -> None:
    assert rates(ScheduleConfig(decay, 0, 0.1), 1) == [1.0]
    assert rates(ScheduleConfig(decay, 1, 0.1), 1) == [1.0]


def test_warm_up_as_long_as_the_run_is_allowed_and_longer_is_not() -> None:
    assert rates(ScheduleConfig("cosine", 4), 4) == pytest.approx([0.25, 0.5, 0.75, 1.0])
    with pytest.raises(ConfigError, match=r"schedule.warmup_updates=5: .*use at most 4"):
        check_schedule(ScheduleConfig("cosine", 5), 4)
