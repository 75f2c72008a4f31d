"""`python train.py -m key=a,b …`: a run of every combination of values, one after the other."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from slayformer.cli import quoted
from slayformer.config_differences import differing_keys, value_of
from slayformer.config_loading import dotted, to_plain
from slayformer.errors import ConfigError, UserError, as_written
from slayformer.evaluation.cells import Cell, train_cells, training_cell

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

# set by the multirun for each run
OWN_KEYS = {
    "resume": "a multirun resumes its runs by itself: call it again with the same run_directory",
    "dry_run": "ask for the plan of one run, without -m",
}


def run(overrides: Sequence[str], flags: Sequence[str]) -> int:
    """Train every combination in a folder of its own; return the exit code: 1 if one failed.

    `run_directory` among `overrides` is the folder of all, multirun/<time> without it; called again
    with the same, what is unfinished goes on. Raises UserError before the first run starts if one
    of them cannot work, or its folder holds a run of other settings.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("-m starts its own processes: run it without a launcher")
    directory, jobs = combinations(overrides)
    cells = [training_cell(directory / name, name, [*flags, *job]) for name, job in jobs.items()]
    for cell in cells:
        _refuse_other_settings(cell)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        hint = f"the folder cannot be made: {error.strerror}"
        raise ConfigError("run_directory", directory, hint) from error
    console = Console()
    console.print(f"{len(cells)} runs, one after the other, in {directory}", soft_wrap=True)
    again = f"run_directory={quoted(str(directory))}"
    failed = train_cells(cells, jobs=1, threads=None, console=console, directory=again)
    for cell in failed:
        console.print(f"did not finish: {cell.title}, see {cell.log}", soft_wrap=True)
    if len(cells) - len(failed) > 1:
        console.print(f"side by side: python scripts/report.py {directory}", soft_wrap=True)
    return 1 if failed else 0


def combinations(overrides: Sequence[str]) -> tuple[Path, dict[str, list[str]]]:
    """Return the folder of all runs and the overrides of each, by the name of its own folder.

    A name is made of the values that differ: `slay-seed1`. Raises UserError for overrides that
    cannot be read, and for those a run of many has no use for.
    """
    directory = Path(time.strftime("multirun/%Y-%m-%d_%H-%M-%S"))
    # by key: given twice, the last counts
    choices: dict[str, list[tuple[str, str]]] = {}
    for written in overrides:
        override = _parse(written)
        start, value = override.get_key_element(), written.partition("=")[2]
        key = start.lstrip("+~")
        if key in OWN_KEYS:
            raise ConfigError(key, value, OWN_KEYS[key])
        if key == "run_directory":
            if override.is_sweep_override() or not isinstance(override.value(), str):
                raise ConfigError(key, value, "one folder for all runs, each makes its own in it")
            directory = Path(str(override.value()))
        elif override.is_sweep_override():
            choices[start] = [(f"{start}={v}", _name(key, v)) for v in _values(override)]
        else:
            choices[start] = [(written, "")]
    jobs: dict[str, list[str]] = {}
    for combination in product(*choices.values()):
        name = "-".join(part for _, part in combination if part) or "run"
        # two values may look the same in a file name
        while name in jobs:
            name += "_"
        jobs[name] = [override for override, _ in combination]
    return directory.absolute(), jobs


def _parse(written: str) -> Override:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return OverridesParser.create().parse_override(written)
    except HydraException as error:
        raise UserError(f"{written}: not understood, options are written key=value") from error


def _values(override: Override) -> list[str]:
    """Return the values of key=a,b or key=range(…) as overrides hold them."""
    from hydra.errors import HydraException

    try:
        return list(override.sweep_string_iterator())
    except HydraException as error:
        hint = "name the values, a,b, or range(first,end)"
        raise ConfigError(override.get_key_element(), override.get_value_string(), hint) from error


def _name(key: str, value: str) -> str:
    """Return what a value of `key` adds to the name of a folder."""
    last = "" if key == "attention" else key.rpartition(".")[2]
    return re.sub(r"[^\w.+-]", "_", last + value)


def _refuse_other_settings(cell: Cell) -> None:
    """Raise ConfigError if the run in the folder of `cell` was made with other settings."""
    from omegaconf import OmegaConf

    from slayformer.training.run_directory import with_absolute_paths

    file = cell.folder / "config.yaml"
    if not file.exists():
        return
    settings: Any = OmegaConf.to_container(OmegaConf.load(file))
    before = dotted(settings)
    now = dotted(to_plain(with_absolute_paths(cell.config)))  # type: ignore[arg-type]
    for key in differing_keys([before, now]):
        hint = f"the run in {cell.folder} was made with {as_written(value_of(before, key))}"
        raise ConfigError(key, value_of(now, key), f"{hint}; choose another run_directory")
