"""Speed and memory of a run."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from slayformer.training.devices import Device
from slayformer.training.watch import mark

# what an update consists of; validation and saving come between updates
UPDATE_PARTS = ("data", "forward_backward", "optimizer")
PARTS = (*UPDATE_PARTS, "validation", "saving")
# matrix products of the backward pass for each of the forward pass; recomputing does not count
BACKWARD_PER_FORWARD = 2


class Meter:
    """Where the time goes: `with part(name)` around each of PARTS, then `end_update`.

    Tokens per second and milliseconds are of training alone: validation, samples and saving do not
    count. On a GPU `data` is what reading batches takes this process, which the GPU may spend on
    the pass before. `before` is the `state` a resumed run goes on from, with `tokens_before`.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        tokens_before: int = 0,
        before: dict[str, float] | None = None,
    ) -> None:
        self.tokens = tokens_before
        self._device = device
        before = {"cold_tokens": 0, "cold_seconds": 0.0} | (before or {})
        # of the first update of every process, in which engines are compiled
        self._cold_tokens, self._cold_seconds = before["cold_tokens"], before["cold_seconds"]
        self._seconds = {part: before.get(part, 0.0) for part in PARTS}
        # since the end of the update before
        self._lately = dict.fromkeys(PARTS, 0.0)
        # tokens and training seconds when the first update of this process ended
        self._warm: tuple[int, float] | None = None

    @contextmanager
    def part(self, name: str, wait: bool = False) -> Iterator[None]:
        """Count the time inside as part `name`; `wait`: with all that the GPU was given to do."""
        mark()
        start = time.perf_counter()
        try:
            yield
        finally:
            if wait and self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            seconds = time.perf_counter() - start
            self._lately[name] += seconds
            self._seconds[name] += seconds

    def end_update(self, tokens: int) -> dict[str, float]:
        """Call after the weights have changed; return the speed and parts of the update.

        `milliseconds` is the update, `data_milliseconds` and so on are its parts; validation and
        saving are those since the update before.
        """
        self.tokens += tokens
        seconds = sum(self._lately[name] for name in UPDATE_PARTS)
        told = {"tokens_per_second": tokens / seconds, "milliseconds": 1000 * seconds}
        told |= {f"{name}_milliseconds": 1000 * self._lately[name] for name in PARTS}
        self._lately = dict.fromkeys(PARTS, 0.0)
        if self._warm is None:
            self._warm = self.tokens, self.training_seconds
            self._cold_tokens += tokens
            self._cold_seconds += seconds
        return told

    @property
    def state(self) -> dict[str, float]:
        """What a resumed run goes on from: seconds so far by part, and what first updates took."""
        cold = {"cold_tokens": self._cold_tokens, "cold_seconds": self._cold_seconds}
        return self._seconds | cold

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds so far, by part; those of a checkpoint's resumed run are among them."""
        return dict(self._seconds)

    @property
    def training_seconds(self) -> float:
        """Seconds of all updates so far."""
        return sum(self._seconds[name] for name in UPDATE_PARTS)

    @property
    def tokens_per_second(self) -> float:
        """Mean over all updates but the first of each process, in which engines are compiled.

        Of those if there are no others; 0 before the first.
        """
        tokens, seconds = self.tokens - self._cold_tokens, self.training_seconds
        if tokens:
            return tokens / (seconds - self._cold_seconds)
        return self.tokens / seconds if seconds else 0.0

    @property
    def warm_tokens_per_second(self) -> float | None:
        """Mean over the updates of this process but its first, in which engines are compiled.

        None until there is one.
        """
        if self._warm is None or self.tokens == self._warm[0]:
            return None
        return (self.tokens - self._warm[0]) / (self.training_seconds - self._warm[1])


def model_flops_utilisation(
    tokens_per_second: float, *, forward_flops: int, device: Device, devices: int
) -> float | None:
    """Return the share of the devices' peak that the model's own FLOPs take; None if unknown.

    `forward_flops` is per token. A backward pass counts twice that, whatever it recomputes.
    """
    if device.peak_flops is None:
        return None
    flops = (1 + BACKWARD_PER_FORWARD) * forward_flops
    return tokens_per_second * flops / (devices * device.peak_flops)


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory in use so far: of tensors on a GPU, of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts in KiB, macOS in bytes
    return peak if sys.platform == "darwin" else peak * 1024
