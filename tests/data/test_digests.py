"""Digests that are kept: read no file twice, and never name the content before an edit."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from slayformer.data import digests
from slayformer.data.digests import files_digest
from slayformer.errors import DataError


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    for name in ("a", "b"):
        (tmp_path / name).write_text(f"text {name}")
    return {name: tmp_path / name for name in ("a", "b")}


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return a list that every file read is added to."""
    found: list[Path] = []
    real = digests._digest

    def digest(path: Path) -> str:
        found.append(path)
        return real(path)

    monkeypatch.setattr(digests, "_digest", digest)
    return found


def expected(files: dict[str, Path]) -> str:
    contents = {name: hashlib.sha256(path.read_bytes()) for name, path in files.items()}
    listing = [[name, digest.hexdigest()] for name, digest in sorted(contents.items())]
    return hashlib.sha256(json.dumps(listing).encode()).hexdigest()


def test_old_files_are_read_once(
    files: dict[str, Path], read: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "cache" / "digests"
    # these were made just now: an edit could leave their times as they are
    assert files_digest(files, "here", kept).sha256 == expected(files)
    assert not kept.exists()
    monkeypatch.setattr(digests, "TICK_NS", -(10**12))
    for _ in range(2):
        assert files_digest(files, "here", kept).sha256 == expected(files)
    assert len(read) == 4
    assert files_digest(files, "here").sha256 == expected(files)
    assert len(read) == 6


@pytest.mark.parametrize(
    "edit", ["in place", "replaced", "renamed", "gone", "record", "other record"]
)
def test_an_edit_of_equal_size_and_time_is_seen(
    files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edit: str
) -> None:
    kept = tmp_path / "digests"
    monkeypatch.setattr(digests, "TICK_NS", -(10**12))
    before = files_digest(files, "here", kept).sha256
    times = files["a"].stat()
    # the next tick of this file system's clock
    time.sleep(0.05)
    if edit == "in place":
        files["a"].write_text("texT a")
    elif edit == "replaced":
        (tmp_path / "c").write_text("texT a")
        (tmp_path / "c").rename(files["a"])
    elif edit == "renamed":
        files["c"] = files.pop("a").rename(tmp_path / "c")
    elif edit == "gone":
        files["a"].unlink()
        with pytest.raises(DataError, match=r"^here: cannot read .*/a: No such file"):
            files_digest(files, "here", kept)
        return
    else:
        damage = {"record": "damaged", "other record": "0" * 64}[edit]
        for record in kept.iterdir():
            record.write_text(damage)
    path = files.get("a", files.get("c"))
    assert path is not None
    # as rsync and tar set them
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    found = files_digest(files, "here", kept).sha256
    assert found == expected(files)
    assert (found == before) == edit.endswith("record")


def test_an_edit_while_it_is_read_is_not_kept(
    files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "TICK_NS", -(10**12))
    real = digests._digest

    def digest(path: Path) -> str:
        found = real(path)
        path.write_text("Text a")
        return found

    monkeypatch.setattr(digests, "_digest", digest)
    files_digest(files, "here", tmp_path / "digests")
    assert not (tmp_path / "digests").exists()


def test_a_cache_that_cannot_be_written_is_done_without(
    files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(digests, "TICK_NS", -(10**12))
    monkeypatch.setattr(digests, "write_atomically", refuse)
    assert files_digest(files, "here", tmp_path / "digests").sha256 == expected(files)


def test_copies_are_named_with_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: list[Path]
) -> None:
    monkeypatch.setattr(digests, "TICK_NS", -(10**12))
    files = {name: tmp_path / name for name in "dabcefg"}
    for name, text in zip(files, ("one", "two", "one", "six", "one", "", ""), strict=True):
        files[name].write_text(text)
    for _ in range(2):
        found = files_digest(files, "here", tmp_path / "digests")
        assert found.copies == {"b": "d", "e": "d"}
        assert found.sha256 == expected(files)
    assert len(read) == 7
