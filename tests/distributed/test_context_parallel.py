"""A sequence over two and four processes equals one process: see context_worker.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow


# 517 leaves some ranks a token more than others
@pytest.mark.parametrize(
    ("world_size", "totals"), [(2, [512, 517, 4096, 4100]), (4, [517, 4096, 4100])]
)
def test_stretches_are_exact(
    run_command: Any, tmp_path: Path, world_size: int, totals: list[int]
) -> None:
    worker = str(Path(__file__).with_name("context_worker.py"))
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world_size}"]
    finished = run_command([*launcher, worker, str(tmp_path), *map(str, totals)], timeout_s=600)
    assert finished.code == 0, finished.stdout[-2000:] + finished.stderr[-4000:]
    done = sorted(path.name for path in tmp_path.iterdir())
    assert done == [f"done-{rank}" for rank in range(world_size)]
