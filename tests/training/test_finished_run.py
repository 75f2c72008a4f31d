"""A run that is finished and resumed: left as it is, and longer with a larger budget."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from slayformer.errors import CheckpointError
from slayformer.training.checkpoint import MANIFEST, STATE, find_checkpoint, sha256
from slayformer.training.run import run

# what no process has in use
PEAK_BYTES = 2**50


def contents(directory: Path) -> dict[str, bytes]:
    """Return every file by its path, but not the lock."""
    files = {path.relative_to(directory).as_posix(): path for path in directory.rglob("*")}
    return {name: path.read_bytes() for name, path in files.items() if path.is_file()}


def validations(directory: Path) -> list[int]:
    records = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return [record["update"] for record in records if record["kind"] == "validation"]


def samples(directory: Path) -> list[str]:
    lines = (directory / "samples.txt").read_text().splitlines()
    return [line for line in lines if line.startswith("--- after")]


def claim_peak(checkpoint: Path) -> None:
    """Let `checkpoint` say that the processes before have had PEAK_BYTES in use."""
    state = json.loads((checkpoint / STATE).read_text())
    assert state["peak_memory_bytes"] > 2**26
    (checkpoint / STATE).write_text(json.dumps(state | {"peak_memory_bytes": PEAK_BYTES}))
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    changed = {"bytes": (checkpoint / STATE).stat().st_size, "sha256": sha256(checkpoint / STATE)}
    manifest["files"][STATE] |= changed
    (checkpoint / MANIFEST).write_text(json.dumps(manifest))


def test_a_finished_run_stays_as_it_is_until_it_gets_a_larger_budget(
    train_config: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "run"
    # softmax: no kernel is compiled for it
    again = ["attention=softmax", f"run_directory={directory}", "resume=auto"]
    run(train_config(*again, "budget.updates=2"))
    before = contents(directory)
    assert validations(directory) == [2]
    capsys.readouterr()

    assert run(train_config(*again, "budget.updates=2")) == directory
    assert contents(directory) == before
    (told,) = capsys.readouterr().out.splitlines()
    assert told.startswith(f"finished: all 2 updates of {directory} are done; ")
    assert told.endswith("larger budget than budget.updates=2 too, for example budget.updates=4")

    claim_peak(find_checkpoint(directory))
    run(train_config(*again, "budget.updates=3"))
    assert "going on after update 2 from" in capsys.readouterr().out
    assert validations(directory) == [2, 3]
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["updates"] == 3
    # the most of any process of the run, also of those before this one
    assert summary["peak_memory_bytes"] == PEAK_BYTES
    assert summary["changed_settings"] == ["budget.updates 2 -> 3 after update 2"]

    # killed after the last checkpoint and before the summary: that is made up for; and a sample
    # of a way that was given up since
    (directory / "summary.json").unlink()
    written = (directory / "samples.txt").read_bytes()
    ours = b"--- after update 2 ---\na\r\nb\n\n"
    # the second was cut off within a character
    lost = "--- after update 1,004 ---\nlost…".encode()[:-1]
    (directory / "samples.txt").write_bytes(
        ours + written[written.index(b"--- after update 3") :] + lost
    )
    run(train_config(*again, "budget.updates=3"))
    assert validations(directory) == [2, 3]
    assert samples(directory) == ["--- after update 2 ---", "--- after update 3 ---"]
    assert (directory / "samples.txt").read_bytes().startswith(ours)
    assert json.loads((directory / "summary.json").read_text())["finished"] is True


def test_after_a_partial_update_none_follows(
    train_config: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "run"
    asked = [
        "attention=softmax",
        f"run_directory={directory}",
        "resume=auto",
        "budget.updates=null",
    ]
    # eight samples, then four
    run(train_config(*asked, "budget.samples=12"))
    capsys.readouterr()
    run(train_config(*asked, "budget.samples=12"))
    (told,) = capsys.readouterr().out.splitlines()
    assert told.endswith(f"start another run with initial_weights={directory}")
    assert "budget." not in told
    with pytest.raises(CheckpointError, match="smaller than the others, so none") as more:
        run(train_config(*asked, "budget.samples=24"))
    assert str(more.value).endswith(f"initial_weights={find_checkpoint(directory)}")


def test_a_run_goes_on_with_its_own_text_alone(
    train_config: Any, text_folder: Path, tmp_path: Path
) -> None:
    text, directory = tmp_path / "text", tmp_path / "run"
    shutil.copytree(text_folder, text)

    def go_on(updates: int, *overrides: str) -> None:
        own = [f"data.source.path={text}", f"run_directory={directory}", "resume=auto"]
        own.append("schedule.warmup_updates=0")
        run(train_config("attention=softmax", *own, f"budget.updates={updates}", *overrides))

    go_on(1)
    # the same tokens at another place, in other files
    text = text.rename(tmp_path / "moved")
    go_on(2, f"data.cache_directory={tmp_path / 'cache'}", "data.parts=3", "data.shard_tokens=3000")
    assert validations(directory) == [1, 2]
    before = contents(directory)
    # a maximum makes other windows, and so does a letter more
    for overrides in ("data.maximum_tokens=10000",), ():
        with pytest.raises(CheckpointError, match=r"trained on other text .* initial_weights="):
            go_on(3, *overrides)
        (text / "document_03.txt").write_text("Something else.")
    assert contents(directory) == before
