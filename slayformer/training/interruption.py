"""Being asked to stop: the update under way is finished and saved first."""

from __future__ import annotations

import os
import shlex
import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from slayformer.cli import quoted
from slayformer.training import distributed

# SIGUSR1 is how clusters announce that they will take the machines away
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class StopSignal:
    """Within this context SIGINT, SIGTERM and SIGUSR1 only set `received`.

    Rank 0 says so, in one line. A second SIGINT interrupts. A SIGUSR1 that train.py held back until
    here is received at once, and one that comes later is held back again.

    Outside the main thread, where Python takes no signals, it does nothing.
    """

    def __init__(self) -> None:
        self.received = False
        self._before: dict[int, Any] = {}
        self._blocked: set[signal.Signals] = set()

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._receive) for number in SIGNALS}
            blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
            self._blocked = {signal.SIGUSR1} & blocked
        return self

    def __exit__(self, *exception: object) -> None:
        if self._before:
            signal.pthread_sigmask(signal.SIG_BLOCK, self._blocked)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if not self.received and distributed.is_main():
            # print could be in the middle of another line of this thread
            os.write(2, b"stopping after this update; a second Ctrl-C does not wait for it\n")
        self.received = True
        signal.signal(signal.SIGINT, signal.default_int_handler)


def resume_command(run_directory: Path) -> str:
    """Return the command that goes on with this run and its own options.

    Where processes run on several machines, or Slurm started them, their launcher stands before it
    in words: how it was called is not known here.
    """
    world = distributed.world_size()
    command = shlex.join(["train.py", f"run_directory={quoted(str(run_directory))}", "resume=auto"])
    if world == 1:
        return f"python {command}"
    if distributed.processes_here() == world:
        return f"deepspeed --num_accelerators {world} {command}"
    return f"(the launcher of these {world} processes) {command}"
