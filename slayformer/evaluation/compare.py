"""Train every mechanism with every seed from one plan, and report them in one table.

Each run ("cell") is a process of train.py, or several with processes=…, in
`<comparison>/<mechanism>-seed<k>`, its output in the log file beside it. Calling again with the
same directory trains only what is missing.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from rich.console import Console

from slayformer.cli import COMMANDS, compose, quoted
from slayformer.config import TrainConfig
from slayformer.config_commands import CompareConfig, RecallConfig
from slayformer.config_differences import differing_keys, value_of
from slayformer.config_loading import dotted, fill_list, load_config, to_plain
from slayformer.cores import usable_cores
from slayformer.data.prepare import prepare
from slayformer.data.shards import write_atomically
from slayformer.errors import ConfigError, UserError, as_written, nearest
from slayformer.evaluation.cells import RECALL, Cell, train_cells, training_cell
from slayformer.evaluation.report import make_report
from slayformer.evaluation.report_files import write_report
from slayformer.evaluation.report_table import print_report
from slayformer.evaluation.runs import Run, find_runs
from slayformer.presets import preset_names

SETTINGS_FILE = "settings.json"
# where the same text or weights may be written in several ways
PATHS = ("data.source.path", "data.validation_source.path", "initial_weights")
# set by the comparison for each cell
OWN_TRAIN_KEYS = {
    "attention": "name the mechanisms in attention=[…]",
    "seed": "name the seeds in seeds=[…]",
    "run_directory": "set directory=…, the folder of the comparison",
    "resume": "the comparison resumes its runs by itself",
    "dry_run": "ask train.py for the plan of a run",
}


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the command-line arguments that are for the comparison, and those for every run.

    An experiment is for every run; for the comparison too if it names mechanisms and seeds.
    """
    own_keys = {item.name for item in fields(CompareConfig)}
    own = [a for a in arguments if a.startswith("-") or a.partition("=")[0] in own_keys]
    shared = [a for a in arguments if a not in own]
    experiments = [a for a in shared if a.lstrip("+").startswith("experiment=")]
    known = {path.stem for path in (COMMANDS / "experiment").glob("*.yaml")}
    return own + [a for a in experiments if a.partition("=")[2] in known], shared


def read_config(composed: DictConfig) -> CompareConfig:
    """Return the checked configuration; one value stands for a list of it, `all` for every option.

    Raises ConfigError for a value that cannot work.
    """
    fill_list(composed, "attention", preset_names())
    fill_list(composed, "seeds")
    return load_config(composed, CompareConfig)


def run(config: CompareConfig, overrides: Sequence[str]) -> int:
    """Train what is missing, write the report, and return the exit code: 1 if a run failed.

    Raises UserError before any run starts if the request cannot work, or if the directory holds a
    comparison of another configuration.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        hint = "run it without a launcher, with processes=… for several processes a run"
        raise UserError(f"compare.py starts its own processes: {hint}")
    if config.jobs > 1 and config.processes > 1:
        hint = "with processes=… a run has all GPUs, so one at a time: jobs=1"
        raise ConfigError("jobs", config.jobs, hint)
    directory = Path(config.directory or time.strftime("comparisons/%Y-%m-%d_%H-%M-%S")).absolute()
    cells = plan_cells(config, overrides, directory)
    record = join_record(directory, cells)
    if config.baseline not in (None, *record["attention"]):
        hint = "must be one of the mechanisms in attention=[…]: "
        hint += nearest(str(config.baseline), record["attention"])
        raise ConfigError("baseline", config.baseline, hint)
    # once, here: its errors are the user's, and runs at the same time would do it twice
    first = cells[0].config
    assert isinstance(first, TrainConfig)
    prepare(first.data, first.tokenizer)
    _write_record(directory, record)
    at_once = config.jobs * config.processes
    threads = config.threads or max(1, usable_cores() // at_once)
    console = Console()
    console.print(
        f"runs: {len(cells)} (mechanisms: {len(config.attention)}, seeds: {len(config.seeds)}), "
        f"{config.jobs} at a time, {config.processes} process{'es' * (config.processes > 1)} "
        f"each with CPU threads: {threads}, in {directory}",
        soft_wrap=True,
    )
    failed = train_cells(
        cells,
        jobs=config.jobs,
        threads=threads,
        console=console,
        directory=f"directory={quoted(str(directory))}",
    )

    # those of earlier calls as well
    found = find_runs(_folders(directory, record["attention"]), required=False)
    unfinished = [cell.title for cell in failed]
    unfinished += [n for n in found.unfinished if n not in {cell.folder.name for cell in failed}]
    notes = [f"Did not finish: {', '.join(unfinished)}."] if unfinished else []
    if config.jobs > 1:
        notes.append(f"tokens/s: {config.jobs} runs shared the machine at a time.")
    if found.runs:
        baseline = _baseline(config, found.runs)
        report = make_report(found.runs, found.recalls, notes, baseline=baseline)
        files = write_report(directory, report)
        print_report(report)
        for path in files:
            console.print(str(path), soft_wrap=True)
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
    own = [o for o in overrides if o.startswith("recall.")]
    if own and not config.recall:
        raise ConfigError(own[0].partition("=")[0], own[0].partition("=")[2], "set recall=true too")
    shared = [o for o in overrides if o not in own]
    cells = []
    for seed in config.seeds:
        for mechanism in config.attention:
            folder, title = directory / f"{mechanism}-seed{seed}", f"{mechanism} seed {seed}"
            given = [*shared, f"attention={mechanism}", f"seed={seed}"]
            cells.append(training_cell(folder, title, given, config.processes))
        for mechanism in config.attention if config.recall else ():
            options = [o for o in shared if o.startswith("attention.")]
            options += [o.removeprefix("recall.") for o in own]
            cells.append(_plan_recall(directory, mechanism, seed, options))
    return cells


def _plan_recall(directory: Path, mechanism: str, seed: int, overrides: list[str]) -> Cell:
    folder = directory / f"{mechanism}-recall-seed{seed}"
    given = [*overrides, f"attention={mechanism}", f"seed={seed}"]
    given += [f"run_directory={quoted(str(folder))}"]
    config = load_config(compose("recall", given), RecallConfig)
    title = f"{mechanism} recall seed {seed}"
    return Cell(folder, title, given, config, config.updates, script=RECALL)


def _folders(directory: Path, mechanisms: Iterable[str]) -> list[Path]:
    """Return the folders of the comparison's own runs, whichever call made them."""
    names = "|".join(re.escape(mechanism) for mechanism in mechanisms)
    own = re.compile(rf"(?:{names})(?:-recall)?-seed\d+")
    return [path for path in sorted(directory.glob("*/")) if own.fullmatch(path.name)]


def _baseline(config: CompareConfig, runs: Sequence[Run]) -> str | None:
    """Return the baseline asked for, None if none of its runs finished."""
    finished = config.baseline in {run.mechanism for run in runs}
    return config.baseline if finished else None


def join_record(directory: Path, cells: Sequence[Cell]) -> dict[str, Any]:
    """Return the settings of the comparison in `directory` with those of `cells` added.

    More seeds and mechanisms may join one that is there; raises ConfigError if anything else
    differs, for then it is another comparison, or if something else is there.
    """
    from slayformer.training.run_directory import with_absolute_paths

    settings: dict[str, Any] = {"processes": max(cell.processes for cell in cells), "attention": {}}
    for cell in cells:
        if isinstance(cell.config, TrainConfig):
            name, plain = "shared", to_plain(with_absolute_paths(cell.config))
        else:
            name, plain = "recall", to_plain(cell.config)
        settings["attention"][plain["attention"]["name"]] = plain["attention"]
        settings[name] = {k: v for k, v in plain.items() if k not in OWN_TRAIN_KEYS}
    path = directory / SETTINGS_FILE
    try:
        earlier = json.loads(path.read_text(encoding="utf-8"))
        # so versions before this one wrote that none was measured
        if earlier.get("recall") is None:
            earlier.pop("recall", None)
        before, known = _by_key(earlier), earlier["attention"]
    except FileNotFoundError:
        _refuse_other_things(directory, cells, settings["shared"]["data"]["cache_directory"])
        return settings
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not the settings of a comparison: {error!r}") from error
    if not any(map(_has_begun, directory.glob("*/"))):
        # no run of these came to anything, so nothing would be compared with them
        return settings
    now = _by_key(settings)
    for key in differing_keys([before, now]):
        if key in PATHS and _absolute(value_of(before, key)) == value_of(now, key):
            # earlier versions wrote them as they were given
            continue
        hint = f"the comparison in {directory} was made with {as_written(value_of(before, key))}"
        raise ConfigError(key, value_of(now, key), f"{hint}; choose another directory")
    # recall may join later, and be left out again
    return {**earlier, **settings, "attention": {**known, **settings["attention"]}}


def _refuse_other_things(directory: Path, cells: Sequence[Cell], cache_directory: str) -> None:
    """Raise ConfigError if `directory` holds something that is nobody's here.

    That is more than folders of the cells, logs, hidden files and prepared tokens.
    """
    cache, folders = Path(cache_directory), {cell.folder for cell in cells}
    for path in sorted(directory.glob("[!.]*")):
        is_log = path.is_file() and (path.stem == "log" or path.suffix in (".log", ".tmp"))
        if not is_log and path not in (cache, *cache.parents, *folders):
            hint = f"holds {path.name} and no comparison; name a new or an empty folder"
            raise ConfigError("directory", directory, hint)


def _has_begun(folder: Path) -> bool:
    from slayformer.training.checkpoint import has_checkpoint

    return has_checkpoint(folder) or (folder / "summary.json").exists()


def _absolute(path: Any) -> str:
    return str(Path(str(path)).expanduser().absolute())


def _by_key(settings: dict[str, Any]) -> dict[str, Any]:
    """Return what `join_record` returns with dotted keys, as the options of runs have them."""
    return dotted({**settings["shared"], **{k: settings[k] for k in settings if k != "shared"}})


def _write_record(directory: Path, record: dict[str, Any]) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        text = json.dumps(record, indent=2).encode()
        write_atomically(directory / SETTINGS_FILE, (text,))
    except OSError as error:
        hint = f"the folder cannot be written: {error.strerror}"
        raise ConfigError("directory", directory, hint) from error
