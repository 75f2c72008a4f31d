"""From documents to token shards on disk, once: a folder per source, tokenizer and split.

The folder's name carries a key over everything its content depends on. Finished shards survive an
interruption; the same bytes come out whatever the number of workers and however often it stopped.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from rich.console import Console

from slayformer.config import DataConfig, TokenizerConfig
from slayformer.cores import usable_cores
from slayformer.data.parts import Summary, prepare_parts
from slayformer.data.shards import (
    FORMAT_VERSION,
    Shard,
    TokenStream,
    allow_open,
    open_shard,
    write_atomically,
)
from slayformer.data.split import (
    TOKENIZER_TRAINING_CHARACTERS,
    TRAIN,
    VALIDATION,
    SplitCorpus,
)
from slayformer.data.tokenizer import Tokenizer, build_tokenizer, load_tokenizer
from slayformer.data.writing import SIDES, write_documents
from slayformer.errors import DataError

MANIFEST_FILE = "manifest.json"
TOKENIZER_FOLDER = "tokenizer"


@dataclass(frozen=True)
class PreparedData:
    """Token shards ready to read, and the tokenizer that made them.

    Two of the same `identity` hold the same tokens in the same order, cut into whatever shards.
    """

    directory: Path
    identity: str
    tokenizer: Tokenizer
    train: TokenStream
    validation: TokenStream


def prepare(data: DataConfig, tokenizer: TokenizerConfig) -> PreparedData:
    """Return the tokens of `data` under `tokenizer`; makes on disk only what is not there yet.

    Shows progress while it works. Processes that want the same data wait for the first one.
    Raises DataError if the text is missing or too little, a shard is damaged, or the disk refuses.
    """
    corpus = SplitCorpus(data)
    cache = Path(data.cache_directory).expanduser().absolute()
    description = {
        "format_version": FORMAT_VERSION,
        **corpus.describe(),
        "tokenizer": {**asdict(tokenizer), "training_characters": TOKENIZER_TRAINING_CHARACTERS},
        "maximum_tokens": data.maximum_tokens,
        "shard_tokens": data.shard_tokens,
        **({} if data.parts is None else {"parts": data.parts}),
    }
    key = _digest(description)
    label = re.sub(r"[^A-Za-z0-9._-]+", "_", corpus.label)
    directory = cache / f"{label}-{tokenizer.name}-{key[:12]}"
    finished = directory / MANIFEST_FILE
    if not finished.is_file():
        console = Console(stderr=True)
        try:
            directory.mkdir(parents=True, exist_ok=True)
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
        tokenizer_identity = manifest["tokenizer"]["identity"]
        identity = _identity(manifest["description"])
    except FileNotFoundError:
        raise DataError(
            f"{directory} holds no prepared tokens (no {MANIFEST_FILE}): several machines need a "
            f"data.cache_directory that all of them see"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{directory / MANIFEST_FILE} is damaged: {error!r}; {remedy}") from error
    try:
        tokenizer = load_tokenizer(directory / TOKENIZER_FOLDER)
    except DataError as error:
        raise DataError(f"{error}; {remedy}") from error
    if tokenizer.identity != tokenizer_identity:
        raise DataError(f"the tokenizer in {directory} is not the one of its shards; {remedy}")

    def open_listed(name: str, sha256: str) -> Shard:
        shard = open_shard(directory / name, tokenizer=tokenizer, verify=verify)
        if shard.sha256 != sha256:
            raise DataError(f"{shard.path} is not the shard the manifest lists; {remedy}")
        return shard

    allow_open(sum(map(len, listed.values())))
    streams = {}
    with ThreadPoolExecutor(usable_cores()) as pool:
        for side, digests in listed.items():
            shards = list(pool.map(open_listed, digests.keys(), digests.values()))
            streams[side] = TokenStream(
                [shard.ids for shard in shards],
                label=f"the {side} text in {directory}",
                documents=sum(shard.documents for shard in shards),
            )
    return PreparedData(directory, identity, tokenizer, streams[TRAIN], streams[VALIDATION])


def _digest(description: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()


def _identity(description: dict[str, Any]) -> str:
    """Return the digest of what the tokens depend on, without how they are cut into files."""
    cut = {"shard_tokens"}
    if description["maximum_tokens"] is None:
        # parts in order are the whole; a maximum is shared between them
        cut.add("parts")
    return _digest({key: value for key, value in description.items() if key not in cut})


def _build(
    directory: Path,
    data: DataConfig,
    tokenizer_config: TokenizerConfig,
    corpus: SplitCorpus,
    description: dict[str, Any],
    console: Console,
) -> None:
    """Fill `directory`, going on after the shards that are finished; the manifest comes last."""
    finished = directory / MANIFEST_FILE
    with _only_one(directory, console):
        if finished.is_file():
            return
        console.print(f"preparing {corpus.label} with the {tokenizer_config.name} tokenizer")
        tokenizer = _make_tokenizer(directory, tokenizer_config, corpus, console)
        if data.parts is None:
            summaries = write_documents(
                directory,
                corpus.readings(),
                tokenizer,
                data,
                stems={side: side for side in SIDES},
                maximum_tokens=data.maximum_tokens,
                total=corpus.total,
                console=console,
            )
            _write_manifest(directory, description, tokenizer, corpus, [summaries])
            return
    # not under the lock: others take parts as well
    parts = prepare_parts(directory, directory / TOKENIZER_FOLDER, data, corpus, console)
    with _only_one(directory, console):
        if not finished.is_file():
            _write_manifest(directory, description, tokenizer, corpus, parts)


def _make_tokenizer(
    directory: Path, config: TokenizerConfig, corpus: SplitCorpus, console: Console
) -> Tokenizer:
    try:
        return load_tokenizer(directory / TOKENIZER_FOLDER)
    except DataError:
        with console.status(f"making the {config.name} tokenizer"):
            tokenizer = build_tokenizer(config, corpus.tokenizer_texts)
        tokenizer.save(directory / TOKENIZER_FOLDER)
        return tokenizer


def _write_manifest(
    directory: Path,
    description: dict[str, Any],
    tokenizer: Tokenizer,
    corpus: SplitCorpus,
    parts: Sequence[Summary],
) -> None:
    """Write the manifest of all `parts`, in order; raises DataError if a side is empty."""
    sides: dict[str, dict[str, Any]] = {}
    for side in SIDES:
        shards = {name: digest for part in parts for name, digest in part[side]["shards"].items()}
        counts = {key: sum(part[side][key] for part in parts) for key in ("documents", "tokens")}
        sides[side] = {**counts, "shards": shards}
    for side in SIDES:
        if not sides[side]["documents"]:
            raise corpus.refuse(side, sum(found["documents"] for found in sides.values()))
    manifest = {"description": description, "tokenizer": tokenizer.describe(), **sides}
    text = json.dumps(manifest, indent=2) + "\n"
    for leftover in directory.glob(f"{MANIFEST_FILE}.*.tmp"):
        leftover.unlink()
    write_atomically(directory / MANIFEST_FILE, (text.encode(),))


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
