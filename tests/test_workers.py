from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from slayformer.workers import worker_pool

# its workers wait for work, or are in the middle of some
KILLED = """
import os, signal, sys, time
from slayformer.workers import worker_pool
if __name__ == "__main__":
    pool = worker_pool(2)
    list(pool.map(abs, range(2)))
    if sys.argv[1] == "busy":
        busy = [pool.submit(time.sleep, 600) for _ in range(2)]
        while not all(one.running() for one in busy):
            time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("when", ["idle", "busy"])
def test_no_worker_outlives_the_process_that_started_it(when: str, tmp_path) -> None:
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    process = subprocess.Popen([sys.executable, script, when], stderr=subprocess.PIPE)
    # every worker holds the other end
    _, told = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL, told.decode()


def test_workers_are_started_with_what_they_are_given() -> None:
    with worker_pool(1, os.putenv, "SLAYFORMER_TEST", "here") as pool:
        found = pool.submit(subprocess.check_output, ["sh", "-c", "echo $SLAYFORMER_TEST"])
        assert found.result() == b"here\n"
