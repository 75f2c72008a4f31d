"""Two runs never share a directory, and a dead one keeps nobody out."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slayformer.errors import ConfigError
from slayformer.training import run_lock
from slayformer.training.run_lock import RunLock

ROOT = Path(__file__).resolve().parents[2]
HOLDER = """
import sys, time
from pathlib import Path
from slayformer.training.run_lock import RunLock
lock = RunLock()
lock.take(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(100)
"""


def test_a_second_run_is_told_who_trains_there_until_that_one_is_dead(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        lock = RunLock()
        for _ in range(2):
            with pytest.raises(ConfigError) as caught:
                lock.take(tmp_path)
            assert f"run_directory={tmp_path}: process {holder.pid} on " in str(caught.value)
            assert "\n" not in str(caught.value)
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        assert lock.take(tmp_path) is None
        assert lock.held
        with pytest.raises(ConfigError, match=f"process {os.getpid()} on"):
            RunLock().take(tmp_path)
        lock.release()
        assert RunLock().take(tmp_path) is None
    finally:
        holder.kill()
        holder.communicate()


def test_without_locks_it_warns_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(run_lock.fcntl, "flock", refuse)
    lock = RunLock()
    assert "without locks" in (lock.take(tmp_path) or "")
    assert not lock.held
