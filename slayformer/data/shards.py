"""Token shards: binary files of token ids that say what they hold, read by memory map.

A shard is a prefix (magic, format version, header length, sha256 of the header), a JSON header
padded with spaces, then the ids, little-endian uint16 or uint32. Every byte is covered by a check.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import resource
import struct
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from slayformer.data.tokenizer import Tokenizer
from slayformer.errors import DataError

FORMAT_VERSION = 1
MAGIC = b"SLAYTOK\0"
PREFIX = struct.Struct("<8sII32s")
ALIGNMENT_BYTES = 64
MAXIMUM_HEADER_BYTES = 65_536
# left for everything else a process keeps open
OTHER_FILES = 1024


@dataclass(frozen=True)
class Shard:
    """An open shard: its file, its ids (memory mapped, read only) and its number of documents."""

    path: Path
    ids: np.ndarray
    documents: int
    sha256: str


@dataclass(frozen=True)
class TokenStream:
    """Arrays of token ids, one after the other, read as a single sequence.

    `label` tells in errors what the tokens are.
    """

    pieces: Sequence[np.ndarray]
    label: str = "the token stream"
    documents: int = 0
    _ends: list[int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_ends", list(accumulate(len(piece) for piece in self.pieces)))

    def __len__(self) -> int:
        """Return the number of tokens."""
        return self._ends[-1] if self._ends else 0

    def read(self, start: int, count: int) -> np.ndarray:
        """Return `count` ids from position `start` on, int64; raises IndexError outside."""
        out = np.empty(count, dtype=np.int64)
        self.read_into(out, start)
        return out

    def read_into(self, out: np.ndarray, start: int) -> None:
        """Fill the vector `out` with the ids from `start` on; raises IndexError outside."""
        if start < 0 or start + len(out) > len(self):
            raise IndexError(f"{start}..{start + len(out)} is outside {len(self)} tokens")
        piece, done = bisect_right(self._ends, start), 0
        while done < len(out):
            ids = self.pieces[piece]
            first = start + done - (self._ends[piece] - len(ids))
            count = min(len(out) - done, len(ids) - first)
            out[done : done + count] = ids[first : first + count]
            piece, done = piece + 1, done + count


def token_dtype(vocabulary_size: int) -> np.dtype:
    """Return the little-endian dtype that holds every id: uint16, or uint32 above 65,536 ids."""
    return np.dtype("<u2" if vocabulary_size <= 1 << 16 else "<u4")


def write_shard(path: Path, ids: np.ndarray, *, tokenizer: Tokenizer, documents: int = 0) -> None:
    """Write `ids`, the tokens of `documents` documents, to `path`: all of it or nothing.

    Raises ValueError for no ids or ids outside the vocabulary, OSError if the disk refuses.
    """
    if not len(ids) or int(ids.max()) >= tokenizer.vocabulary_size:
        raise ValueError(f"a shard needs ids, all below {tokenizer.vocabulary_size}")
    payload = np.ascontiguousarray(ids, dtype=token_dtype(tokenizer.vocabulary_size))
    header = {
        "dtype": payload.dtype.name,
        "vocabulary_size": tokenizer.vocabulary_size,
        "tokenizer": tokenizer.name,
        "tokenizer_identity": tokenizer.identity,
        "tokens": len(payload),
        "documents": documents,
        "sha256": hashlib.sha256(payload.data).hexdigest(),
    }
    text = json.dumps(header).encode()
    text += b" " * (-(PREFIX.size + len(text)) % ALIGNMENT_BYTES)
    prefix = PREFIX.pack(MAGIC, FORMAT_VERSION, len(text), hashlib.sha256(text).digest())
    write_atomically(path, (prefix, text, payload.data))


def open_shard(path: Path, *, tokenizer: Tokenizer, verify: bool) -> Shard:
    """Return the shard at `path`, checked before anything of its size is allocated.

    `verify` reads it all and compares its sha256. Raises DataError if the file is missing,
    truncated, damaged, no shard at all, or holds another tokenizer's ids.
    """
    remedy = f"delete the folder {path.parent} and prepare the data again"
    try:
        header, offset, size = _read_header(path)
        dtype, tokens = np.dtype(header["dtype"]).newbyteorder("<"), header["tokens"]
        identity, sha256 = header["tokenizer_identity"], header["sha256"]
        documents, vocabulary_size = header["documents"], header["vocabulary_size"]
        if dtype != token_dtype(vocabulary_size) or tokens < 1:
            raise ValueError(f"its header promises {tokens} tokens of {dtype}")
        if size != offset + tokens * dtype.itemsize:
            raise ValueError(f"it has {size:,} bytes, not {offset + tokens * dtype.itemsize:,}")
        # as a plain array: slices of np.memmap cost several times more
        ids = np.asarray(np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=(tokens,)))
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise DataError(
                f"{path} is one file more than may be open at once: raise that limit (ulimit -n "
                f"tells it), or prepare the data with a larger data.shard_tokens"
            ) from error
        raise DataError(f"cannot read the shard {path}: {error.strerror}; {remedy}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is not a whole token shard: {error}; {remedy}") from error
    if identity != tokenizer.identity:
        raise DataError(
            f"{path} holds ids of another tokenizer ({header['tokenizer']} {identity[:12]}, "
            f"not {tokenizer.name} {tokenizer.identity[:12]}); {remedy}"
        )
    if verify and hashlib.sha256(ids.data).hexdigest() != sha256:
        raise DataError(f"{path} is damaged: its tokens do not match their sha256; {remedy}")
    return Shard(path, ids, documents, sha256)


def allow_open(shards: int) -> None:
    """Raise this process's limit of open files for so many shards, as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = shards + OTHER_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _read_header(path: Path) -> tuple[dict[str, Any], int, int]:
    """Return header, offset of the ids and file size, both in bytes; ValueError if it is bad."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(PREFIX.size)
        if len(prefix) < PREFIX.size or not prefix.startswith(MAGIC):
            raise ValueError("it does not begin like one")
        _, version, header_bytes, digest = PREFIX.unpack(prefix)
        if version != FORMAT_VERSION:
            raise ValueError(f"its format version is {version}, not {FORMAT_VERSION}")
        offset = PREFIX.size + header_bytes
        if header_bytes > MAXIMUM_HEADER_BYTES or offset > size or offset % ALIGNMENT_BYTES:
            raise ValueError(f"its header cannot have {header_bytes:,} bytes")
        text = file.read(header_bytes)
    if hashlib.sha256(text).digest() != digest:
        raise ValueError("its header does not match its sha256")
    return json.loads(text), offset, size


def write_atomically(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Write `chunks` to `path` so that it is seen whole or not at all, even after a power cut."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
