"""Processes that share the work of this one, and end when it ends."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any


def worker_pool(
    processes: int, initializer: Callable[..., Any] | None = None, *arguments: Any
) -> ProcessPoolExecutor:
    """Return a pool of `processes`, each of which calls `initializer` with `arguments` first."""
    # a forked process would inherit threads that no longer run, torch's among them
    context = multiprocessing.get_context("spawn")
    start = (initializer, arguments)
    return ProcessPoolExecutor(processes, mp_context=context, initializer=_start, initargs=start)


def _start(initializer: Callable[..., Any] | None, arguments: tuple[Any, ...]) -> None:
    _end_with_parent()
    if initializer is not None:
        initializer(*arguments)


def _end_with_parent() -> None:
    """Have this process end as soon as the one that started it is gone, however that went.

    It would finish its work, and then wait for more for ever.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="parent").start()
