"""The digests of the files of a source, kept so that a run that has its tokens need not read them.

They are kept under what the file system says of every file. An edit changes that, unless it falls
into the same tick of the clock as the one before: those of a file as young as that are not kept.
"""

from __future__ import annotations

import hashlib
import json
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from slayformer.cores import usable_cores
from slayformer.data.shards import write_atomically
from slayformer.errors import DataError

# the coarsest clock of a file system, that of FAT
TICK_NS = 2_000_000_000
EMPTY = hashlib.sha256(b"").hexdigest()


@dataclass(frozen=True)
class FilesDigest:
    """The sha256 (hex) over names and contents of files.

    `copies` has each file, unless empty, that holds the same as one before it, and the name of the
    first such.
    """

    sha256: str
    copies: dict[str, str]


def files_digest(files: dict[str, Path], where: str, kept: Path | None = None) -> FilesDigest:
    """Return the digest of `files`, by name; `kept` is a folder of known ones.

    Raises DataError if a file cannot be read.
    """
    begun = time.time_ns()
    try:
        told = _told(files)
        record = None if kept is None else kept / _sha256_of(told)
        known = None if record is None else _read(record)
        if known is not None:
            return known
        with ThreadPoolExecutor(usable_cores()) as pool:
            digests = list(pool.map(_digest, files.values()))
        unchanged = _told(files) == told
    except OSError as error:
        raise DataError(f"{where}: cannot read {error.filename}: {error.strerror}") from error
    first: dict[str, str] = {}
    for name, digest in zip(files, digests, strict=True):
        first.setdefault(digest, name)
    copies = {
        name: first[digest]
        for name, digest in zip(files, digests, strict=True)
        if digest != EMPTY and name != first[digest]
    }
    found = FilesDigest(_sha256_of(sorted(zip(files, digests, strict=True))), copies)
    old = all(max(changed) + TICK_NS < begun for *_, changed in told)
    if record is not None and unchanged and old:
        # a cache that nobody may write to is used as it is
        with suppress(OSError):
            record.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(record, (json.dumps(asdict(found)).encode(),))
    return found


def _told(files: dict[str, Path]) -> list[tuple[str, str, int, int, tuple[int, int]]]:
    """Return name, path, inode, size and times of change (ns, contents and inode) of each file."""
    stats = ((name, path, path.stat()) for name, path in files.items())
    return [
        (name, str(path.absolute()), s.st_ino, s.st_size, (s.st_mtime_ns, s.st_ctime_ns))
        for name, path, s in stats
    ]


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sha256_of(listing: object) -> str:
    return hashlib.sha256(json.dumps(listing).encode()).hexdigest()


def _read(record: Path) -> FilesDigest | None:
    try:
        return FilesDigest(**json.loads(record.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None
