from __future__ import annotations

import errno
import hashlib
import json
import os
import struct

import numpy as np
import pytest

from slayformer.data.shards import TokenStream, open_shard, token_dtype, write_shard
from slayformer.data.tokenizer import BytesTokenizer, GPT2Tokenizer, Tokenizer
from slayformer.errors import DataError


class LargeTokenizer(BytesTokenizer):
    """A vocabulary of 70,000, which 16 bits cannot number."""

    name = "large"

    def __init__(self) -> None:
        Tokenizer.__init__(self, [b"x"] * 70_000, 69_999, b"large")


@pytest.fixture
def tokenizer():
    return BytesTokenizer()


@pytest.fixture
def path(tmp_path, tokenizer):
    path = tmp_path / "train-00000.bin"
    write_shard(path, np.arange(257), tokenizer=tokenizer, documents=3)
    return path


def refused(path, tokenizer, match, *, verify=False):
    with pytest.raises(DataError, match=match) as info:
        open_shard(path, tokenizer=tokenizer, verify=verify)
    message = str(info.value)
    assert str(path) in message
    assert f"delete the folder {path.parent} and prepare the data again" in message


def test_file_is_what_the_format_says(path, tokenizer):
    content = path.read_bytes()
    magic, version, header_bytes, digest = struct.unpack("<8sII32s", content[:48])
    assert (magic, version) == (b"SLAYTOK\0", 1)
    header = content[48 : 48 + header_bytes]
    assert hashlib.sha256(header).digest() == digest
    payload = content[48 + header_bytes :]
    assert (48 + header_bytes) % 64 == 0
    assert json.loads(header) == {
        "dtype": "uint16",
        "vocabulary_size": 257,
        "tokenizer": "bytes",
        "tokenizer_identity": tokenizer.identity,
        "tokens": 257,
        "documents": 3,
        "sha256": hashlib.sha256(payload).hexdigest(),
    }
    assert struct.unpack("<257H", payload) == tuple(range(257))


def test_written_and_read(path, tokenizer):
    shard = open_shard(path, tokenizer=tokenizer, verify=True)
    assert shard.ids.tolist() == list(range(257))
    assert shard.documents == 3
    with pytest.raises(ValueError, match="read-only"):
        shard.ids[0] = 1


def test_large_vocabularies_take_32_bits(tmp_path):
    tokenizer, path = LargeTokenizer(), tmp_path / "large.bin"
    write_shard(path, np.array([0, 65_535, 65_536, 69_999]), tokenizer=tokenizer)
    shard = open_shard(path, tokenizer=tokenizer, verify=True)
    assert shard.ids.dtype == np.dtype("<u4")
    assert shard.ids.tolist() == [0, 65_535, 65_536, 69_999]
    assert path.read_bytes().endswith(struct.pack("<4I", 0, 65_535, 65_536, 69_999))
    assert token_dtype(65_536) == np.dtype("<u2")
    assert token_dtype(65_537) == np.dtype("<u4")


def test_only_ids_of_the_vocabulary_are_written(tmp_path, tokenizer):
    for ids in ([], [0, 257]):
        with pytest.raises(ValueError, match="ids, all below 257"):
            write_shard(tmp_path / "a.bin", np.array(ids, np.int64), tokenizer=tokenizer)
    assert not list(tmp_path.iterdir())


def test_every_flipped_bit_is_found(path, tokenizer):
    good = path.read_bytes()
    generator = np.random.default_rng(0)
    for position in range(len(good)):
        damaged = bytearray(good)
        damaged[position] ^= 1 << int(generator.integers(8))
        path.write_bytes(damaged)
        with pytest.raises(DataError, match="delete the folder"):
            open_shard(path, tokenizer=tokenizer, verify=True)
    path.write_bytes(good)
    open_shard(path, tokenizer=tokenizer, verify=True)


def test_every_truncation_is_found_without_reading_the_tokens(path, tokenizer):
    good = path.read_bytes()
    for size in range(len(good)):
        path.write_bytes(good[:size])
        refused(path, tokenizer, "is not a whole token shard")
    path.write_bytes(good + b"\0\0")
    refused(path, tokenizer, r"it has [\d,]+ bytes, not")


def test_flipped_tokens_need_verify(path, tokenizer):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    open_shard(path, tokenizer=tokenizer, verify=False)
    refused(path, tokenizer, "is damaged: its tokens do not match", verify=True)


def test_other_files_are_refused(path, tokenizer, tmp_path):
    path.write_bytes(np.arange(1000, dtype=np.uint16).tobytes())
    refused(path, tokenizer, "does not begin like one")
    refused(tmp_path / "missing.bin", tokenizer, "cannot read the shard .*No such file")
    refused(tmp_path, tokenizer, "cannot read the shard .*Is a directory")


def test_other_versions_and_mad_sizes_are_refused(path, tokenizer):
    good = path.read_bytes()
    path.write_bytes(good[:8] + struct.pack("<I", 2) + good[12:])
    refused(path, tokenizer, "its format version is 2, not 1")
    path.write_bytes(good[:12] + struct.pack("<I", 0xFFFFFFD0) + good[16:])
    refused(path, tokenizer, "its header cannot have 4,294,967,248 bytes")
    # a header that is whole in itself and promises more than a machine can hold
    header = json.loads(good[48:].split(b"}")[0] + b"}") | {"tokens": 1 << 60}
    text = json.dumps(header).encode()
    text += b" " * (-(48 + len(text)) % 64)
    prefix = struct.pack("<8sII32s", b"SLAYTOK\0", 1, len(text), hashlib.sha256(text).digest())
    path.write_bytes(prefix + text + good[-514:])
    refused(path, tokenizer, r"bytes, not 2,305,843,009,213,69")


def test_shards_of_another_tokenizer_are_refused(path):
    refused(path, GPT2Tokenizer(), "ids of another tokenizer .bytes [0-9a-f]{12}, not gpt2")


def test_failed_write_leaves_the_old_file(path, tokenizer, monkeypatch):
    good = path.read_bytes()

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_shard(path, np.zeros(9, np.int64), tokenizer=tokenizer)
    assert path.read_bytes() == good
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_stream_reads_across_pieces(tokenizer, tmp_path):
    sizes, pieces = [5, 1, 7], []
    everything = np.random.default_rng(1).integers(0, 257, sum(sizes))
    for number, size in enumerate(sizes):
        start = sum(sizes[:number])
        path = tmp_path / f"{number}.bin"
        write_shard(path, everything[start : start + size], tokenizer=tokenizer)
        pieces.append(open_shard(path, tokenizer=tokenizer, verify=True).ids)
    stream = TokenStream(pieces)
    assert len(stream) == 13
    for start in range(14):
        for count in range(14 - start):
            ids = stream.read(start, count)
            assert ids.dtype == np.int64
            assert ids.tolist() == everything[start : start + count].tolist()
    for start, count in ((-1, 2), (13, 1), (0, 14)):
        with pytest.raises(IndexError):
            stream.read(start, count)
    assert len(TokenStream([])) == 0
