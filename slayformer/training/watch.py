"""A run whose processes wait for one that will not come: it ends, and names that one.

All ranks pass the same marks in the same order. Each tells the others how many it has passed and,
by a thread that a stopped process does not run, that it is alive.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from slayformer.cli import EXIT_USER_ERROR, OTHER_RANKS_WAIT_S

Value = TypeVar("Value")

LONGEST_INTERVAL_S = 5.0
# a process alive says so within this time, on a busy machine too
SIGN_OF_LIFE_S = 10.0
FINISHED = "finished"

_passed = 0
_passed_at = time.monotonic()


def mark() -> None:
    """Note that this process has come one step further."""
    global _passed, _passed_at
    _passed, _passed_at = _passed + 1, time.monotonic()


@contextmanager
def watched(timeout_s: float, advice: str) -> Iterator[None]:
    """Within this context, end the process if a rank it waits for does not come in `timeout_s`.

    It prints one line, which ends with `advice`, and exits with EXIT_USER_ERROR. Processes that all
    work longer than that between two marks are left alone.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    mark()
    watch = _Watch(timeout_s, advice)
    watch.start()
    try:
        yield
    except BaseException:
        # the others, who do not know of it and wait, will hear no sign of life
        watch.stop()
        raise
    watch.stop()
    watch.tell_finished()


class _Watch(threading.Thread):
    def __init__(self, timeout_s: float, advice: str) -> None:
        super().__init__(daemon=True, name="watch")
        self._timeout_s, self._advice = timeout_s, advice
        self._interval_s = min(LONGEST_INTERVAL_S, timeout_s / 4)
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        # a connection of its own, for the first may be waiting in a collective
        store: Any = dist.distributed_c10d._get_default_store()
        self._store = dist.PrefixStore("slayformer/watch", store.clone())
        self._store.set_timeout(timedelta(seconds=SIGN_OF_LIFE_S))
        self._beats = 0
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Watch no more, and show no more signs of life."""
        self._stopped.set()
        self.join(SIGN_OF_LIFE_S)

    def tell_finished(self) -> None:
        """Tell the others that this process waits for nobody any more, and nobody for it."""
        self._answer(lambda: self._store.set(str(self._rank), FINISHED))

    def run(self) -> None:
        while self._beat():
            if time.monotonic() - _passed_at > self._timeout_s:
                missing = self._missing()
                if missing and not self._stopped.is_set():
                    self._end(missing)

    def _beat(self) -> bool:
        """Wait a while and show a sign of life; return False once this process waits for nobody."""
        if self._stopped.wait(self._interval_s):
            return False
        self._beats += 1
        self._answer(self._tell)
        return True

    def _missing(self) -> list[str]:
        """Return who has not arrived, in words; nobody if all are where this process is."""
        here = _passed
        before = self._answer(self._read)
        # who looks for the others shows them signs of life meanwhile: they may be looking too
        until = time.monotonic() + SIGN_OF_LIFE_S
        while time.monotonic() < until and self._beat():
            pass
        after = self._answer(self._read)
        if here != _passed:
            return []
        if before is None or after is None:
            return ["rank 0 (its store does not answer: it is stopped or its machine is gone)"]
        passed = [None if told == FINISHED else int(told.split()[0]) for told in after]
        furthest = max(count for count in passed if count is not None)
        missing = []
        for rank, count in enumerate(passed):
            if rank == self._rank or count is None:
                continue
            if after[rank] == before[rank]:
                missing.append(f"rank {rank} (no sign of life: stopped, or its machine is gone)")
            elif count < furthest and count <= here:
                missing.append(f"rank {rank} (alive, but {furthest - count} steps behind)")
        return missing

    def _tell(self) -> None:
        self._store.set(str(self._rank), f"{_passed} {self._beats}")

    def _read(self) -> list[str]:
        ranks = map(str, range(self._world))
        # a rank that has not come this far has told nothing
        return [
            self._store.get(rank).decode() if self._store.check([rank]) else "0 0" for rank in ranks
        ]

    def _answer(self, ask: Callable[[], Value]) -> Value | None:
        """Return what `ask` returns; None if the store does not answer in time."""
        box: list[Any] = []

        def work() -> None:
            try:
                box.append(ask())
            except RuntimeError:
                # the store's time-out, or its process is no more
                return

        # the store may wait for ever where its process is stopped
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(SIGN_OF_LIFE_S)
        return box[0] if box else None

    def _end(self, missing: list[str]) -> None:
        # so that rank 0 speaks first
        if self._rank > 0:
            self._stopped.wait(OTHER_RANKS_WAIT_S)
        if self._stopped.is_set():
            return
        where = "" if self._rank == 0 else f"rank {self._rank}: "
        print(
            f"error: {where}waited {self._timeout_s:g} s (engine.timeout_seconds) in vain for "
            f"{', '.join(missing)}; {self._advice}",
            file=sys.stderr,
            flush=True,
        )
        # the main thread is inside a collective, which no exception reaches
        os._exit(EXIT_USER_ERROR)
