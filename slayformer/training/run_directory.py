"""Where a run lives: made once, by rank 0, or found again to go on from its checkpoint."""

from __future__ import annotations

import functools
import json
import platform
import subprocess
import time
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

import slayformer
from slayformer.config import SourceConfig, TrainConfig
from slayformer.config_loading import to_plain
from slayformer.data.prepare import PreparedData
from slayformer.data.shards import write_atomically
from slayformer.errors import CheckpointError, ConfigError, UserError
from slayformer.huggingface.hub import is_hub_name
from slayformer.training.budget import Plan
from slayformer.training.checkpoint import (
    FOLDER,
    branched_from,
    find_sound_checkpoint,
    has_checkpoint,
    newest_checkpoint,
    read_state,
)
from slayformer.training.going_on import check_fits
from slayformer.training.run_lock import RunLock

# one of these in a folder means that a run lives there
RECORDS = ("config.yaml", "plan.json", "metrics.jsonl", FOLDER)
PACKAGES = ("torch", "deepspeed", "numpy", "tiktoken", "tokenizers", "datasets", "wandb")


@dataclass(frozen=True)
class RunStart:
    """The run directory, and the checkpoint the run goes on from (None: from the beginning).

    `metrics_from` is the run whose metrics go on, another one if this run branches off it.
    """

    directory: Path
    checkpoint: Path | None = None
    metrics_from: Path | None = None
    # what the user should know of the way it was found
    warnings: tuple[str, ...] = ()
    # whether nothing is left to do there
    finished: bool = False

    @property
    def is_branch(self) -> bool:
        """Whether the checkpoint is one of another run."""
        return self.checkpoint is not None and self.metrics_from != self.directory


def with_absolute_paths(config: TrainConfig) -> TrainConfig:
    """Return `config` with every local path absolute, so that it means the same from anywhere."""

    def absolute(path: str) -> str:
        return str(Path(path).expanduser().absolute())

    def local(source: SourceConfig) -> SourceConfig:
        if source.path is None:
            return source
        if source.kind != "text" and not Path(source.path).expanduser().exists():
            return source
        return replace(source, path=absolute(source.path))

    data, separate = config.data, config.data.validation_source
    weights = config.initial_weights
    return replace(
        config,
        data=replace(
            data,
            source=local(data.source),
            validation_source=None if separate is None else local(separate),
            cache_directory=absolute(data.cache_directory),
        ),
        initial_weights=weights if weights is None or is_hub_name(weights) else absolute(weights),
        resume=config.resume if config.resume in (None, "auto") else absolute(config.resume),
        run_directory=None if config.run_directory is None else absolute(config.run_directory),
    )


def start_run(config: TrainConfig, plan: Plan, data: PreparedData, lock: RunLock) -> RunStart:
    """Return where the run lives and what it goes on from; makes a new directory if it needs one.

    `lock` is taken there before anything that could change is read. Call it on rank 0 alone.
    Raises UserError if the directory cannot be made or holds another run or one under way,
    CheckpointError if there is nothing sound to resume.
    """
    home = _home(config)
    warning = lock.take(home) if home is not None and home.is_dir() else None
    start = _find_start(config, plan, data)
    if start.directory != home or not lock.held:
        warning = lock.take(start.directory)
    return start if warning is None else replace(start, warnings=(*start.warnings, warning))


def _home(config: TrainConfig) -> Path | None:
    """Return the directory the run will live in as far as its configuration tells."""
    if config.run_directory is not None:
        return Path(config.run_directory)
    if config.resume is None:
        return None
    parent = newest_checkpoint(Path(config.resume))[0].parent
    return parent.parent if parent.name == FOLDER else None


def _find_start(config: TrainConfig, plan: Plan, data: PreparedData) -> RunStart:
    if config.resume is None:
        return RunStart(_make_directory(config))
    if config.resume == "auto":
        assert config.run_directory is not None
        directory = Path(config.run_directory)
        origin = branched_from(directory)
        if origin is None and not has_checkpoint(directory):
            _make(directory, exist_ok=True)
            return RunStart(directory)
        checkpoint, warnings = find_sound_checkpoint(origin or directory)
    else:
        origin = None
        checkpoint, warnings = find_sound_checkpoint(Path(config.resume))
    check_fits(checkpoint, config, plan, data)
    home = checkpoint.parent.parent if checkpoint.parent.name == FOLDER else None
    if home is None and config.run_directory is None:
        raise CheckpointError(f"{checkpoint} is not inside a run; give run_directory=NEW_FOLDER")
    if home is not None and config.run_directory in (None, str(home)):
        newest, _ = newest_checkpoint(home)
        if newest.name != checkpoint.name and not warnings:
            raise CheckpointError(
                f"{checkpoint} is not the newest of its run ({newest.name} is); to branch off "
                f"there give run_directory=NEW_FOLDER"
            )
        done = _is_finished(home, checkpoint, plan)
        return RunStart(home, checkpoint, home, tuple(warnings), done)
    # a branch that was killed has its directory
    directory = _make_directory(config) if origin is None else Path(str(config.run_directory))
    return RunStart(directory, checkpoint, home, tuple(warnings))


def _is_finished(home: Path, checkpoint: Path, plan: Plan) -> bool:
    """Return whether run `home`, at `checkpoint`, did all updates of `plan` and was summed up."""
    try:
        summary = json.loads((home / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    ended = isinstance(summary, dict) and summary.get("finished") is True
    return ended and read_state(checkpoint)["update"] == summary.get("updates") == plan.updates


def write_records(directory: Path, config: TrainConfig, plan: Plan) -> None:
    """Write config.yaml, plan.json and environment.json; a summary of an earlier end goes.

    Raises UserError if the directory cannot be written to.
    """
    try:
        (directory / "summary.json").unlink(missing_ok=True)
        options = OmegaConf.to_yaml(OmegaConf.create(to_plain(config)))
        # whole or not at all: a run that is killed here goes on with its options
        write_atomically(directory / "config.yaml", (options.encode(),))
        write_json(directory / "plan.json", plan.to_plain())
        write_json(directory / "environment.json", describe_environment())
    except OSError as error:
        raise UserError(f"run_directory={directory}: cannot be written: {error}") from error


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write `content` to `path` as JSON, whole or not at all."""
    write_atomically(path, ((json.dumps(content, indent=2) + "\n").encode(),))


def describe_environment() -> dict[str, Any]:
    """Return versions, device and git revision of this process, as environment.json holds them."""
    cuda = torch.cuda.is_available()
    return {
        "slayformer": slayformer.__version__,
        "git_revision": git_revision(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or "cpu",
        "threads": torch.get_num_threads(),
        "packages": package_versions(),
    }


@functools.cache
def package_versions() -> dict[str, str]:
    """Return the versions of the packages that shape a run; those not installed are left out."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


@functools.cache
def git_revision() -> str | None:
    """Return the commit this code started from, `+changes` if edited; None outside a clone."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(package), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
        return done.stdout.strip()

    package = Path(slayformer.__file__).parent
    try:
        # installed inside somebody else's repository it is not a file of theirs
        git("ls-files", "--error-unmatch", "__init__.py")
        changed = git("status", "--porcelain", "--untracked-files=no", ".")
        return git("rev-parse", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _make_directory(config: TrainConfig) -> Path:
    """Make the directory of a new run, under a name nobody else has."""
    if config.run_directory is not None:
        directory = Path(config.run_directory)
        there = [name for name in RECORDS if (directory / name).exists()]
        if there:
            hint = f"already holds a run ({there[0]}); go on with resume=auto, or name another"
            raise ConfigError("run_directory", directory, hint)
        _make(directory, exist_ok=True)
        return directory
    name = f"{config.attention.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    number = 1
    while True:
        directory = Path("runs").absolute() / (name if number == 1 else f"{name}-{number}")
        if _make(directory, exist_ok=False):
            return directory
        number += 1


def _make(directory: Path, *, exist_ok: bool) -> bool:
    """Make `directory`; return False if it is there and may not be."""
    try:
        directory.mkdir(parents=True, exist_ok=exist_ok)
    except FileExistsError:
        if directory.is_dir():
            return False
        raise ConfigError("run_directory", directory, "there is a file of that name") from None
    except OSError as error:
        hint = f"cannot be made ({error.strerror}); name a folder you may write to"
        raise ConfigError("run_directory", directory, hint) from error
    return True
