"""Compute items, keep what is finished, and write every table, picture and the page of them all."""

from __future__ import annotations

import hashlib
import json
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from rich.console import Console
from rich.progress import (
    BarColumn,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

import slayformer
from slayformer.config import one_of, positive
from slayformer.config_loading import load_config
from slayformer.cores import usable_cores
from slayformer.errors import ConfigError, UserError, nearest
from slayformer.paper.files import write_picture, write_table
from slayformer.paper.item import Item, Request
from slayformer.paper.items import ITEMS
from slayformer.paper.render import Shown, claims_table, page
from slayformer.progress import PlainProgress

PACKAGE = Path(slayformer.__file__).parent


@dataclass
class PaperConfig:
    """Everything `scripts/paper.py` is told; configs/commands/paper.yaml says what null is."""

    items: list[str] | None
    size: str = one_of("quick", "full")
    seeds: int | None = positive(None)
    processes: int | None = positive(None)
    results: list[str] | None = None
    redo: bool = False
    directory: str = "paper_results"


def read_config(composed: DictConfig) -> PaperConfig:
    """Return the checked configuration; one item or result stands for a list of it.

    Raises ConfigError for a value that cannot work.
    """
    for key in ("items", "results"):
        if isinstance(composed.get(key), str):
            composed[key] = [composed[key]]
    config: PaperConfig = load_config(composed, PaperConfig)
    choose_items(config.items)
    return config


def choose_items(names: Sequence[str] | None, items: Sequence[Item] = ITEMS) -> list[Item]:
    """Return the items that answer to `names`, in the paper's order; all of them for None.

    Raises ConfigError for a name that none answers to.
    """
    if names is None:
        return list(items)
    for name in names:
        if not any(item.answers_to(name) for item in items):
            known = [item.name for item in items]
            hint = nearest(name, known) + "; or a number of the paper, as figure_7 or table_2"
            raise ConfigError("items", name, hint)
    return [item for item in items if any(item.answers_to(name) for name in names)]


def run(config: PaperConfig, items: Sequence[Item] = ITEMS) -> Path:
    """Compute what is not there yet, write everything, and return the page's path.

    What the folder has of items that are not asked for stays on the page and among the claims. An
    item that fails leaves the others alone. Raises UserError at the end if any did.
    """
    directory = Path(config.directory)
    (directory / "data").mkdir(parents=True, exist_ok=True)
    console = Console()
    chosen = choose_items(config.items, items)
    found: dict[str, Shown] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with PlainProgress(*columns, TimeElapsedColumn(), console=console) as bar:
        whole = bar.add_task("all items", total=sum(item.minutes for item in chosen))
        for item in chosen:
            task = bar.add_task(item.name, total=1.0)
            work = partial(_record, item, config, directory, partial(_advance, bar, task))
            one = found[item.name] = _show(item, work, directory)
            bar.update(task, completed=1.0, visible=False)
            bar.advance(whole, item.minutes)
            bar.console.print(f"{item.name}: {one.failure or one.about}", highlight=False)
    about = f"size {config.size}; {time.strftime('%Y-%m-%d')}; slayformer {slayformer.__version__}"
    for item in items:
        if item.name not in found and _kept_file(item, directory).exists():
            found[item.name] = _show(item, partial(_kept, item, directory), None)
    shown = [found[item.name] for item in items if item.name in found]
    claims = [claim for one in shown for claim in one.claims]
    if claims:
        write_table(directory, claims_table(claims))
    index = directory / "index.html"
    index.write_text(page(shown, about), encoding="utf-8")
    console.print(str(index), soft_wrap=True, highlight=False, markup=False)
    failed = [item.name for item in chosen if found[item.name].failure]
    if failed:
        others = f"; the others are in {index}" if len(failed) < len(shown) else ""
        raise UserError(f"failed: {', '.join(failed)}{others}")
    return index


def _advance(bar: PlainProgress, task: TaskID, share: float) -> None:
    bar.update(task, completed=share)


def _show(item: Item, work: Callable[[], dict[str, Any]], directory: Path | None) -> Shown:
    """Return what there is to show of the record that `work` returns.

    Tables and pictures are written to `directory`; for None they are there.
    """
    try:
        record = work()
        data = record["data"]
        tables, pictures = item.tables(data), item.draw(data)
        if directory is not None:
            for table in tables:
                write_table(directory, table)
            for picture in pictures:
                write_picture(directory, picture)
        captions = [(picture.name, picture.caption) for picture in pictures]
        return Shown(item, _about(record), tables, captions, item.claims(data))
    except UserError as error:
        return Shown(item, "", failure=f"failed: {error}")
    except Exception as error:
        # the trace is for us, one broken item is no reason to lose the others
        traceback.print_exc()
        return Shown(item, "", failure=f"failed: {type(error).__name__}: {error}")


def _record(
    item: Item, config: PaperConfig, directory: Path, progress: Callable[[float], None]
) -> dict[str, Any]:
    """Return the item's data with how it was made, from the kept file if that serves."""
    path = _kept_file(item, directory)
    wanted = {"size": config.size, "seeds": config.seeds}
    if path.exists() and item.kept and not config.redo:
        kept = _kept(item, directory)
        if kept["request"] == wanted:
            return kept
    work = directory / "data" / item.name
    work.mkdir(exist_ok=True)
    processes = config.processes or usable_cores()
    start = time.monotonic()
    request = Request(
        config.size, config.seeds, processes, work, progress, tuple(config.results or ())
    )
    data = item.compute(request)
    if not any(work.iterdir()):
        work.rmdir()
    record = {
        "item": item.name,
        "request": wanted,
        "seconds": round(time.monotonic() - start, 1),
        "code": code_digest(),
        "data": data,
    }
    # written beside and renamed, so that an interrupted run leaves no half of it
    unfinished = path.with_suffix(".partial")
    unfinished.write_text(json.dumps(record, default=plain), encoding="utf-8")
    unfinished.replace(path)
    return _kept(item, directory)


def _kept_file(item: Item, directory: Path) -> Path:
    return directory / "data" / f"{item.name}.json"


def _kept(item: Item, directory: Path) -> dict[str, Any]:
    return dict(json.loads(_kept_file(item, directory).read_text(encoding="utf-8")))


def code_digest() -> str:
    """Return a digest of the package's source: whether a kept result is of this code."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _about(record: dict[str, Any]) -> str:
    """Return how an item was made, in a sentence."""
    request = record["request"]
    seeds = "" if request["seeds"] is None else f", seeds={request['seeds']}"
    text = f"computed in {record['seconds']:,} s (size {request['size']}{seeds})"
    if record["code"] != code_digest():
        text += "; the code has changed since, redo=true computes it again"
    return text


def plain(value: Any) -> Any:
    """Return what JSON can hold for an array or a number of numpy or torch."""
    return value.tolist()
