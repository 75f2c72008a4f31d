from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from slayformer.cores import usable_cores

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system has no affinity")
def test_only_the_cores_of_this_process_count() -> None:
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
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert usable_cores() == 6
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert usable_cores() == 1


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
