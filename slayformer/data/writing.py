"""From documents to token shards, in order: what is on disk already is not encoded again."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

from slayformer.config import DataConfig
from slayformer.data.shards import Shard, open_shard, token_dtype, write_shard
from slayformer.data.split import TRAIN, VALIDATION, Sided
from slayformer.data.tokenizer import Tokenizer
from slayformer.errors import DataError
from slayformer.progress import PlainProgress

SIDES = (TRAIN, VALIDATION)
# text that is read, then encoded while the next is read: it bounds the memory
BATCH_CHARACTERS = 4_000_000


def write_documents(
    directory: Path,
    readings: Sequence[Iterable[Sided]],
    tokenizer: Tokenizer,
    data: DataConfig,
    *,
    stems: dict[str, str],
    maximum_tokens: int | None,
    total: int | None,
    console: Console,
) -> dict[str, dict[str, Any]]:
    """Write `readings` to shards; return documents, tokens and shards of each side, by its name.

    The first reading ends with the training document that reaches `maximum_tokens`. `stems` has
    the beginning of the shards' names by side, `total` the number of documents if it is known.
    """
    for stem in stems.values():
        for leftover in directory.glob(f"{stem}-*.tmp"):
            leftover.unlink()
    writers = {
        side: ShardWriter(directory, stems[side], tokenizer, data.shard_tokens) for side in SIDES
    }
    with _progress(console, total, writers) as show:
        for documents in readings:
            fresh = _not_yet_written(documents, writers, maximum_tokens)
            with closing(_encoded(fresh, tokenizer, data.workers)) as batches:
                for batch in batches:
                    enough = _write(batch, writers, maximum_tokens)
                    show()
                    if enough:
                        break
    for writer in writers.values():
        writer.finish()
    return {side: writer.summary() for side, writer in writers.items()}


class ShardWriter:
    """Writes documents to the shards `stem`-NNNNN.bin; finds those an interrupted run has finished.

    `documents_kept` counts the documents in these; `documents` and `tokens` all so far.
    """

    def __init__(self, directory: Path, stem: str, tokenizer: Tokenizer, shard_tokens: int) -> None:
        self._directory, self._stem, self._tokenizer = directory, stem, tokenizer
        self._shard_tokens = shard_tokens
        self._dtype = token_dtype(tokenizer.vocabulary_size)
        self._end_of_text = np.array([tokenizer.end_of_text], dtype=self._dtype).tobytes()
        self._buffer, self._buffer_documents = bytearray(), 0
        self._digests: dict[str, str] = {}
        self.documents = self.tokens = 0
        while (shard := self._finished_shard()) is not None:
            self._digests[shard.path.name] = shard.sha256
            self.documents += shard.documents
            self.tokens += len(shard.ids)
        self.documents_kept = self.documents

    def add(self, ids: np.ndarray) -> None:
        """Append a document and its end-of-text; a shard ends with the document that fills it."""
        self._buffer += ids.astype(self._dtype, copy=False).tobytes() + self._end_of_text
        self._buffer_documents += 1
        self.documents += 1
        self.tokens += len(ids) + 1
        if len(self._buffer) >= self._shard_tokens * self._dtype.itemsize:
            self.finish()

    def finish(self) -> None:
        """Write what has not been written, if any."""
        if not self._buffer:
            return
        path = self._next_path()
        ids = np.frombuffer(self._buffer, dtype=self._dtype)
        write_shard(path, ids, tokenizer=self._tokenizer, documents=self._buffer_documents)
        self._digests[path.name] = hashlib.sha256(self._buffer).hexdigest()
        self._buffer, self._buffer_documents = bytearray(), 0

    def summary(self) -> dict[str, Any]:
        """Return what the manifest says of this side."""
        return {"documents": self.documents, "tokens": self.tokens, "shards": self._digests}

    def _next_path(self) -> Path:
        return self._directory / f"{self._stem}-{len(self._digests):05d}.bin"

    def _finished_shard(self) -> Shard | None:
        """Return the next shard if it is on disk; a damaged one will be written over."""
        try:
            return open_shard(self._next_path(), tokenizer=self._tokenizer, verify=True)
        except DataError:
            return None


def _write(
    batch: Iterable[tuple[str, np.ndarray]],
    writers: dict[str, ShardWriter],
    maximum_tokens: int | None,
) -> bool:
    """Write a batch; returns True as soon as the training side has all the tokens it may have."""
    for side, ids in batch:
        writers[side].add(ids)
        if side == TRAIN and maximum_tokens and writers[TRAIN].tokens >= maximum_tokens:
            return True
    return False


def _not_yet_written(
    documents: Iterable[Sided], writers: dict[str, ShardWriter], maximum_tokens: int | None
) -> Iterator[Sided]:
    """Yield the documents that are in no finished shard.

    Ends where a run without interruption would: at the training document that fills the maximum.
    """
    kept = {side: writer.documents_kept for side, writer in writers.items()}
    full = bool(maximum_tokens) and writers[TRAIN].tokens >= (maximum_tokens or 0)
    for side, document in documents:
        if kept[side] == 0:
            yield side, document
            continue
        kept[side] -= 1
        if side == TRAIN and full and kept[TRAIN] == 0:
            return


def _encoded(
    documents: Iterable[Sided], tokenizer: Tokenizer, workers: int | None
) -> Generator[list[tuple[str, np.ndarray]]]:
    """Yield the ids of `documents` in order, batch by batch; one is encoded as the next is read."""
    with ThreadPoolExecutor(1) as background:
        waiting: Future[list[tuple[str, np.ndarray]]] | None = None

        def encode(batch: list[Sided]) -> list[tuple[str, np.ndarray]]:
            ids = tokenizer.encode_batch([document.text for _, document in batch], workers)
            return [(side, array) for (side, _), array in zip(batch, ids, strict=True)]

        for batch in _batches(documents):
            following = background.submit(encode, batch)
            if waiting is not None:
                yield waiting.result()
            waiting = following
        if waiting is not None:
            yield waiting.result()


def _batches(documents: Iterable[Sided]) -> Iterator[list[Sided]]:
    """Yield runs of documents of BATCH_CHARACTERS or a little more."""
    batch: list[Sided] = []
    characters = 0
    for side, document in documents:
        batch.append((side, document))
        characters += len(document.text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


@contextmanager
def _progress(
    console: Console, total: int | None, writers: dict[str, ShardWriter]
) -> Iterator[Any]:
    """Show documents, tokens and tokens/s of `writers`; yields the function that refreshes them."""
    columns = (
        TextColumn("{task.completed:,} documents"),
        BarColumn(),
        TextColumn("{task.fields[tokens]:,} tokens, {task.fields[speed]:,.0f} tokens/s,"),
        TimeElapsedColumn(),
    )

    def tokens() -> int:
        return sum(writer.tokens for writer in writers.values())

    kept, start = tokens(), time.monotonic()
    with PlainProgress(*columns, console=console) as progress:
        task = progress.add_task("", total=total, tokens=kept, speed=0.0)

        def show() -> None:
            speed = (tokens() - kept) / max(time.monotonic() - start, 1e-9)
            documents = sum(writer.documents for writer in writers.values())
            progress.update(task, completed=documents, tokens=tokens(), speed=speed)

        show()
        yield show
