"""What one process does alone; tests/distributed has the real launches."""

from __future__ import annotations

import os

import pytest
import torch

from slayformer.training import distributed


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
