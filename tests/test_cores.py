from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from slayformer.cores import usable_cores

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system has no affinity")
def test_only_the_cores_of_this_process_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slayformer.cores.CONTROL_GROUPS", Path("nowhere"))
    allowed = os.sched_getaffinity(0)
    assert usable_cores() == len(allowed)

    def with_one() -> int:
        # of this thread alone, so the rest of the tests keeps its cores
        os.sched_setaffinity(0, {min(allowed)})
        return usable_cores()

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(with_one).result() == 1
    assert usable_cores() == len(allowed)


def test_without_affinity_all_cores_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr("slayformer.cores.CONTROL_GROUPS", Path("nowhere"))
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert usable_cores() == 6
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert usable_cores() == 1


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "300000 100000\n"}, 3),
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu.max": "5000 100000\n"}, 1),
        ({"cpu.max": "1600000 100000\n"}, 6),
        ({"cpu.max": "max 100000\n"}, 6),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 6),
        ({"cpu/cpu.cfs_quota_us": "400000\n"}, 6),
        ({"cpu.max": "nonsense"}, 6),
        ({}, 6),
    ],
)
def test_a_container_is_left_its_share_of_time(
    files: dict[str, str], cores: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As the kernel's documentation of control groups 2 (cpu.max) and 1 (CFS bandwidth) has it."""
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr("slayformer.cores.CONTROL_GROUPS", tmp_path)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert usable_cores() == cores


def test_nothing_else_counts_cores() -> None:
    """Whoever starts threads or processes asks `usable_cores`; pools never choose by themselves."""
    counts = re.compile(
        r"cpu_count|getaffinity|(?:Thread|Process)PoolExecutor\(\s*\)|\bPool\(\s*\)"
    )
    scripts = [*ROOT.glob("*.py"), *ROOT.glob("scripts/*"), *ROOT.glob("slayformer/**/*.py")]
    found = {
        path.relative_to(ROOT).as_posix() for path in scripts if counts.search(path.read_text())
    }
    # the second describes the machine
    assert found == {"slayformer/cores.py", "slayformer/benchmark/machine.py"}
