"""Learning rates at the points where schedules go wrong."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from slayformer.cli import compose
from slayformer.config import BatchConfig, BudgetConfig, RampConfig, ScheduleConfig
from slayformer.config_commands import RecallConfig
from slayformer.config_loading import load_config
from slayformer.errors import ConfigError
from slayformer.training.budget import Plan, make_plan
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


def test_wsd_stays_at_the_peak_and_decays_at_the_end() -> None:
    values = rates(ScheduleConfig("wsd", 5, 0.1, decay_share=0.25), 40)
    assert values[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    # 30 of 40 updates are done after update 29; then ten steps of 0.09
    assert values[4:30] == [1.0] * 26
    assert values[30:] == pytest.approx([1 - 0.09 * step for step in range(1, 11)])
    # a share that would begin within the warm-up begins at its end
    assert rates(ScheduleConfig("wsd", 5, decay_share=1), 25) == pytest.approx(
        rates(ScheduleConfig("linear", 5), 25)
    )


@pytest.fixture
def ramped(train_config: Any) -> Plan:
    """Updates of 2 x 4, 4 x 4, 6 x 2 and 8 x 9 samples of 16 tokens, and one of 4: 100 samples."""
    config = train_config()
    ramp = RampConfig(2, 2, updates=10)
    return make_plan(
        replace(
            config,
            batch=BatchConfig(2, samples_per_update=8, ramp=ramp),
            budget=BudgetConfig(samples=112),
        ),
        257,
        1,
    )


def test_by_tokens_under_a_ramp(ramped: Plan) -> None:
    seen = [ramped.tokens_at(update) for update in range(ramped.updates + 1)]
    assert seen[:9] == [0, 32, 64, 96, 128, 192, 256, 320, 416]
    assert seen[-1] == 112 * 16

    def by_tokens(schedule: ScheduleConfig) -> list[float]:
        return [
            learning_rate(
                u, ramped.updates, peak=2.0, schedule=schedule, tokens_at=ramped.tokens_at
            )
            for u in range(ramped.updates)
        ]

    linear = ScheduleConfig("linear", 6, unit="tokens")
    values = by_tokens(linear)
    # six updates hold 256 tokens: up in proportion to 32, 64, 96, 128, 192, 256
    assert values[:6] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.5, 2.0])
    assert values[6:] == pytest.approx([2.0 * (1792 - t) / (1792 - 256) for t in seen[7:]])
    assert values[-1] == 0.0
    # the same length in tokens
    in_tokens = ScheduleConfig("linear", None, warmup_tokens=256, unit="tokens")
    assert by_tokens(in_tokens) == values
    # half of the tokens of the decay is half of the cosine, which is not half of the updates
    cosine = ScheduleConfig("cosine", 0, final_fraction=0.5, unit="tokens")
    halfway = [2.0 * (0.75 + 0.25 * math.cos(math.pi * (t - 32) / (1792 - 32))) for t in seen[1:]]
    assert by_tokens(cosine) == pytest.approx(halfway)
    wsd = by_tokens(ScheduleConfig("wsd", 6, unit="tokens", decay_share=0.25))
    left = [(1792 - tokens) / (0.25 * 1792) for tokens in seen[1:]]
    assert wsd[6:] == pytest.approx([2.0 * min(1.0, share) for share in left[6:]])


def test_by_updates_the_ramp_plays_no_part(ramped: Plan) -> None:
    schedule = ScheduleConfig("cosine", 5, 0.1)
    plain = rates(schedule, ramped.updates)
    assert plain == [
        learning_rate(u, ramped.updates, peak=1.0, schedule=schedule, tokens_at=ramped.tokens_at)
        for u in range(ramped.updates)
    ]


def test_without_a_ramp_both_units_agree(train_config: Any) -> None:
    plan = make_plan(train_config("budget.updates=25"), 257, 1)
    for decay in ("linear", "cosine", "wsd"):
        schedule = ScheduleConfig(decay, 5, 0.1, unit="tokens")
        assert rates(ScheduleConfig(decay, 5, 0.1), 25) == pytest.approx(
            [
                learning_rate(u, 25, peak=1.0, schedule=schedule, tokens_at=plan.tokens_at)
                for u in range(25)
            ]
        )


def test_the_published_run_on_eight_devices() -> None:
    # warm-up and ramp of 500 updates, 9,745 in all: at 0, its end, the middle, the last
    config = load_config(compose("train", ["+experiment=gpt2_small_chinchilla"]))
    plan = make_plan(config, 50257, 8)

    def rate(update: int, unit: str) -> float:
        return learning_rate(
            update,
            plan.updates,
            peak=1e-4,
            schedule=replace(config.schedule, unit=unit),
            tokens_at=plan.tokens_at,
        )

    points = (0, 499, 5_121, 9_744)
    # 5,122 updates done lie in the middle between 500 and 9,745, but for half an update
    middle = 1e-4 * (9_745 - 5_122) / 9_245
    assert [rate(u, "updates") for u in points] == pytest.approx([2e-7, 1e-4, middle, 0.0])
    # samples: 64 of the first 63,936, 63,936 + 4,622 x 256 after update 5,121, of 2,430,465
    middle = 1e-4 * (2_430_465 - 1_247_168) / (2_430_465 - 63_936)
    first = 1e-4 * 64 / 63_936
    assert [rate(u, "tokens") for u in points] == pytest.approx([first, 1e-4, middle, 0.0])


@pytest.mark.parametrize("decay", ["linear", "cosine", "wsd", "constant"])
def test_run_of_one_update(decay: str) -> None:
    assert rates(ScheduleConfig(decay, 0, 0.1), 1) == [1.0]
    assert rates(ScheduleConfig(decay, 1, 0.1), 1) == [1.0]


def test_warm_up_as_long_as_the_run_is_allowed_and_longer_is_not() -> None:
    assert rates(ScheduleConfig("cosine", 4), 4) == pytest.approx([0.25, 0.5, 0.75, 1.0])
    with pytest.raises(ConfigError, match=r"schedule.warmup_updates=5: .*use at most 4"):
        check_schedule(ScheduleConfig("cosine", 5), 4)


def test_warm_up_in_tokens_that_cannot_be(train_config: Any) -> None:
    plan = make_plan(train_config(), 257, 1)
    schedule = ScheduleConfig("cosine", None, warmup_tokens=512, unit="tokens")
    check_schedule(schedule, plan.updates, plan.tokens_at)
    with pytest.raises(ConfigError, match=r"schedule.warmup_tokens=513: .*at most 512"):
        check_schedule(replace(schedule, warmup_tokens=513), plan.updates, plan.tokens_at)
    both = ["schedule.warmup_tokens=99", "schedule.unit=tokens"]
    with pytest.raises(ConfigError, match=r"schedule.warmup_updates=null"):
        load_config(compose("train", both))
    with pytest.raises(ConfigError, match=r"schedule.warmup_tokens=99: needs schedule.unit=tokens"):
        load_config(compose("train", [both[0], "schedule.warmup_updates=null"]))
    with pytest.raises(ConfigError, match=r"this training counts its warm-up in updates"):
        load_config(compose("recall", [*both, "schedule.warmup_updates=null"]), RecallConfig)
