"""Parts: the same bytes whoever prepares them, on as many processes and machines as there are."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slayformer.config import DataConfig, SourceConfig, TokenizerConfig
from slayformer.data import parts as module
from slayformer.data.parts import PartsMissing
from slayformer.data.prepare import PreparedData, prepare
from slayformer.data.split import split_position
from slayformer.errors import ConfigError, DataError

ROOT = Path(__file__).resolve().parents[2]
BYTES = TokenizerConfig("bytes", None)
PARTS = 4


@pytest.fixture
def data(text_folder: Path, tmp_path: Path) -> DataConfig:
    return DataConfig(
        source=SourceConfig(kind="text", path=str(text_folder)),
        validation_fraction=0.3,
        shard_tokens=3000,
        parts=PARTS,
        cache_directory=str(tmp_path / "cache"),
        workers=1,
    )


def contents(prepared: PreparedData) -> dict[str, bytes]:
    # what a killed process was writing may stay
    passing = (".lock", ".tmp")
    files = (p for p in prepared.directory.rglob("*") if p.is_file() and p.suffix not in passing)
    return {p.relative_to(prepared.directory).as_posix(): p.read_bytes() for p in files}


def texts(prepared: PreparedData, side: str) -> list[str]:
    stream = getattr(prepared, side)
    text = prepared.tokenizer.decode(stream.read(0, len(stream)))
    return text.split("<|endoftext|>")[:-1]


def elsewhere(data: DataConfig, name: str, **changes: object) -> DataConfig:
    folder = Path(data.cache_directory).with_name(name)
    return replace(data, cache_directory=str(folder), **changes)  # type: ignore[arg-type]


def test_parts_in_order_are_the_whole(data: DataConfig) -> None:
    prepared = prepare(data, BYTES)
    whole = prepare(replace(data, parts=None), BYTES)
    assert prepared.directory != whole.directory
    assert prepared.identity == whole.identity
    for side in ("train", "validation"):
        assert texts(prepared, side) == texts(whole, side)
        assert getattr(prepared, side).documents == getattr(whole, side).documents
    names = [path.name for path in sorted(prepared.directory.glob("train-*.bin"))]
    assert {name.split("-")[1] for name in names} == {f"{part:05d}" for part in range(PARTS)}
    assert "train-00001-00001.bin" in names


def test_part_by_part_and_by_processes_the_bytes_are_the_same(data: DataConfig) -> None:
    expected = contents(prepare(data, BYTES))
    # two processes of a pool
    assert contents(prepare(elsewhere(data, "pool", processes=2), BYTES)) == expected
    # two machines, the second first; then both folders in one
    machines = elsewhere(data, "machines")
    with pytest.raises(PartsMissing, match=r"^data.part=2/2 is prepared; 2 of 4 parts [^\n]*$"):
        prepare(replace(machines, part="2/2"), BYTES)
    prepared = prepare(replace(machines, part="1/2"), BYTES)
    assert contents(prepared) == expected


KILLED = """
import os, signal, sys
from slayformer.config import DataConfig, SourceConfig, TokenizerConfig
from slayformer.data import prepare as module
replace, left = os.replace, int(sys.argv[3])
def replace_then_die(source, target):
    global left
    replace(source, target)
    left -= str(target).endswith(".bin")
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
os.replace = replace_then_die
source = SourceConfig(kind="text", path=sys.argv[1])
data = DataConfig(source=source, validation_fraction=0.3, shard_tokens=3000, parts=4,
                  cache_directory=sys.argv[2], workers=1)
module.prepare(data, TokenizerConfig("bytes", None))
"""


def test_killed_within_a_part_its_finished_shards_are_kept(data: DataConfig) -> None:
    expected = contents(prepare(data, BYTES))
    killed = elsewhere(data, "killed")
    finished = subprocess.run(
        [sys.executable, "-c", KILLED, data.source.path or "", killed.cache_directory, "3"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
    )
    assert finished.returncode == -signal.SIGKILL, finished.stderr.decode()
    before = {p.name: p.stat().st_ino for p in Path(killed.cache_directory).rglob("*.bin")}
    assert len(before) == 3
    prepared = prepare(killed, BYTES)
    assert contents(prepared) == expected
    after = {p.name: p.stat().st_ino for p in prepared.directory.glob("*.bin")}
    assert {name: after[name] for name in before} == before


ALONE = """
import os, signal, sys
from slayformer.config import DataConfig, SourceConfig, TokenizerConfig
from slayformer.data import parts, prepare as module
wait = parts.wait
def wait_then_die(*arguments, **options):
    wait(*arguments, **options)
    os.kill(os.getpid(), signal.SIGKILL)
parts.wait = wait_then_die
source = SourceConfig(kind="text", path=sys.argv[1])
data = DataConfig(source=source, validation_fraction=0.3, shard_tokens=3000, parts=4,
                  processes=2, cache_directory=sys.argv[2], workers=1)
module.prepare(data, TokenizerConfig("bytes", None))
"""


def test_no_process_outlives_the_one_that_started_it(data: DataConfig) -> None:
    killed = elsewhere(data, "killed")
    process = subprocess.Popen(
        [sys.executable, "-c", ALONE, data.source.path or "", killed.cache_directory],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
    )
    # every process it started holds the other end
    _, told = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL, told.decode()
    assert contents(prepare(killed, BYTES)) == contents(prepare(data, BYTES))


@pytest.mark.parametrize("streaming", [True, False])
def test_parquet_is_cut_by_files_then_by_row_groups(
    data: DataConfig, tmp_path: Path, streaming: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    folder = tmp_path / "dataset"
    folder.mkdir()
    rows = [f"row {number} " * 9 for number in range(60)]
    for file in range(2):
        table = pa.table({"text": rows[30 * file : 30 * file + 30]})
        pq.write_table(table, folder / f"train-{file}.parquet", row_group_size=10)
    source = SourceConfig(kind="huggingface", path=str(folder), streaming=streaming)
    expected = [row for row in rows if split_position_of(row) >= 0.3]
    for parts in (2, 5):
        prepared = prepare(replace(data, source=source, parts=parts), BYTES)
        assert texts(prepared, "train") == expected
    with pytest.raises(ConfigError, match=r"data\.parts=61: .* at most, which is the number"):
        prepare(replace(data, source=source, parts=61), BYTES)


def split_position_of(row: str) -> float:
    import hashlib

    return split_position(hashlib.sha256(row.encode()).hexdigest())


def test_every_part_has_its_share_of_the_maximum(data: DataConfig, tmp_path: Path) -> None:
    held_out = tmp_path / "held_out.txt"
    held_out.write_text("all of this")
    source = SourceConfig(kind="text", path=str(held_out))
    prepared = prepare(replace(data, maximum_tokens=8001, validation_source=source), BYTES)
    assert texts(prepared, "validation") == ["all of this"]
    files = sorted(Path(data.source.path or "").iterdir())
    expected = []
    for part in range(PARTS):
        tokens = 0
        for path in files[10 * part // PARTS : 10 * (part + 1) // PARTS]:
            if tokens < 2001:
                expected.append(path.read_text())
                tokens += len(expected[-1]) + 1
    assert texts(prepared, "train") == expected


def test_what_cannot_be_cut_or_is_damaged_is_told(data: DataConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.parts=11: .* can be cut into 10 at most"):
        prepare(replace(data, parts=11), BYTES)
    blank = tmp_path / "blank"
    blank.mkdir()
    for number in range(PARTS):
        (blank / f"{number}.txt").write_text(" \n")
    with pytest.raises(DataError, match="there is no text in it"):
        prepare(replace(data, source=SourceConfig(kind="text", path=str(blank))), BYTES)
    prepared = prepare(data, BYTES)
    (prepared.directory / "manifest.json").unlink()
    record = module.record_file(prepared.directory, 2)
    record.write_text('{"train": {}}')
    with pytest.raises(DataError, match=r"part-00002\.json is damaged.*delete it"):
        prepare(data, BYTES)
    shutil.rmtree(prepared.directory)
