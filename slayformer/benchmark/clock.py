"""Timing in rounds: everybody once, then everybody again, so that a slow spell meets all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

# a sample repeats its call until it is this long: the clock and a thread's start then do not count
SAMPLE_SECONDS = 0.02
MOST_REPEATS = 1000

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass(frozen=True)
class Clock:
    """How time is taken: `wall`, or `cpu`, the processor time of all threads of this process.

    The latter hardly sees what else runs on the machine; with one thread the two mean the same.
    """

    device: torch.device
    kind: str = "wall"
    # of time.monotonic, when measuring has to end (None: never)
    deadline: float | None = None

    def expired(self) -> bool:
        """Return whether the time budget is used up."""
        return self.deadline is not None and time.monotonic() >= self.deadline

    def seconds(self, call: Callable[[], object], repeats: int = 1) -> float:
        """Return the seconds of one of `repeats` calls, with all that a GPU was given to do."""
        now = CLOCKS[self.kind]
        self._wait()
        start = now()
        for _ in range(repeats):
            call()
        self._wait()
        return (now() - start) / repeats

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@dataclass
class Samples:
    """The seconds of a call, one a round."""

    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """The median in seconds."""
        return statistics.median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The lower and upper quartile in seconds; of one sample, itself."""
        if len(self.seconds) == 1:
            return self.seconds[0], self.seconds[0]
        lower, _, upper = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return lower, upper

    def ratio(self, others: Samples) -> float:
        """Return the median over rounds of these seconds ÷ those of `others` in the same round."""
        pairs = zip(self.seconds, others.seconds, strict=False)
        return statistics.median(own / other for own, other in pairs)


def time_rounds(
    calls: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    clock: Clock,
    advance: Callable[[], None] = lambda: None,
) -> dict[str, Samples]:
    """Return the samples of every call, `rounds` of them unless the deadline comes before.

    Each call is made twice first: to warm up, and to see how often a sample has to repeat it. What
    the deadline left without a sample is not in the result.
    """
    repeats: dict[str, int] = {}
    for name, call in calls.items():
        if clock.expired():
            break
        clock.seconds(call)
        once = max(clock.seconds(call), 1e-9)
        repeats[name] = max(1, min(MOST_REPEATS, round(SAMPLE_SECONDS / once)))
    samples = {name: Samples() for name in repeats}
    for _ in range(rounds):
        for name, count in repeats.items():
            if clock.expired():
                break
            samples[name].seconds.append(clock.seconds(calls[name], count))
            advance()
    return {name: sample for name, sample in samples.items() if sample.seconds}
