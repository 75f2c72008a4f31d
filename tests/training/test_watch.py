"""The watch between two real processes: who is late is named, who works long is left alone."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WORKER = """
import sys, time
from slayformer.training import distributed
from slayformer.training.watch import mark, watched
distributed.initialize()
if sys.argv[1] == "raises":
    try:
        with watched(5.0, "try again"):
            if distributed.rank() == 1:
                raise RuntimeError
            distributed.barrier()
    except RuntimeError:
        # it does not end, as a process that waits for its device
        time.sleep(90)
with watched(5.0, "try again"):
    # longer than the time-out, on both alike: nobody waits for anybody
    mark()
    time.sleep(7)
    distributed.barrier()
    if sys.argv[1] == "late":
        if distributed.rank() == 1:
            time.sleep(90)
        distributed.barrier()
# who is done keeps nobody waiting
if distributed.rank() == 0:
    time.sleep(8)
print("done")
"""


@pytest.mark.slow
def test_late_ranks_are_named_and_long_work_is_no_hang() -> None:
    missing = {
        "late": "rank 1 (alive, but 1 steps behind)",
        "raises": "rank 1 (no sign of life: stopped, or its machine is gone)",
    }
    # at once, for they mostly wait
    started = {case: start(case) for case in ("in time", *missing)}
    try:
        for case, processes in started.items():
            out, err = processes[0].communicate(timeout=90)
            if case == "in time":
                assert (processes[0].returncode, out) == (0, "done\n"), err
                assert processes[1].communicate(timeout=90)[0] == "done\n"
            else:
                assert processes[0].returncode == 2
                (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
                assert f"in vain for {missing[case]}; try again" in line
    finally:
        for process in itertools.chain(*started.values()):
            process.kill()
            process.communicate()


def start(case: str) -> list[subprocess.Popen[str]]:
    """Return the two processes of a case."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    processes = []
    for rank in "01":
        variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        variables |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", WORKER, case],
                env={**os.environ, **variables},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    return processes
