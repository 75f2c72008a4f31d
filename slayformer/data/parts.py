"""A large source in parts that processes and machines prepare at the same time.

How the source is cut is configured, not found: the same parts give the same shards, whoever makes
them and in whatever order. Whoever is free takes the next part that nobody has; a part whose
process died is taken up by another, which goes on after its finished shards.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

from slayformer.config import DataConfig
from slayformer.cores import usable_cores
from slayformer.data.shards import write_atomically
from slayformer.data.split import TRAIN, SplitCorpus
from slayformer.data.tokenizer import load_tokenizer
from slayformer.data.writing import SIDES, write_documents
from slayformer.errors import DataError
from slayformer.progress import PlainProgress
from slayformer.workers import worker_pool

Summary = dict[str, dict[str, Any]]


class PartsMissing(DataError):
    """This machine has prepared the parts it was told to; others have still to be prepared."""


def prepare_parts(
    directory: Path, tokenizer_folder: Path, data: DataConfig, corpus: SplitCorpus, console: Console
) -> list[Summary]:
    """Prepare what no other process does, wait for the rest, and return what every part holds.

    Raises PartsMissing if `data.part` leaves parts to others that are not there yet, DataError if
    the source cannot be cut so finely or a process died.
    """
    assert data.parts is not None
    corpus.check_parts(data.parts)
    # a validation source of its own is one more
    units = range(data.parts + corpus.has_validation_source)
    own = list(units)
    if data.part is not None:
        chosen, of = map(int, data.part.split("/"))
        own = own[chosen - 1 :: of]
    work = (directory, tokenizer_folder, data)
    with _progress(directory, own, console) as show:
        left = [unit for unit in own if not record_file(directory, unit).is_file()]
        if data.processes > 1 and left:
            _prepare_in_processes(work, left, data.processes, show)
        else:
            for unit in left:
                prepare_part(*work, unit)
                show()
        # those that others had: wait for each, and do it if they could not
        for unit in own:
            prepare_part(*work, unit, patiently=True)
            show()
    missing = [unit for unit in units if not record_file(directory, unit).is_file()]
    if missing:
        raise PartsMissing(
            f"data.part={data.part} is prepared; {len(missing)} of {len(units)} parts are still "
            f"missing in {directory}: prepare them there, or copy their files to it"
        )
    return [_read_record(directory, unit) for unit in units]


def record_file(directory: Path, unit: int) -> Path:
    """Return the file that says what part `unit` holds; it is written last."""
    return directory / f"part-{unit:05d}.json"


def prepare_part(
    directory: Path, tokenizer_folder: Path, data: DataConfig, unit: int, patiently: bool = False
) -> bool:
    """Prepare part `unit` and return True; False if another process has it and nobody waits."""
    record = record_file(directory, unit)
    if record.is_file():
        return True
    lock = FileLock(record.with_suffix(".lock"))
    try:
        lock.acquire(blocking=patiently)
    except Timeout:
        return False
    try:
        if record.is_file():
            return True
        corpus, tokenizer = SplitCorpus(data), load_tokenizer(tokenizer_folder)
        assert data.parts is not None
        maximum = data.maximum_tokens and math.ceil(data.maximum_tokens / data.parts)
        summary = write_documents(
            directory,
            [corpus.reading(unit, data.parts)],
            tokenizer,
            data,
            stems={side: f"{side}-{unit:05d}" for side in SIDES},
            maximum_tokens=maximum,
            total=None,
            console=Console(quiet=True),
        )
        write_atomically(record, [(json.dumps(summary, indent=2) + "\n").encode()])
    finally:
        lock.release()
    return True


def _prepare_in_processes(
    work: tuple[Path, Path, DataConfig], units: list[int], processes: int, show: Any
) -> None:
    directory, tokenizer_folder, data = work
    data = replace(data, workers=data.workers or max(1, usable_cores() // processes))
    pool = worker_pool(min(processes, len(units)))
    try:
        waiting: set[Future[bool]] = {
            pool.submit(prepare_part, directory, tokenizer_folder, data, unit) for unit in units
        }
        while waiting:
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                future.result()
            show()
    except BrokenProcessPool as error:
        raise DataError(
            f"a process that prepared {directory} has died, perhaps for want of memory; run again: "
            f"what is finished stays"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _read_record(directory: Path, unit: int) -> Summary:
    path = record_file(directory, unit)
    try:
        summary: Summary = json.loads(path.read_bytes())
        for side in SIDES:
            if not summary[side].keys() >= {"documents", "tokens", "shards"}:
                raise ValueError(f"{side} is incomplete")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is damaged: {error!r}; delete it and prepare again") from error
    return summary


@contextmanager
def _progress(directory: Path, units: list[int], console: Console) -> Iterator[Any]:
    """Show parts and training tokens that are finished; yields the function that refreshes them."""
    columns = (
        TextColumn("{task.completed:,} of {task.total:,} parts"),
        BarColumn(),
        TextColumn("{task.fields[tokens]:,} training tokens,"),
        TimeElapsedColumn(),
    )
    with PlainProgress(*columns, console=console) as progress:
        task = progress.add_task("", total=len(units), tokens=0)
        known: dict[int, int] = {}

        def show() -> None:
            for unit in units:
                if unit not in known and record_file(directory, unit).is_file():
                    known[unit] = _read_record(directory, unit)[TRAIN]["tokens"]
            progress.update(task, completed=len(known), tokens=sum(known.values()))

        show()
        yield show
