"""Times attention alone against the length: every mechanism of ours and its peers, in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from slayformer.benchmark.clock import Clock, time_rounds
from slayformer.benchmark.contestants import (
    PEERS,
    Shape,
    Unavailable,
    engine_of,
    make_runner,
)
from slayformer.benchmark.decode import can_decode, measure_decode
from slayformer.benchmark.machine import describe, find_device
from slayformer.benchmark.memory import LeftOut, available_bytes, bound, try_call
from slayformer.benchmark.options import BenchAttentionConfig
from slayformer.benchmark.results import Cell, Result, finished_cell

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# of what is available, if no limit is given
MEMORY_SHARE = 0.5
# of a run on a GPU, if no budget is given
GPU_BUDGET_S = 480.0
# (what is being done, steps done, steps there are)
Progress = Callable[[str, int, int], None]


def silent(told: str, done: int, total: int) -> None:
    """Show no progress."""


class _Steps:
    """Counts what is done, for a progress bar."""

    def __init__(self, total: int, progress: Progress) -> None:
        self.done, self.total, self.told = 0, total, ""
        self._progress = progress

    def begin(self, told: str) -> None:
        self.told = told
        self._progress(told, self.done, self.total)

    def add(self, count: int = 1) -> None:
        self.done += count
        self._progress(self.told, self.done, self.total)


def measure(config: BenchAttentionConfig, progress: Progress = silent) -> Result:
    """Return what every contestant takes in every pass at every length, or why it was left out.

    Raises ConfigError for a device that is not here.
    """
    assert config.lengths is not None
    assert config.passes is not None
    started = time.monotonic()
    device = find_device(config.device)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    budget = config.time_budget_s
    if budget is None and device.type == "cuda":
        budget = GPU_BUDGET_S
    clock = Clock(device, config.clock, None if budget is None else started + budget)
    machine = describe(device, torch.get_num_threads())
    shape = Shape(
        batch=config.batch,
        heads=config.heads,
        head_dim=config.head_dim,
        length=1,
        dtype=DTYPES[config.dtype],
        device=device,
        backend=config.backend,
    )
    names = [*(config.peers or []), *(config.mechanisms or [])]
    engines = {name: engine_of(name, shape) for name in names if name not in PEERS}
    timed = [name for name in config.passes if name != "decode"]
    decoding = sum(map(can_decode, names)) if "decode" in config.passes else 0
    steps = _Steps(_count(config, len(names) * len(timed), decoding), progress)
    cells: list[Cell] = []
    limits = _Limits(config)
    if "decode" in config.passes:
        # first: it is short, and a time budget should not cut it
        cells += measure_decode(
            [name for name in names if can_decode(name)],
            shape,
            contexts=config.contexts or [],
            rounds=config.rounds or 1,
            clock=clock,
            longest_seconds=limits.seconds,
            begin=steps.begin,
            advance=steps.add,
        )
    # lengths outside: what a time budget cuts off is the longest of every pass
    for length in config.lengths:
        for pass_name in timed:
            cells += _measure_length(
                names, pass_name, replace(shape, length=length), config, clock, limits, steps
            )
    return Result(machine, asdict(config), _in_order(cells, config.passes, names), engines)


def _count(config: BenchAttentionConfig, timed: int, decoding: int) -> int:
    """Return the steps of a whole run: a trial and each round of every cell."""
    cells = timed * len(config.lengths or []) + decoding * len(config.contexts or [])
    return cells * (1 + (config.rounds or 1))


def _in_order(cells: Sequence[Cell], passes: Sequence[str], names: Sequence[str]) -> list[Cell]:
    """Return the cells by pass, contestant and length, as they were asked for."""
    return sorted(
        cells, key=lambda c: (passes.index(c.pass_name), names.index(c.contestant), c.length)
    )


class _Limits:
    """What a call may take, and who went beyond it: longer sequences are not tried then."""

    def __init__(self, config: BenchAttentionConfig) -> None:
        self.seconds = config.longest_call_s or float("inf")
        self._mib = config.memory_limit_mib
        # by contestant and pass: why, and at which length, if that matters
        self.beyond: dict[tuple[str, str], tuple[str, int | None]] = {}

    @property
    def bytes(self) -> int:
        """The most memory a call may take on a CPU."""
        if self._mib is not None:
            return self._mib * 2**20
        return int(MEMORY_SHARE * available_bytes())


def _measure_length(
    names: Sequence[str],
    pass_name: str,
    shape: Shape,
    config: BenchAttentionConfig,
    clock: Clock,
    limits: _Limits,
    steps: _Steps,
) -> list[Cell]:
    """Return the cells of one pass at one length."""
    backward, length = pass_name == "forward_backward", shape.length
    rounds = config.rounds or 1
    memory: dict[str, int] = {}
    left_out: dict[str, tuple[str, int | None]] = {}
    for name in names:
        steps.begin(f"{pass_name}, {length:,} tokens: {name}")
        key = (name, pass_name)
        found = limits.beyond.get(key)
        if found is None and clock.expired():
            found = "the time budget was used up", None
        if found is None:
            try:
                memory[name] = try_call(
                    name,
                    shape,
                    backward=backward,
                    limit_bytes=limits.bytes,
                    limit_seconds=limits.seconds,
                    threads=torch.get_num_threads(),
                    clock=clock,
                ).bytes
            except Unavailable as error:
                found = limits.beyond[key] = str(error), None
            except LeftOut as error:
                found = str(error), None
                limits.beyond[key] = str(error), length
        if found is not None:
            left_out[name] = found
            steps.add(rounds)
        steps.add()
    calls: dict[str, Callable[[], Any]] = {
        name: bound(make_runner(name, shape), shape, backward=backward) for name in memory
    }
    steps.begin(f"{pass_name}, {length:,} tokens: all in turns")
    samples = time_rounds(calls, rounds=rounds, clock=clock, advance=steps.add)
    tokens = shape.batch * length
    return [
        Cell(name, pass_name, length, *left_out[name])
        if name in left_out
        else finished_cell(
            name, pass_name, length, samples, tokens=tokens, memory_bytes=memory[name]
        )
        for name in names
    ]


def measure_scaling(
    names: Sequence[str],
    lengths: Sequence[int],
    *,
    passes: Sequence[str] = ("forward",),
    progress: Progress = silent,
    **options: Any,
) -> Result:
    """Return latency, memory and tokens per second of mechanisms and peers `names`, by length.

    `options` are further fields of BenchAttentionConfig: heads, head_dim, rounds, device, …
    """
    from omegaconf import OmegaConf

    from slayformer.benchmark.options import read_config

    given = {
        "mechanisms": [name for name in names if name not in PEERS],
        "peers": [name for name in names if name in PEERS],
        "passes": list(passes),
        "lengths": list(lengths),
        **options,
    }
    return measure(read_config(OmegaConf.create(given)), progress)
