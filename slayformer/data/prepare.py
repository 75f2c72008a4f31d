"""From documents to token shards on disk, once: a folder per source, tokenizer and split.

The folder's name carries a key over everything its content depends on. Finished shards survive an
interruption; the same bytes come out whatever the number of workers and however often it stopped.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from slayformer.config import DataConfig, TokenizerConfig
from slayformer.data.shards import (
    FORMAT_VERSION,
    Shard,
    TokenStream,
    open_shard,
    token_dtype,
    write_atomically,
    write_shard,
)
from slayformer.data.split import (
    TOKENIZER_TRAINING_CHARACTERS,
    TRAIN,
    VALIDATION,
    Sided,
    SplitCorpus,
)
from slayformer.data.tokenizer import Tokenizer, build_tokenizer, load_tokenizer
from slayformer.errors import DataError

SIDES = (TRAIN, VALIDATION)
MANIFEST_FILE = "manifest.json"
TOKENIZER_FOLDER = "tokenizer"
# text that is read, then encoded while the next is read: it bounds the memory
BATCH_CHARACTERS = 4_000_000


@dataclass(frozen=True)
class PreparedData:
    """Token shards ready to read, and the tokenizer that made them."""

    directory: Path
    tokenizer: Tokenizer
    train: TokenStream
    validation: TokenStream


def prepare(data: DataConfig, tokenizer: TokenizerConfig) -> PreparedData:
    """Return the tokens of `data` under `tokenizer`; makes on disk only what is not there yet.

    Shows progress while it works. Processes that want the same data wait for the first one.
    Raises DataError if the text is missing or too little, a shard is damaged, or the disk refuses.
    """
    corpus = SplitCorpus(data)
    description = {
        "format_version": FORMAT_VERSION,
        **corpus.describe(),
        "tokenizer": {**asdict(tokenizer), "training_characters": TOKENIZER_TRAINING_CHARACTERS},
        "maximum_tokens": data.maximum_tokens,
        "shard_tokens": data.shard_tokens,
    }
    key = hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()
    label = re.sub(r"[^A-Za-z0-9._-]+", "_", corpus.label)
    cache = Path(data.cache_directory).expanduser().absolute()
    directory = cache / f"{label}-{tokenizer.name}-{key[:12]}"
    finished = directory / MANIFEST_FILE
    if not finished.is_file():
        console = Console(stderr=True)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with _only_one(directory, console):
                if not finished.is_file():
                    _build(directory, data, tokenizer, corpus, description, console)
        except OSError as error:
            raise DataError(
                f"cannot write {directory}: {error.strerror or error}; free some space or set "
                f"data.cache_directory to another folder"
            ) from error
    return open_prepared(directory, verify=data.verify)


def open_prepared(directory: Path, *, verify: bool) -> PreparedData:
    """Return what `prepare` left in `directory`; `verify` compares the sha256 of every shard.

    Raises DataError if anything is missing, damaged or does not belong there.
    """
    remedy = f"delete the folder {directory} and prepare the data again"
    try:
        manifest = json.loads((directory / MANIFEST_FILE).read_bytes())
        listed = {side: dict(manifest[side]["shards"]) for side in SIDES}
        identity = manifest["tokenizer"]["identity"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{directory / MANIFEST_FILE} is damaged: {error!r}; {remedy}") from error
    try:
        tokenizer = load_tokenizer(directory / TOKENIZER_FOLDER)
    except DataError as error:
        raise DataError(f"{error}; {remedy}") from error
    if tokenizer.identity != identity:
        raise DataError(f"the tokenizer in {directory} is not the one of its shards; {remedy}")

    def open_listed(name: str, sha256: str) -> Shard:
        shard = open_shard(directory / name, tokenizer=tokenizer, verify=verify)
        if shard.sha256 != sha256:
            raise DataError(f"{shard.path} is not the shard the manifest lists; {remedy}")
        return shard

    streams = {}
    with ThreadPoolExecutor() as pool:
        for side, digests in listed.items():
            shards = list(pool.map(open_listed, digests.keys(), digests.values()))
            streams[side] = TokenStream(
                [shard.ids for shard in shards],
                label=f"the {side} text in {directory}",
                documents=sum(shard.documents for shard in shards),
            )
    return PreparedData(directory, tokenizer, streams[TRAIN], streams[VALIDATION])


class _ShardWriter:
    """Writes one side's documents to shards; finds those an interrupted run has finished.

    `documents_kept` counts the documents in these; `documents` and `tokens` all so far.
    """

    def __init__(self, directory: Path, side: str, tokenizer: Tokenizer, shard_tokens: int) -> None:
        self._directory, self._side, self._tokenizer = directory, side, tokenizer
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
        return self._directory / f"{self._side}-{len(self._digests):05d}.bin"

    def _finished_shard(self) -> Shard | None:
        """Return the next shard if it is on disk; a damaged one will be written over."""
        try:
            return open_shard(self._next_path(), tokenizer=self._tokenizer, verify=True)
        except DataError:
            return None


def _build(
    directory: Path,
    data: DataConfig,
    tokenizer_config: TokenizerConfig,
    corpus: SplitCorpus,
    description: dict[str, Any],
    console: Console,
) -> None:
    """Fill `directory`, going on after the shards that are finished; the manifest comes last."""
    for leftover in directory.glob("*.tmp"):
        leftover.unlink()
    console.print(f"preparing {corpus.label} with the {tokenizer_config.name} tokenizer")
    try:
        tokenizer = load_tokenizer(directory / TOKENIZER_FOLDER)
    except DataError:
        with console.status(f"making the {tokenizer_config.name} tokenizer"):
            tokenizer = build_tokenizer(tokenizer_config, corpus.tokenizer_texts)
        tokenizer.save(directory / TOKENIZER_FOLDER)

    writers = {side: _ShardWriter(directory, side, tokenizer, data.shard_tokens) for side in SIDES}
    with _progress(console, corpus.total, writers) as show:
        for documents in corpus.readings():
            fresh = _not_yet_written(documents, writers, data.maximum_tokens)
            with closing(_encoded(fresh, tokenizer, data.workers)) as batches:
                for batch in batches:
                    enough = _write(batch, writers, data.maximum_tokens)
                    show()
                    if enough:
                        break
    for writer in writers.values():
        writer.finish()
    for side, writer in writers.items():
        if not writer.documents:
            raise corpus.refuse(side, sum(w.documents for w in writers.values()))
    summaries = {side: writer.summary() for side, writer in writers.items()}
    manifest = {"description": description, "tokenizer": tokenizer.describe(), **summaries}
    text = json.dumps(manifest, indent=2) + "\n"
    write_atomically(directory / MANIFEST_FILE, (text.encode(),))


def _write(
    batch: Iterable[tuple[str, np.ndarray]],
    writers: dict[str, _ShardWriter],
    maximum_tokens: int | None,
) -> bool:
    """Write a batch; returns True as soon as the training side has all the tokens it may have."""
    for side, ids in batch:
        writers[side].add(ids)
        if side == TRAIN and maximum_tokens and writers[TRAIN].tokens >= maximum_tokens:
            return True
    return False


def _not_yet_written(
    documents: Iterable[Sided], writers: dict[str, _ShardWriter], maximum_tokens: int | None
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
def _only_one(directory: Path, console: Console) -> Iterator[None]:
    """Hold the lock on `directory`; waits while another process has it."""
    lock = FileLock(directory.with_name(f"{directory.name}.lock"))
    try:
        lock.acquire(blocking=False)
    except Timeout:
        console.print(f"waiting for another process that prepares {directory}")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _progress(
    console: Console, total: int | None, writers: dict[str, _ShardWriter]
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
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=total, tokens=kept, speed=0.0)

        def show() -> None:
            speed = (tokens() - kept) / max(time.monotonic() - start, 1e-9)
            documents = sum(writer.documents for writer in writers.values())
            progress.update(task, completed=documents, tokens=tokens(), speed=speed)

        show()
        yield show
