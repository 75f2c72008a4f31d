"""The learning rate as a function of the update: nothing is stepped, so nothing can be lost."""

from __future__ import annotations

import math

from slayformer.config import ScheduleConfig
from slayformer.errors import ConfigError


def check_schedule(schedule: ScheduleConfig, total_updates: int) -> None:
    """Raise ConfigError if the warm-up does not fit into `total_updates`."""
    if schedule.warmup_updates > total_updates:
        hint = f"longer than the run of {total_updates} updates; use at most {total_updates}"
        raise ConfigError("schedule.warmup_updates", schedule.warmup_updates, hint)


def learning_rate(
    update: int, total_updates: int, *, peak: float, schedule: ScheduleConfig
) -> float:
    """Return the learning rate of `update` (0 is the first of `total_updates`).

    Linear warm-up: update 0 has peak / warmup_updates, the last of the warm-up has the peak. Then
    down to final_fraction x peak, which the last update has. `constant` stays at the peak.
    """
    check_schedule(schedule, total_updates)
    if update < schedule.warmup_updates:
        return peak * (update + 1) / schedule.warmup_updates
    if schedule.decay == "constant":
        return peak
    at_peak = max(schedule.warmup_updates - 1, 0)
    progress = (update - at_peak) / max(total_updates - 1 - at_peak, 1)
    cosine = schedule.decay == "cosine"
    share = 0.5 * (1 + math.cos(math.pi * progress)) if cosine else 1 - progress
    final = schedule.final_fraction * peak
    return final + (peak - final) * share
