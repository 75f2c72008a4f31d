"""Train every mechanism with every seed from one plan, and report them in one table.

Each run ("cell") is a process of train.py in `<comparison>/<mechanism>-seed<k>`, its output in the
log file beside it. Calling again with the same directory trains only what is missing.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.console import Console

from slayformer.cli import compose, quoted
from slayformer.config import CompareConfig
from slayformer.config_loading import load_config, to_plain
from slayformer.data.prepare import prepare
from slayformer.data.shards import write_atomically
from slayformer.data.tokenizer import vocabulary_size
from slayformer.errors import ConfigError, UserError
from slayformer.evaluation.cells import Cell, train_cells
from slayformer.evaluation.report import print_rows, read_run, write_report
from slayformer.training.budget import make_plan
from slayformer.training.schedule import check_schedule

SETTINGS_FILE = "settings.json"
# set by the comparison for each cell
OWN_TRAIN_KEYS = {
    "attention": "name the mechanisms in attention=[…]",
    "seed": "name the seeds in seeds=[…]",
    "run_directory": "set directory=…, the folder of the comparison",
    "resume": "the comparison resumes its runs by itself",
    "dry_run": "ask train.py for the plan of a run",
}


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the command-line arguments that are for the comparison, and those for every run."""
    own_keys = {item.name for item in fields(CompareConfig)}
    own = [a for a in arguments if a.startswith("-") or a.partition("=")[0] in own_keys]
    return own, [a for a in arguments if a not in own]


def run(config: CompareConfig, overrides: Sequence[str]) -> int:
    """Train what is missing, write the report, and return the exit code: 1 if a run failed.

    Raises UserError before any run starts if the request cannot work, or if the directory holds a
    comparison of another configuration.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("compare.py starts its own processes: run it without a launcher")
    directory = Path(config.directory or time.strftime("comparisons/%Y-%m-%d_%H-%M-%S")).absolute()
    cells = plan_cells(config, overrides, directory)
    record = join_record(directory, cells)
    # once, here: its errors are the user's, and runs at the same time would do it twice
    prepare(cells[0].config.data, cells[0].config.tokenizer)
    _write_record(directory, record)
    threads = config.threads or max(1, (os.cpu_count() or 1) // config.jobs)
    console = Console()
    console.print(
        f"{len(cells)} runs: {len(config.attention)} mechanisms x {len(config.seeds)} seeds, "
        f"{config.jobs} at a time, {threads} CPU threads each, in {directory}",
        soft_wrap=True,
    )
    failed = train_cells(cells, jobs=config.jobs, threads=threads, console=console)

    notes = [f"Did not finish: {', '.join(cell.title for cell in failed)}."] if failed else []
    if config.jobs > 1:
        notes.append(f"tokens/s: {config.jobs} runs shared the machine at a time.")
    finished = [cell for cell in cells if cell not in failed]
    if finished:
        runs = [read_run(cell.folder) for cell in finished]
        rows = write_report(directory, runs, notes)
        print_rows(rows, runs[0].summary["unigram_loss"])
        for name in ("comparison.md", "comparison.csv", "comparison.json", "curves.png"):
            console.print(str(directory / name), soft_wrap=True)
    for cell in failed:
        console.print(f"did not finish: {cell.title}, see {cell.log}", soft_wrap=True)
    return 1 if failed else 0


def plan_cells(config: CompareConfig, overrides: Sequence[str], directory: Path) -> list[Cell]:
    """Return the cells in the order of training: all mechanisms with the first seed, then the next.

    Raises UserError for a request that train.py would refuse.
    """
    for key in ("attention", "seeds"):
        values = getattr(config, key)
        if not values or len(set(values)) < len(values):
            raise ConfigError(key, values, "name at least one, and each once")
    for override in overrides:
        key = override.lstrip("+~").partition("=")[0]
        if key in OWN_TRAIN_KEYS:
            raise ConfigError(key, override.partition("=")[2], OWN_TRAIN_KEYS[key])
    cells = []
    for seed in config.seeds:
        for mechanism in config.attention:
            folder = directory / f"{mechanism}-seed{seed}"
            given = [*overrides, f"attention={mechanism}", f"seed={seed}"]
            # without a checkpoint in it, resume=auto starts anew
            given += [f"run_directory={quoted(str(folder))}", "resume=auto"]
            train_config = load_config(compose("train", given))
            plan = make_plan(train_config, vocabulary_size(train_config.tokenizer), world_size=1)
            check_schedule(train_config.schedule, plan.updates)
            cells.append(Cell(folder, mechanism, seed, given, train_config, plan.updates))
    return cells


def join_record(directory: Path, cells: Sequence[Cell]) -> dict[str, Any]:
    """Return the settings of the comparison in `directory` with those of `cells` added.

    More seeds and mechanisms may join one that is there; raises ConfigError if anything else
    differs, for then it is another comparison.
    """
    shared = to_plain(cells[0].config)
    for key in OWN_TRAIN_KEYS:
        shared.pop(key)
    attention = {cell.mechanism: to_plain(cell.config)["attention"] for cell in cells}
    path = directory / SETTINGS_FILE
    try:
        earlier = json.loads(path.read_text(encoding="utf-8"))
        known = earlier["attention"]
        before = {"attention": {**attention, **known}, **earlier["shared"]}
    except FileNotFoundError:
        return {"shared": shared, "attention": attention}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not the settings of a comparison: {error!r}") from error
    _refuse_change(before, {"attention": {**known, **attention}, **shared}, directory)
    return {"shared": shared, "attention": {**known, **attention}}


def _write_record(directory: Path, record: dict[str, Any]) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        text = json.dumps(record, indent=2).encode()
        write_atomically(directory / SETTINGS_FILE, (text,))
    except OSError as error:
        hint = f"the folder cannot be written: {error.strerror}"
        raise ConfigError("directory", directory, hint) from error


def _refuse_change(earlier: Any, now: Any, directory: Path, path: str = "") -> None:
    if isinstance(earlier, dict) and isinstance(now, dict):
        for key in sorted(earlier.keys() | now.keys()):
            name = f"{path}.{key}".lstrip(".")
            _refuse_change(earlier.get(key), now.get(key), directory, name)
    elif earlier != now:
        hint = f"the comparison in {directory} was made with {earlier}; choose another directory"
        raise ConfigError(path, now, hint)
