"""The plan of a run as pure functions: how many tokens, samples and updates, and of what size.

A sample is one window of `model.context_length` tokens, an update one step of the optimizer.
Everything here is arithmetic on the configuration: no data, no model, no device.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from slayformer.config import BatchConfig, ModelConfig, TrainConfig
from slayformer.errors import ConfigError


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters of a model; `non_embedding` leaves out token and position embeddings."""

    total: int
    non_embedding: int


@dataclass(frozen=True)
class Segment:
    """A stretch of updates of equal size. `accumulation` counts forward passes per device."""

    first_update: int
    updates: int
    first_sample: int
    samples_per_update: int
    accumulation: int


@dataclass(frozen=True)
class MicroBatch:
    """What one device takes in one forward pass: real samples, then `padding` empty ones."""

    samples: range
    padding: int


@dataclass(frozen=True)
class Plan:
    """Everything a run will do, known before it starts. The last update may be partial."""

    parameters: ParameterCounts
    tokens: int
    samples: int
    updates: int
    context_length: int
    world_size: int
    # how many of the devices hold a sample together
    context_parallel: int
    micro_samples: int
    segments: tuple[Segment, ...]

    @property
    def data_parallel(self) -> int:
        """How many devices, or groups of them, have samples of their own."""
        return self.world_size // self.context_parallel

    @property
    def ends_partially(self) -> bool:
        """Whether the last update is smaller than it would be in a longer run."""
        return len(self.samples_of(self.updates - 1)) < self.segments[-1].samples_per_update

    def samples_at(self, update: int) -> int:
        """Return how many samples have been seen before `update` (all of them at `updates`)."""
        if not 0 <= update <= self.updates:
            raise ValueError(f"update {update} is outside 0..{self.updates}")
        seen = 0
        for segment in self.segments:
            if segment.first_update <= update:
                within = min(update - segment.first_update, segment.updates)
                seen = segment.first_sample + within * segment.samples_per_update
        return min(seen, self.samples)

    def tokens_at(self, update: int) -> int:
        """Return how many tokens have been seen before `update`."""
        return self.samples_at(update) * self.context_length

    def samples_of(self, update: int) -> range:
        """Return the global indices of the samples that `update` takes."""
        return range(self.samples_at(update), self.samples_at(update + 1))

    def micro_batches(self, update: int, rank: int) -> list[MicroBatch]:
        """Return the forward passes of data-parallel `rank` in `update`.

        Every rank has as many passes of the same size; what is not there is padding, so no
        collective waits in vain and the samples of an update do not depend on the world size.
        """
        samples = self.samples_of(update)
        share = math.ceil(len(samples) / self.data_parallel)
        passes = []
        for start in range(0, share, self.micro_samples):
            size = min(self.micro_samples, share - start)
            own = samples[rank * share + start : rank * share + start + size]
            passes.append(MicroBatch(own, size - len(own)))
        return passes

    def to_plain(self) -> dict[str, Any]:
        """Return the plan as dictionaries and lists, as `plan.json` holds it."""
        return asdict(self)


def parameter_counts(model: ModelConfig, vocabulary_size: int) -> ParameterCounts:
    """Count the parameters of the softmax GPT-2 of this shape, without vocabulary padding.

    Head tied to the token embedding, biases everywhere, learned positions.
    """
    width, inner = model.width, model.width * model.mlp_ratio
    attention = (width + 1) * 3 * width + (width + 1) * width
    mlp = (width + 1) * inner + (inner + 1) * width
    layer_norm = 2 * width
    non_embedding = model.layers * (attention + mlp + 2 * layer_norm) + layer_norm
    embedding = (vocabulary_size + model.context_length) * width
    return ParameterCounts(non_embedding + embedding, non_embedding)


def make_plan(config: TrainConfig, vocabulary_size: int, world_size: int) -> Plan:
    """Return the plan of `config` on `world_size` devices.

    Raises ConfigError for a batch or a context the devices cannot share evenly, naming the nearest
    that work.
    """
    groups = _data_parallel(config.engine.context_parallel, world_size)
    full, start, increment = _batch_sizes(config.batch, groups)
    counts = parameter_counts(config.model, vocabulary_size)
    sizes = _size_steps(config.batch, full, start, increment)
    context_length, budget = config.model.context_length, config.budget
    if budget.updates is not None:
        samples = _samples_in(budget.updates, sizes)
        tokens = samples * context_length
    elif budget.samples is not None:
        samples = budget.samples
        tokens = samples * context_length
    else:
        if budget.tokens is not None:
            tokens = budget.tokens
        else:
            assert budget.tokens_per_parameter is not None
            counted = getattr(counts, budget.parameters)
            tokens = math.ceil(budget.tokens_per_parameter * counted)
        samples = math.ceil(tokens / context_length)
    segments = _segments(samples, sizes, groups, config.batch.micro_samples)
    return Plan(
        parameters=counts,
        tokens=tokens,
        samples=samples,
        updates=sum(segment.updates for segment in segments),
        context_length=context_length,
        world_size=world_size,
        context_parallel=config.engine.context_parallel,
        micro_samples=config.batch.micro_samples,
        segments=segments,
    )


def _data_parallel(context_parallel: int, world_size: int) -> int:
    """Return how many groups of `context_parallel` devices there are."""
    if world_size % context_parallel == 0:
        return world_size // context_parallel
    field = "engine.context_parallel"
    if context_parallel > world_size:
        hint = (
            f"needs {context_parallel:,} processes or a multiple, and there are {world_size:,}: "
            f"start more with a launcher, or for a dry run set WORLD_SIZE={context_parallel}"
        )
        raise ConfigError(field, context_parallel, hint)
    divisors = [str(n) for n in range(1, world_size + 1) if world_size % n == 0]
    hint = f"must divide the {world_size:,} processes; use one of {', '.join(divisors)}"
    raise ConfigError(field, context_parallel, hint)


def _batch_sizes(batch: BatchConfig, groups: int) -> tuple[int, int, int]:
    """Return full size, first size and increment in samples per update over all devices."""
    ramp = batch.ramp
    if batch.samples_per_device is not None:
        full = batch.samples_per_device * groups
        if ramp is None:
            return full, full, 0
        return full, ramp.start_samples * groups, ramp.increment_samples * groups
    assert batch.samples_per_update is not None
    _must_divide("batch.samples_per_update", batch.samples_per_update, groups)
    if ramp is None:
        return batch.samples_per_update, batch.samples_per_update, 0
    _must_divide("batch.ramp.start_samples", ramp.start_samples, groups)
    _must_divide("batch.ramp.increment_samples", ramp.increment_samples, groups)
    return batch.samples_per_update, ramp.start_samples, ramp.increment_samples


def _must_divide(field: str, value: int, groups: int) -> None:
    if value % groups:
        below = value // groups * groups
        near = " or ".join(str(v) for v in (below, below + groups) if v > 0)
        raise ConfigError(
            field, value, f"{groups} data-parallel devices must share it evenly; use {near}"
        )


def _size_steps(batch: BatchConfig, full: int, start: int, increment: int) -> list[tuple[int, int]]:
    """Return (first update, samples per update) wherever the size changes.

    During the ramp an update has start + increment x floor(steps x progress) samples. Progress
    counts updates, u / ramp.updates, or the samples seen before the update / ramp.samples.
    """
    ramp = batch.ramp
    if ramp is None or start == full:
        return [(0, full)]
    steps = (full - start) // increment
    sizes: list[tuple[int, int]] = []
    first = seen = 0
    for step in range(steps + 1):
        size = start + increment * step
        if ramp.updates is not None:
            first = math.ceil(step * ramp.updates / steps)
        elif step > 0:
            assert ramp.samples is not None
            # the updates of the size before that its share of the samples takes, in whole numbers
            left = ramp.samples * step - seen * steps
            updates = max(0, -(-left // (steps * (size - increment))))
            first, seen = first + updates, seen + updates * (size - increment)
        # more steps than updates: the largest size of an update counts
        if sizes and sizes[-1][0] == first:
            sizes.pop()
        sizes.append((first, size))
    return sizes


def _samples_in(updates: int, sizes: list[tuple[int, int]]) -> int:
    """Return how many samples the first `updates` updates take."""
    ends = [first for first, _ in sizes[1:]] + [updates]
    return sum(
        max(0, min(end, updates) - first) * size
        for (first, size), end in zip(sizes, ends, strict=True)
    )


def _segments(
    samples: int, sizes: list[tuple[int, int]], groups: int, micro_samples: int
) -> tuple[Segment, ...]:
    """Cut `samples` into stretches of updates of equal size; the last update may be partial."""
    segments, seen = [], 0
    for index, (first, size) in enumerate(sizes):
        if seen >= samples:
            break
        updates = math.ceil((samples - seen) / size)
        if index + 1 < len(sizes):
            updates = min(updates, sizes[index + 1][0] - first)
        accumulation = math.ceil(size / groups / micro_samples)
        segments.append(Segment(first, updates, seen, size, accumulation))
        seen += updates * size
    return tuple(segments)
