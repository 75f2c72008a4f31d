"""The command that goes on names a launcher only where that is known to be the right one."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from slayformer.training import distributed, interruption


@pytest.mark.parametrize(
    ("world_size", "here", "start"),
    [
        (1, {}, ["python", "train.py"]),
        (2, {"LOCAL_SIZE": "2"}, ["deepspeed", "--num_accelerators", "2", "train.py"]),
        (4, {"LOCAL_WORLD_SIZE": "4"}, ["deepspeed", "--num_accelerators", "4", "train.py"]),
        # two machines, and Slurm, which names neither variable
        (
            16,
            {"LOCAL_SIZE": "8"},
            ["(the", "launcher", "of", "these", "16", "processes)", "train.py"],
        ),
        (2, {}, ["(the", "launcher", "of", "these", "2", "processes)", "train.py"]),
    ],
)
def test_launcher(
    world_size: int, here: dict[str, str], start: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOCAL_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in here.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(distributed, "world_size", lambda: world_size)
    command = shlex.split(interruption.resume_command(Path("/shared/a run")))
    assert command[: len(start)] == start
    assert command[len(start) :] == ["run_directory='/shared/a run'", "resume=auto"]


# in a process of its own: pytest may have other threads, which the signal would end
WARNED = """
import os, signal
from slayformer.training.interruption import StopSignal

signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
os.kill(os.getpid(), signal.SIGUSR1)
with StopSignal() as stop:
    assert stop.received
# one more while the run is torn down does not end it
os.kill(os.getpid(), signal.SIGUSR1)
assert signal.SIGUSR1 in signal.sigpending()
with StopSignal() as stop:
    assert stop.received
with StopSignal() as stop:
    assert not stop.received
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
with StopSignal():
    pass
# nothing is held back that was not before
assert signal.SIGUSR1 not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
print("unharmed")
"""


def test_a_warning_that_came_during_the_imports_is_not_lost() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WARNED], capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stdout) == (0, "unharmed\n"), done.stderr
