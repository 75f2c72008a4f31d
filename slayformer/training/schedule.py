"""The learning rate as a function of the update: nothing is stepped, so nothing can be lost."""

from __future__ import annotations

import math
from collections.abc import Callable

from slayformer.config import ScheduleConfig
from slayformer.errors import ConfigError

# from an update to the tokens seen before it, as `Plan.tokens_at` is
TokensAt = Callable[[int], int]


def check_schedule(
    schedule: ScheduleConfig, total_updates: int, tokens_at: TokensAt | None = None
) -> None:
    """Raise ConfigError if the warm-up does not fit into `total_updates`.

    A warm-up in tokens is checked where `tokens_at` is given.
    """
    if schedule.warmup_updates is not None and schedule.warmup_updates > total_updates:
        hint = f"longer than the run of {total_updates} updates; use at most {total_updates}"
        raise ConfigError("schedule.warmup_updates", schedule.warmup_updates, hint)
    if schedule.warmup_tokens is not None and tokens_at is not None:
        total_tokens = tokens_at(total_updates)
        if schedule.warmup_tokens > total_tokens:
            hint = f"longer than the run of {total_tokens} tokens; use at most {total_tokens}"
            raise ConfigError("schedule.warmup_tokens", schedule.warmup_tokens, hint)


def learning_rate(
    update: int,
    total_updates: int,
    *,
    peak: float,
    schedule: ScheduleConfig,
    tokens_at: TokensAt | None = None,
) -> float:
    """Return the learning rate of `update` (0 is the first of `total_updates`).

    The clock of `update` is the updates or tokens done once it is done. Linear warm-up: peak x
    clock / warm-up, so the last update of the warm-up has the peak, or the first where there is
    none. Then down to final_fraction x peak, which the last update has: at once (`linear`,
    `cosine`), over the last decay_share of the whole clock (`wsd`), or never (`constant`).

    Without `tokens_at` all updates are of one size, so that both clocks agree.
    """
    check_schedule(schedule, total_updates, tokens_at)
    clock = tokens_at if schedule.unit == "tokens" and tokens_at is not None else int
    now, end = clock(update + 1), clock(total_updates)
    warmup = schedule.warmup_tokens
    if warmup is None:
        warmup = clock(schedule.warmup_updates or 0)
    if now < warmup:
        return peak * now / warmup
    # where the decay starts to count; without a warm-up the first update has the peak
    start: float = max(warmup, clock(1))
    if schedule.decay == "wsd":
        start = max(start, end * (1 - schedule.decay_share))
    if schedule.decay == "constant" or now <= start:
        return peak
    progress = (now - start) / (end - start)
    cosine = schedule.decay == "cosine"
    share = 0.5 * (1 + math.cos(math.pi * progress)) if cosine else 1 - progress
    final = schedule.final_fraction * peak
    return final + (peak - final) * share
