"""The memory a call takes beyond its inputs.

On a CPU that is what the process grows by at its largest, in a process of its own whose size is
limited, so that a call that would take all memory or all day is ended there.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import multiprocessing
import os
import re
import resource
from collections.abc import Callable
from dataclasses import dataclass, replace
from io import StringIO
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from slayformer.benchmark.clock import Clock
from slayformer.benchmark.contestants import Runner, Shape, Unavailable, make_runner
from slayformer.training.meters import peak_memory_bytes

# tokens of a first call, which loads and compiles what is needed
WARM_UP_TOKENS = 8
# a process is ended after this many times the longest call, and its start
PATIENCE = 4
START_SECONDS = 60.0


class LeftOut(Exception):
    """A measurement that cannot be made within its limits, or at all, and why."""


def failure(error: Exception) -> Exception:
    """Return what tells in a report that `error` ended a call, which may have raised anything."""
    if isinstance(error, Unavailable | LeftOut):
        return error
    told = str(error).strip() or type(error).__name__
    return LeftOut(f"it fails: {told.splitlines()[0]}")


def is_out_of_memory(error: MemoryError | RuntimeError) -> bool:
    """Return whether `error` says that the CPU's memory did not do; torch says it in many words."""
    return isinstance(error, MemoryError) or re.search("memory|bad_alloc", str(error)) is not None


@dataclass(frozen=True)
class Trial:
    """One call: bytes beyond its inputs at most, and its seconds."""

    bytes: int
    seconds: float


def bound(runner: Runner, shape: Shape, *, backward: bool) -> Callable[[], object]:
    """Return a call of `runner` without arguments, forward alone or with all gradients."""
    q, k, v, weight = shape.draw(4)
    if not backward:

        def forward() -> object:
            with torch.no_grad():
                return runner.attend(q, k, v)

        return forward
    heads = [x.requires_grad_() for x in (q, k, v)]
    sources = [*heads, *(p for p in runner.parameters if p.requires_grad)]

    def both() -> object:
        y = runner.attend(*heads)
        return torch.autograd.grad(y, sources, weight, allow_unused=True)

    return both


def available_bytes() -> int:
    """Return the memory that this machine has to spare; its size where the system does not say."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def try_call(
    name: str,
    shape: Shape,
    *,
    backward: bool,
    limit_bytes: int,
    limit_seconds: float,
    threads: int,
    clock: Clock,
) -> Trial:
    """Return what one call of `name` takes on the device of `shape`, timed by `clock`.

    Raises Unavailable for a contestant that cannot run here, LeftOut for one that takes more than
    a limit or fails.
    """
    if shape.device.type == "cuda":
        return _try_here(name, shape, backward, limit_seconds, clock)
    context = _process_context()
    ours, theirs = context.Pipe(duplex=False)
    arguments = (theirs, name, shape, backward, limit_bytes, limit_seconds, threads, clock)
    process = context.Process(target=_child, args=arguments, daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(PATIENCE * limit_seconds + START_SECONDS):
            raise LeftOut(f"longer than {limit_seconds:g} s a call")
        outcome = ours.recv()
    except EOFError:
        outcome = LeftOut(f"more than {_mib(limit_bytes)}, the process was ended")
    finally:
        process.kill()
        process.join()
        ours.close()
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


@functools.cache
def _process_context() -> Any:
    """Return a server of processes that have imported torch and never computed with it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def _child(
    connection: Connection,
    name: str,
    shape: Shape,
    backward: bool,
    limit_bytes: int,
    limit_seconds: float,
    threads: int,
    clock: Clock,
) -> None:
    torch.set_num_threads(threads)
    try:
        # which engine it took is told by the process that measures time
        with contextlib.redirect_stderr(StringIO()):
            outcome: Any = _try_in_child(name, shape, backward, limit_bytes, clock)
        if outcome.seconds > limit_seconds:
            outcome = _too_long(outcome.seconds, limit_seconds)
    except Exception as error:
        outcome = failure(error)
    connection.send(outcome)


def _try_in_child(name: str, shape: Shape, backward: bool, limit_bytes: int, clock: Clock) -> Trial:
    _warm_up(name, shape, backward)
    call = bound(make_runner(name, shape), shape, backward=backward)
    gc.collect()
    _limit(limit_bytes)
    _forget_peak()
    before = peak_memory_bytes(shape.device)
    try:
        seconds = clock.seconds(call)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise LeftOut(f"more than {_mib(limit_bytes)}") from None
    return Trial(peak_memory_bytes(shape.device) - before, seconds)


def _try_here(name: str, shape: Shape, backward: bool, limit_seconds: float, clock: Clock) -> Trial:
    device = shape.device
    try:
        call = bound(make_runner(name, shape), shape, backward=backward)
        # kernels are compiled for a length, or chosen by trying
        call()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        seconds = clock.seconds(call)
        size = peak_memory_bytes(device) - before
    except torch.cuda.OutOfMemoryError:
        raise LeftOut("more than the GPU's memory") from None
    except Exception as error:
        raise failure(error) from None
    finally:
        gc.collect()
        torch.cuda.empty_cache()
    if seconds > limit_seconds:
        raise _too_long(seconds, limit_seconds)
    return Trial(size, seconds)


def _too_long(seconds: float, limit_seconds: float) -> LeftOut:
    return LeftOut(f"{seconds:.1f} s a call, longer than {limit_seconds:g} s")


def _warm_up(name: str, shape: Shape, backward: bool) -> None:
    short = replace(shape, length=min(WARM_UP_TOKENS, shape.length))
    bound(make_runner(name, short), short, backward=backward)()


def _limit(limit_bytes: int) -> None:
    """Let this process grow by `limit_bytes` and no more, where the system can do that."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        used = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:"))
    except (OSError, StopIteration):
        return
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (used + limit_bytes, hard))


def _forget_peak() -> None:
    """Let the largest size so far be that of now, where the system can do that."""
    with contextlib.suppress(AttributeError, OSError):
        # what is free inside the process would take in some of the growth
        ctypes.CDLL(None).malloc_trim(0)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
