from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slayformer.config import DataConfig, SourceConfig, TokenizerConfig
from slayformer.data import prepare as module
from slayformer.data import writing
from slayformer.data.prepare import open_prepared, prepare
from slayformer.data.split import split_position
from slayformer.data.tokenizer import BytesTokenizer, GPT2Tokenizer
from slayformer.errors import DataError

ROOT = Path(__file__).resolve().parents[2]
BYTES = TokenizerConfig("bytes", None)
FRACTION = 0.3


@pytest.fixture
def data(text_folder, tmp_path) -> DataConfig:
    """Return a configuration of this test's own text and cache: many shards, several batches."""
    folder = tmp_path / "text"
    shutil.copytree(text_folder, folder)
    return DataConfig(
        source=SourceConfig(kind="text", path=str(folder)),
        validation_fraction=FRACTION,
        shard_tokens=3000,
        cache_directory=str(tmp_path / "cache"),
        workers=2,
    )


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    monkeypatch.setattr(writing, "BATCH_CHARACTERS", 7000)


def contents(directory: Path) -> dict[str, bytes]:
    files = (p for p in directory.rglob("*") if p.is_file())
    return {p.relative_to(directory).as_posix(): p.read_bytes() for p in files}


def expected_streams(data: DataConfig, tokenizer=None) -> dict[str, list[int]]:
    """Return the tokens of each side, worked out document by document."""
    tokenizer = tokenizer or BytesTokenizer()
    streams: dict[str, list[int]] = {"train": [], "validation": []}
    for path in sorted(Path(data.source.path or "").iterdir()):
        side = "validation" if split_position(path.name) < data.validation_fraction else "train"
        streams[side] += [*tokenizer.encode(path.read_text()), tokenizer.end_of_text]
    return streams


def all_tokens(stream) -> list[int]:
    return stream.read(0, len(stream)).tolist()


def test_streams_are_documents_with_end_of_text(data):
    (Path(data.source.path or "") / "special.txt").write_text("<|endoftext|>" * 3)
    prepared = prepare(data, BYTES)
    expected = expected_streams(data)
    assert all_tokens(prepared.train) == expected["train"]
    assert all_tokens(prepared.validation) == expected["validation"]
    assert prepared.train.documents == expected["train"].count(256)
    assert prepared.train.documents + prepared.validation.documents == 11
    # whole documents fill a shard: each of 3,000 tokens or more but the last
    sizes = [len(piece) for piece in prepared.train.pieces]
    assert len(sizes) > 3
    assert all(size >= 3000 for size in sizes[:-1])
    assert all(piece[-1] == 256 for piece in prepared.train.pieces)
    assert prepared.directory.parent == Path(data.cache_directory)
    assert prepared.directory.name.startswith("text-bytes-")


def test_gpt2_tokens(data):
    prepared = prepare(data, TokenizerConfig("gpt2", None))
    assert all_tokens(prepared.validation) == expected_streams(data, GPT2Tokenizer())["validation"]
    assert all_tokens(prepared.train) == expected_streams(data, GPT2Tokenizer())["train"]


def test_bpe_is_trained_and_kept(data):
    prepared = prepare(data, TokenizerConfig("bpe", 280))
    assert prepared.tokenizer.vocabulary_size == 280
    text = prepared.tokenizer.decode(all_tokens(prepared.train))
    folder = Path(data.source.path or "")
    train = [p for p in sorted(folder.iterdir()) if split_position(p.name) >= FRACTION]
    assert text == "".join(p.read_text() + "<|endoftext|>" for p in train)
    again = prepare(data, TokenizerConfig("bpe", 280))
    assert again.tokenizer.identity == prepared.tokenizer.identity
    assert again.directory == prepared.directory
    with pytest.raises(DataError, match=r"tokenizer\.vocabulary_size=9000: .* give only"):
        prepare(data, TokenizerConfig("bpe", 9000))


def test_second_time_nothing_is_written_or_said(data, capsys, monkeypatch):
    first = prepare(data, BYTES)
    assert "preparing text" in capsys.readouterr().err
    stamps = {p: p.stat().st_mtime_ns for p in first.directory.rglob("*")}
    monkeypatch.setattr(module, "_build", None)
    second = prepare(data, BYTES)
    assert {p: p.stat().st_mtime_ns for p in first.directory.rglob("*")} == stamps
    assert all_tokens(second.train) == all_tokens(first.train)
    captured = capsys.readouterr()
    assert captured.out + captured.err == ""


def test_whatever_changes_the_tokens_changes_the_folder(data, tmp_path):
    def folder(tokenizer=BYTES, **options) -> Path:
        return prepare(DataConfig(**{**vars(data), **options}), tokenizer).directory

    other = tmp_path / "other"
    shutil.copytree(data.source.path or "", other)
    (other / "document_00.txt").write_text("other words")
    other_source = SourceConfig(kind="text", path=str(other))
    folders = [
        folder(),
        folder(TokenizerConfig("gpt2", None)),
        folder(TokenizerConfig("bpe", 270)),
        folder(TokenizerConfig("bpe", 271)),
        folder(source=other_source),
        folder(validation_fraction=0.4),
        folder(validation_source=other_source),
        folder(maximum_tokens=20_000),
        folder(shard_tokens=4000),
    ]
    assert len(set(folders)) == len(folders)
    same = [folder(workers=1), folder(verify=False), folder(isolate_documents=True)]
    assert set(same) == {folders[0]}


@pytest.mark.parametrize("workers", [1, 3])
def test_result_does_not_depend_on_workers_or_batches(data, workers, tmp_path, monkeypatch):
    first = prepare(data, BYTES)
    data.workers, data.cache_directory = workers, str(tmp_path / "elsewhere")
    monkeypatch.setattr(writing, "BATCH_CHARACTERS", 1)
    second = prepare(data, BYTES)
    assert second.directory != first.directory
    assert contents(second.directory) == contents(first.directory)


def test_maximum_stops_after_a_whole_document(data):
    everything = expected_streams(data)
    data.maximum_tokens = 9000
    prepared = prepare(data, BYTES)
    train = all_tokens(prepared.train)
    assert train == everything["train"][: len(train)]
    assert train[-1] == 256
    last_document = train[-2::-1].index(256) + 1
    assert len(train) - last_document < 9000 <= len(train) < len(everything["train"])
    # the held-out documents among those read
    validation = all_tokens(prepared.validation)
    assert validation == everything["validation"][: len(validation)]


def test_own_validation_source_is_used_whole(data, tmp_path):
    held_out = tmp_path / "held_out.txt"
    held_out.write_text("all of this")
    data.validation_source = SourceConfig(kind="text", path=str(held_out))
    data.maximum_tokens = 9000
    prepared = prepare(data, BYTES)
    assert all_tokens(prepared.validation) == [*b"all of this", 256]
    assert 9000 <= len(prepared.train) < 14_000


def test_streamed_dataset(data, tmp_path):
    folder = tmp_path / "dataset"
    folder.mkdir()
    texts = [f"row {number} " * 20 for number in range(50)]
    pq.write_table(pa.table({"text": texts}), folder / "train.parquet")
    data.source = SourceConfig(kind="huggingface", path=str(folder))
    prepared = prepare(data, BYTES)
    assert prepared.train.documents + prepared.validation.documents == 50
    train = prepared.tokenizer.decode(all_tokens(prepared.train)).split("<|endoftext|>")[:-1]
    assert set(train) <= set(texts)
    assert train == sorted(train, key=texts.index)


KILLED = """
import json, os, signal, sys
from slayformer.config import DataConfig, SourceConfig, TokenizerConfig
from slayformer.data import prepare as module
from slayformer.data import writing
options, tokenizer, renames = json.loads(sys.argv[1])
writing.BATCH_CHARACTERS = 7000
replace = os.replace
def replace_then_die(source, target):
    global renames
    replace(source, target)
    renames -= str(target).endswith(".bin")
    if renames == 0:
        open(str(target) + ".1.tmp", "wb").write(b"half a shard")
        os.kill(os.getpid(), signal.SIGKILL)
os.replace = replace_then_die
source = SourceConfig(**options.pop("source"))
module.prepare(DataConfig(source=source, **options), TokenizerConfig(**tokenizer))
"""


def kill_after(data: DataConfig, tokenizer: TokenizerConfig, renames: int) -> None:
    options = {**vars(data), "source": vars(data.source)}
    argument = json.dumps([options, vars(tokenizer), renames])
    finished = subprocess.run(
        [sys.executable, "-c", KILLED, argument],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
    )
    assert finished.returncode == -signal.SIGKILL, finished.stderr.decode()


@pytest.mark.parametrize("maximum_tokens", [None, 15_000])
@pytest.mark.parametrize("tokenizer", [BYTES, TokenizerConfig("bpe", 270)], ids=lambda t: t.name)
def test_killed_and_restarted(data, tokenizer, maximum_tokens, tmp_path, monkeypatch):
    data.maximum_tokens = maximum_tokens
    whole = prepare(data, tokenizer).directory
    manifest = json.loads((whole / "manifest.json").read_text())
    shards = len(manifest["train"]["shards"]) + len(manifest["validation"]["shards"])
    data.cache_directory = str(tmp_path / "killed")
    data.workers = 1
    encoded: list[str] = []
    encode_batch = module.Tokenizer.encode_batch

    def recording(self, texts, workers=None):
        encoded.extend(texts)
        return encode_batch(self, texts, workers)

    for renames in (1, 2, shards):
        shutil.rmtree(data.cache_directory, ignore_errors=True)
        kill_after(data, tokenizer, renames)
        (tokenizer_folder,) = Path(data.cache_directory).glob("*/tokenizer")
        directory = tokenizer_folder.parent
        assert not (directory / "manifest.json").exists()
        kept = {p: p.stat().st_ino for p in directory.glob("*.bin")}
        assert len(kept) == renames
        encoded.clear()
        monkeypatch.setattr(module.Tokenizer, "encode_batch", recording)
        prepared = prepare(data, tokenizer)
        monkeypatch.undo()
        monkeypatch.setattr(writing, "BATCH_CHARACTERS", 7000)
        assert contents(directory) == contents(whole)
        # finished shards are the same files, and their documents were not encoded again
        assert {p: p.stat().st_ino for p in kept} == kept
        for path in kept:
            ids = module.open_shard(path, tokenizer=prepared.tokenizer, verify=True).ids
            documents = prepared.tokenizer.decode(ids).split("<|endoftext|>")[:-1]
            assert documents
            assert not set(documents) & set(encoded)


def test_restart_makes_a_damaged_shard_anew(data):
    whole = prepare(data, BYTES).directory
    good = contents(whole)
    shard = whole / "train-00001.bin"
    content = shard.read_bytes()
    for damage in (content[:-3], content[:-3] + b"\1\0\0"):
        shard.write_bytes(damage)
        (whole / "manifest.json").unlink()
        prepare(data, BYTES)
        assert contents(whole) == good


def test_two_processes_at_once(data):
    """Both give the same whole folder; the shards are written once."""
    program = KILLED.replace("renames == 0", "False")
    options = {**vars(data), "source": vars(data.source)}
    argument = json.dumps([options, vars(BYTES), 0])
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program, argument]
    processes = [
        subprocess.Popen(command, env=environment, stderr=subprocess.PIPE) for _ in range(3)
    ]
    said = [process.communicate()[1].decode() for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], said
    assert sum("preparing text" in text for text in said) == 1
    prepared = prepare(data, BYTES)
    assert all_tokens(prepared.train) == expected_streams(data)["train"]


def test_one_document_cannot_be_split(data):
    path = Path(data.source.path or "") / "document_03.txt"
    data.source.path = str(path)
    with pytest.raises(DataError, match=r"data\.source\.path=.*document_03\.txt: it is one doc"):
        prepare(data, BYTES)
    data.source.document_start = "^$"
    data.validation_fraction = 0.5
    prepared = prepare(data, BYTES)
    assert prepared.train.documents > 0
    assert prepared.validation.documents > 0


@pytest.mark.parametrize(("fraction", "empty"), [(1e-6, "validation"), (0.999999, "train")])
def test_no_document_on_a_side(data, fraction, empty):
    data.validation_fraction = fraction
    # a tokenizer that has nothing to learn from is not what is wrong
    for tokenizer in (BYTES, TokenizerConfig("bpe", 280)):
        with pytest.raises(DataError, match=rf"data\.validation_fraction=.* leaves no {empty} doc"):
            prepare(data, tokenizer)


def test_empty_corpus(data, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "a.txt").write_text("\n")
    data.source.path = str(empty)
    for tokenizer in (BYTES, TokenizerConfig("bpe", 300)):
        with pytest.raises(DataError, match="there is no text in it"):
            prepare(data, tokenizer)


def damaged(data, match):
    with pytest.raises(DataError, match=match) as info:
        prepare(data, BYTES)
    assert "delete the folder" in str(info.value)
    assert "prepare the data again" in str(info.value)


def test_damaged_folders_are_refused(data):
    directory = prepare(data, BYTES).directory
    good = contents(directory)

    def restore():
        for name, content in good.items():
            (directory / name).write_bytes(content)

    shard, manifest = directory / "train-00000.bin", directory / "manifest.json"
    shard.write_bytes(good[shard.name][:-1] + bytes([good[shard.name][-1] ^ 4]))
    damaged(data, "its tokens do not match their sha256")
    data.verify = False
    prepare(data, BYTES)
    data.verify = True
    shard.write_bytes(good[shard.name][:-20])
    damaged(data, "is not a whole token shard")
    shard.write_bytes(good["train-00001.bin"])
    damaged(data, "is not the shard the manifest lists")
    shard.unlink()
    damaged(data, "cannot read the shard")
    restore()
    GPT2Tokenizer().save(directory / "tokenizer")
    damaged(data, "is not the one of its shards")
    (directory / "tokenizer" / "tokenizer.json").unlink()
    damaged(data, "holds no tokenizer")
    restore()
    for text in ("", "[]", '{"train": {}}', good["manifest.json"].decode()[:-30]):
        manifest.write_text(text)
        damaged(data, r"manifest\.json is damaged")
    restore()
    # all of another tokenizer's shards, under this manifest
    other = prepare(data, TokenizerConfig("gpt2", None)).directory
    shutil.copy(other / "validation-00000.bin", directory / "validation-00000.bin")
    damaged(data, "ids of another tokenizer")
    restore()
    assert all_tokens(prepare(data, BYTES).train) == expected_streams(data)["train"]


def test_tokens_that_another_machine_has_are_not_called_damaged(tmp_path):
    with pytest.raises(DataError, match=r"holds no prepared tokens .* that all of them see$"):
        open_prepared(tmp_path / "elsewhere", verify=False)


def test_cache_that_cannot_be_written(data, tmp_path):
    (tmp_path / "file").write_text("")
    data.cache_directory = str(tmp_path / "file" / "cache")
    with pytest.raises(DataError, match=r"cannot write .*: Not a directory; .*data\.cache_dir"):
        prepare(data, BYTES)


def test_disk_full(data, run_command):
    program = KILLED.replace("renames == 0", "False").replace(
        "import json,", "import resource, json,"
    )
    program = (
        program.replace(
            "module.prepare(",
            "resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))\n"
            "from slayformer.cli import entry_point\n"
            "entry_point(lambda: module.prepare(",
        ).rstrip()
        + ")\n"
    )
    options = {**vars(data), "source": vars(data.source)}
    finished = run_command(["-c", program, json.dumps([options, vars(BYTES), 0])])
    assert finished.code == 2
    assert finished.stderr.splitlines()[-1].startswith(
        f"error: cannot write {data.cache_directory}"
    )
    assert "File too large; free some space" in finished.stderr
    assert "Traceback" not in finished.stderr
    # nothing half-written stays, and with space it goes through
    left = {p.name for p in Path(data.cache_directory).rglob("*") if p.is_file()}
    assert not [name for name in left if name.endswith((".bin", ".tmp", "manifest.json"))]
    assert all_tokens(prepare(data, BYTES).train) == expected_streams(data)["train"]


def test_opens_without_writing(data):
    directory = prepare(data, BYTES).directory
    before = contents(directory)
    prepared = open_prepared(directory, verify=True)
    assert prepared.tokenizer.identity == BytesTokenizer().identity
    assert all_tokens(prepared.validation) == expected_streams(data)["validation"]
    assert isinstance(prepared.train.pieces[0].base, np.memmap)
    assert contents(directory) == before


def test_command(data, run_command, tmp_path):
    arguments = ["data=text", f"data.source.path={data.source.path}", "tokenizer=bpe"]
    arguments += ["tokenizer.vocabulary_size=300", f"data.validation_fraction={FRACTION}"]
    finished = run_command(["scripts/prepare_data.py", *arguments], cwd=tmp_path)
    assert finished.code == 0, finished.stderr
    lines = dict(line.split(maxsplit=1) for line in finished.stdout.splitlines())
    prepared = open_prepared(Path(lines["folder"]), verify=True)
    assert prepared.directory.parent == tmp_path / "data_cache"
    assert lines["tokenizer"] == "bpe, 300 tokens"
    train = prepared.train
    assert lines["training"] == f"{train.documents} documents, {len(train):,} tokens"
    validation = prepared.validation
    assert lines["validation"] == f"{validation.documents} documents, {len(validation):,} tokens"


def test_command_with_a_missing_path(run_command):
    missing = run_command(["scripts/prepare_data.py", "data=text", "data.source.path=nowhere"])
    assert missing.code == 2
    assert missing.stderr == "error: data.source.path=nowhere: there is no such file or folder\n"


OPEN = """
import resource, sys
from pathlib import Path
from slayformer.data.prepare import open_prepared
from slayformer.errors import DataError
resource.setrlimit(resource.RLIMIT_NOFILE, (64, int(sys.argv[2])))
try:
    print(len(open_prepared(Path(sys.argv[1]), verify=True).train.pieces))
except DataError as error:
    print(error)
"""


def test_more_shards_than_files_may_be_open(data, tmp_path):
    (tmp_path / "lines").write_text("".join(f"Line {number}.\n" for number in range(200)))
    source = SourceConfig(kind="text", path=str(tmp_path / "lines"), document_start="^")
    prepared = prepare(replace(data, source=source, shard_tokens=1), BYTES)
    shards = len(prepared.train.pieces)
    assert shards > 100
    told = [
        subprocess.run(
            [sys.executable, "-c", OPEN, str(prepared.directory), str(limit)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for limit in (1000, 64)
    ]
    assert told[0] == f"{shards}\n"
    assert "one file more than may be open at once: raise that limit" in told[1]
    assert "delete" not in told[1]
