"""What one process does alone; tests/distributed has the real launches."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from slayformer.training import distributed

ROOT = Path(__file__).resolve().parents[2]
CONNECT = """
from slayformer.cli import entry_point
from slayformer.training import distributed
distributed.AFTER_THE_WATCH_S = 0
entry_point(lambda: distributed.initialize(3))
"""


@pytest.mark.parametrize(
    ("variables", "share"),
    [({"LOCAL_SIZE": "2"}, 2), ({"LOCAL_WORLD_SIZE": "1"}, 1), ({"LOCAL_SIZE": "1000"}, 1000)],
)
def test_processes_of_a_machine_share_its_cores(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], share: int
) -> None:
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    try:
        distributed._share_cores()
        cores = len(os.sched_getaffinity(0))
        assert torch.get_num_threads() == max(1, cores // share)
        # what the user says stays
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        torch.set_num_threads(1)
        distributed._share_cores()
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
def test_processes_that_cannot_connect_say_so_soon() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    processes = []
    for rank in "01":
        variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "PYTHONPATH": str(ROOT)}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        variables |= {"GLOO_SOCKET_IFNAME": "none"} if rank == "1" else {}
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", CONNECT],
                env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **variables},
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    told = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [2, 2]
    assert "\nerror: not all of the 2 processes came within 3 s: " in told[0]
    (line,) = told[1].splitlines()
    assert line.startswith("error: rank 1: the processes cannot connect to one another: ")
    assert line.endswith("for example GLOO_SOCKET_IFNAME=eth0 and NCCL_SOCKET_IFNAME=eth0")
