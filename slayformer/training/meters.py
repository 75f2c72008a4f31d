"""Speed and memory of a run."""

from __future__ import annotations

import resource
import sys
import time

import torch


class Meter:
    """Tokens per second of training alone: validation, samples and saving do not count.

    `seconds_before` and `tokens_before` come from the checkpoint a run resumes.
    """

    def __init__(self, *, tokens_before: int = 0, seconds_before: float = 0.0) -> None:
        self.tokens, self.seconds = tokens_before, seconds_before
        self._started = 0.0

    def start_update(self) -> None:
        """Call before the first batch of an update is read."""
        self._started = time.perf_counter()

    def end_update(self, tokens: int) -> tuple[float, float]:
        """Call after the weights have changed; return (tokens per second, milliseconds)."""
        seconds = time.perf_counter() - self._started
        self.tokens += tokens
        self.seconds += seconds
        return tokens / seconds, 1000 * seconds

    @property
    def tokens_per_second(self) -> float:
        """Mean over all updates so far; 0 before the first."""
        return self.tokens / self.seconds if self.seconds else 0.0


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory in use so far: of tensors on a GPU, of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts in KiB, macOS in bytes
    return peak if sys.platform == "darwin" else peak * 1024
