"""The processes of a run: who they are, and what they tell one another.

All of it also works without torch.distributed: then the world is this process alone.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from slayformer.cli import LAUNCHER_VARIABLES, USERS_ERRNOS, only_after_success
from slayformer.cores import usable_cores
from slayformer.errors import UserError
from slayformer.training.watch import mark

Value = TypeVar("Value")

# rank 0 may prepare a large corpus while the others wait for it
CONTROL_TIMEOUT = timedelta(days=7)
# a collective that fails by itself does so after the watch has had its chance to name the rank
AFTER_THE_WATCH_S = 60

_control_group: dist.ProcessGroup | None = None
# of the collectives of the training
_timeout = timedelta()
# how many consecutive ranks hold a sequence together, and their groups by that number
_context_ranks = 1
_context_groups: dict[int, dist.ProcessGroup] = {}


def launched() -> bool:
    """Return whether a launcher started this process (and set every variable it should)."""
    return all(name in os.environ for name in LAUNCHER_VARIABLES)


def planned_world_size() -> int:
    """Return how many processes WORLD_SIZE announces, 1 without it; needs no process group."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def initialize(timeout_s: float = 1800) -> None:
    """Join the process group of the launcher, or form one of this process alone. Idempotent.

    Tensors of the training go over nccl between GPUs and gloo between CPUs, and fail a minute after
    `timeout_s`. Objects, sums and barriers of this module go over a gloo group of their own, which
    waits long.

    Raises UserError if not all processes come, or they cannot connect to one another.
    """
    global _control_group, _timeout
    if _control_group is not None:
        return
    _timeout = timedelta(seconds=timeout_s + AFTER_THE_WATCH_S)
    if not dist.is_initialized():
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        if launched():
            device()
            _share_cores()
            with _failures_told():
                dist.init_process_group(backend, timeout=_timeout)
        else:
            # deepspeed reads these; a store in memory needs no port
            os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        # without it gloo's threads may abort the exit; nccl waits in it for every rank
        atexit.register(_shut_down)
        only_after_success.append(_shut_down)
    # while it connects nothing takes long
    with _failures_told():
        group = dist.new_group(backend="gloo", timeout=_timeout)
    dist.distributed_c10d._set_pg_timeout(CONTROL_TIMEOUT, group)
    _control_group = group


@contextmanager
def _failures_told() -> Iterator[None]:
    """Turn every failure to connect into a UserError."""
    try:
        yield
    except dist.DistStoreError as error:
        raise UserError(
            f"not all of the {planned_world_size()} processes came within "
            f"{_timeout.total_seconds():g} s: {error}"
        ) from error
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"the processes cannot connect to one another: {reason}; on several machines name the "
            f"network interface that joins them, for example GLOO_SOCKET_IFNAME=eth0 and "
            f"NCCL_SOCKET_IFNAME=eth0"
        ) from error


def limit_waiting() -> None:
    """Let the collectives of every group there is wait no longer than those of the training.

    DeepSpeed makes groups of its own, with torch's default. Those of this module stay as they are.
    """
    c10d = dist.distributed_c10d
    for group in list(c10d._world.pg_map):
        if group is not _control_group:
            c10d._set_pg_timeout(_timeout, group)


def _share_cores() -> None:
    """Give each process of this machine its part of the cores, unless OMP_NUM_THREADS says how.

    Processes that all start a thread for every core wait for one another most of the time.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return
    torch.set_num_threads(max(1, usable_cores() // processes_here()))


def processes_here() -> int:
    """Return how many processes of this run the launcher started on this machine; 1 if unknown."""
    # torchrun's name for it, and the deepspeed command's
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or "1")


def _shut_down() -> None:
    global _control_group
    _control_group = None
    _context_groups.clear()
    if dist.is_initialized():
        dist.destroy_process_group()


def device() -> torch.device:
    """Return this process's own device and make it the current one.

    Raises UserError if the launcher started more processes than there are GPUs.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    index, present = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if index >= present:
        raise UserError(f"process {index} of this machine has no GPU: there are {present}")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def rank() -> int:
    """Return the number of this process, 0 to world size - 1."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Return the number of processes."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_main() -> bool:
    """Return whether this is rank 0, which alone prints and writes what all share."""
    return rank() == 0


@contextmanager
def shared_sequences(ranks: int) -> Iterator[None]:
    """Within this context every `ranks` consecutive processes hold their sequences together.

    Each has a stretch of them; outside, and with 1, each process has sequences of its own. Every
    process must enter it, and `ranks` must divide the world size.
    """
    global _context_ranks
    if ranks > 1 and ranks not in _context_groups:
        _context_groups[ranks], _ = dist.new_subgroups(ranks, timeout=_timeout)
    before, _context_ranks = _context_ranks, ranks
    try:
        yield
    finally:
        _context_ranks = before


def context_group() -> dist.ProcessGroup | None:
    """Return the processes that hold this one's sequences, None if it does so alone."""
    return _context_groups.get(_context_ranks)


def own_stretch(length: int) -> slice:
    """Return this process's stretch of a sequence; lengths in a group differ by one at most."""
    part = rank() % _context_ranks
    return slice(length * part // _context_ranks, length * (part + 1) // _context_ranks)


def data_rank() -> int:
    """Return the number of the group that holds this process's sequences, from 0."""
    return rank() // _context_ranks


def data_world_size() -> int:
    """Return how many groups of processes have sequences of their own."""
    return world_size() // _context_ranks


def barrier() -> None:
    """Wait until every process is here."""
    mark()
    if world_size() > 1:
        dist.barrier(group=_control_group)


def broadcast_object(value: Value) -> Value:
    """Return rank 0's `value` on every rank."""
    mark()
    if world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, group=_control_group)
    return box[0]


def gather_objects(value: Value) -> list[Value]:
    """Return every rank's `value`, in the order of the ranks, on every rank."""
    mark()
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value, group=_control_group)
    return values


# what gloo and nccl say when a process at the other end is no more
LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "process exited")


def lost_another(error: RuntimeError) -> bool:
    """Return whether `error` means that another process of the run has died."""
    return world_size() > 1 and any(sign in str(error) for sign in LOST)


def timed_out(error: RuntimeError) -> bool:
    """Return whether `error` means that a collective of the training has waited too long."""
    return world_size() > 1 and "imed out" in str(error)


def run_on_main(function: Callable[[], Value]) -> Value:
    """Run `function` on rank 0 and return its value on every rank.

    What it raises is raised on every rank: a UserError and what the disk says no to as they are,
    anything else as RuntimeError on the other ranks.
    """
    if world_size() == 1:
        return function()
    value: Any = None
    failure: BaseException | None = None
    if is_main():
        try:
            value = function()
        except BaseException as error:
            failure = error
    told = failure
    refused = isinstance(failure, OSError) and failure.errno in USERS_ERRNOS
    if failure is not None and not refused and not isinstance(failure, UserError):
        # any other may not survive being sent
        told = RuntimeError(f"rank 0 failed: {failure!r}")
    value, told = broadcast_object((value, told))
    if failure is not None:
        raise failure
    if told is not None:
        raise told
    return value


def sum_over_ranks(values: Tensor) -> Tensor:
    """Return the sum of `values` over all ranks, a new tensor on their device."""
    mark()
    total = values.detach().cpu().clone()
    if world_size() > 1:
        dist.all_reduce(total, group=_control_group)
    return total.to(values.device)
