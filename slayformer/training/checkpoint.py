"""Checkpoints: checked before they are read. `saving.py` writes them.

A checkpoint is the folder checkpoints/update_NNNNNNN of a run. Its manifest.json, written last,
lists every file with size and sha256. `checkpoints/latest` names the newest, `checkpoints/best`
the one with the lowest validation loss of those saved right after a validation.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from safetensors import SafetensorError

from slayformer.config import TrainConfig
from slayformer.config_loading import load_config
from slayformer.data.tokenizer import Tokenizer, load_tokenizer
from slayformer.errors import CheckpointError, UserError
from slayformer.model.gpt2 import GPT2
from slayformer.training import distributed

if TYPE_CHECKING:
    from slayformer.training.engine import TrainingEngine

# 1 had DeepSpeed's own files, 2 has AdamW's moments by parameter
READABLE_VERSIONS = (1, 2)
FOLDER, LATEST, BEST, MANIFEST = "checkpoints", "latest", "best", "manifest.json"
WEIGHTS, CONFIG, STATE, TOKENIZER = "model.safetensors", "config.yaml", "state.json", "tokenizer"
OPTIMIZER = "optimizer.safetensors"
NAME = re.compile(r"update_\d{7,}")


@dataclass(frozen=True)
class LoadedModel:
    """A model read from a checkpoint, in evaluation mode, and what belongs to it."""

    model: GPT2
    config: TrainConfig
    tokenizer: Tokenizer
    state: dict[str, Any]


def find_checkpoint(path: Path) -> Path:
    """Return the checkpoint folder that `path` is, or the newest of the run directory it is.

    `path` may also be the file `checkpoints/best` or `checkpoints/latest`. Raises CheckpointError
    if there is none.
    """
    path = Path(path)
    if path.name in (LATEST, BEST) and path.is_file():
        return _named_by(path)
    if not path.is_dir():
        raise CheckpointError(f"no checkpoint at {path}: there is no such folder")
    if NAME.fullmatch(path.absolute().name) or (path / MANIFEST).exists():
        return path
    latest = path / FOLDER / LATEST
    if not latest.is_file():
        # a kill can fall between a run's first checkpoint and the note that names it
        complete = complete_names(path / FOLDER)
        if complete:
            return path / FOLDER / complete[-1]
        raise CheckpointError(
            f"no checkpoint in {path}: neither a checkpoint folder nor a run directory that has "
            f"saved one ({latest} is missing)"
        )
    return _named_by(latest)


def _named_by(file: Path) -> Path:
    name = file.read_text(encoding="utf-8", errors="replace").strip()
    folder = file.parent / name
    if not NAME.fullmatch(name) or not folder.is_dir():
        there = ", ".join(complete_names(file.parent)) or "none"
        raise CheckpointError(f"{file} names {name!r}, which is not there; complete: {there}")
    return folder


def newest_checkpoint(path: Path) -> tuple[Path, list[str]]:
    """Return the checkpoint `find_checkpoint` finds, and warnings.

    If the one that a run directory names has been deleted, the newest complete one that is left is
    returned with a warning. Raises CheckpointError if there is none.
    """
    try:
        return find_checkpoint(path), []
    except CheckpointError as error:
        left = complete_names(path / FOLDER)
        if not left:
            raise
        return path / FOLDER / left[-1], [str(error)]


def branched_from(directory: Path) -> Path | None:
    """Return the checkpoint of another run that the one in `directory` set out from.

    None once it has one of its own.
    """
    if has_checkpoint(directory) or not (directory / CONFIG).is_file():
        return None
    resume = read_config(directory).resume
    return None if resume in (None, "auto") else Path(resume)


def find_sound_checkpoint(path: Path) -> tuple[Path, list[str]]:
    """Return the checkpoint `newest_checkpoint` finds, verified, and warnings.

    If the newest of a run directory is damaged, the newest sound one before it is returned with a
    warning. Raises CheckpointError if there is none.
    """
    newest, warnings = newest_checkpoint(path)
    earlier = []
    if (path / FOLDER).is_dir():
        names = complete_names(path / FOLDER)
        earlier = [path / FOLDER / name for name in reversed(names) if name != newest.name]
    for candidate in (newest, *earlier):
        try:
            verify_checkpoint(candidate)
        except CheckpointError as error:
            warnings.append(str(error))
        else:
            return candidate, [f"{w}; going on from {candidate.name}" for w in warnings]
    raise CheckpointError(warnings[0])


def has_checkpoint(directory: Path) -> bool:
    """Return whether run `directory` has ever saved."""
    parent = directory / FOLDER
    return (parent / LATEST).exists() or bool(complete_names(parent))


def verify_checkpoint(path: Path) -> dict[str, Any]:
    """Return the manifest of checkpoint `path` after comparing every file's size and sha256.

    Raises CheckpointError if it is half-written or damaged.
    """
    manifest = _read_json(path, MANIFEST, "half-written")
    files = manifest.get("files")
    if manifest.get("format_version") not in READABLE_VERSIONS or not isinstance(files, dict):
        formats = " or ".join(map(str, READABLE_VERSIONS))
        raise CheckpointError(f"{path / MANIFEST} is not a manifest of format {formats}")
    for name, listed in files.items():
        file = path / name
        kinds = {"bytes": int, "sha256": str}
        if not isinstance(listed, dict) or any(
            not isinstance(listed.get(key), kind) for key, kind in kinds.items()
        ):
            raise CheckpointError(f"{path / MANIFEST} is damaged: it lists {name} as {listed!r}")
        if ".." in Path(name).parts or Path(name).is_absolute():
            raise CheckpointError(f"{path / MANIFEST} lists {name!r}, outside the checkpoint")
        if not file.is_file():
            raise CheckpointError(f"checkpoint {path} is damaged: {name} is missing")
        size = file.stat().st_size
        if size != listed["bytes"]:
            raise CheckpointError(
                f"checkpoint {path} is damaged: {name} has {size:,} bytes, not {listed['bytes']:,}"
            )
        if sha256(file) != listed["sha256"]:
            raise CheckpointError(f"checkpoint {path} is damaged: the sha256 of {name} differs")
    for name in (WEIGHTS, CONFIG, STATE):
        if name not in files:
            raise CheckpointError(f"checkpoint {path} is incomplete: it never had {name}")
    return manifest


def read_state(path: Path) -> dict[str, Any]:
    """Return what state.json of checkpoint `path` tells; raises CheckpointError if unreadable."""
    return _read_json(path, STATE, "incomplete")


def read_config(path: Path) -> TrainConfig:
    """Return the configuration checkpoint `path` was trained with; may raise CheckpointError."""
    try:
        return load_config(OmegaConf.load(path / CONFIG))  # type: ignore[arg-type]
    except (OSError, OmegaConfBaseException, UserError, ValueError) as error:
        raise CheckpointError(f"{path / CONFIG} cannot be used: {error}") from error


def load_model(path: Path, device: torch.device | str = "cpu") -> LoadedModel:
    """Return the model of checkpoint `path`, fp32 on `device`, from its safetensors alone.

    Verifies the checkpoint first. Raises CheckpointError if it is damaged or does not fit.
    """
    path = find_checkpoint(path)
    verify_checkpoint(path)
    config, state = read_config(path), read_state(path)
    tokenizer = load_tokenizer(path / TOKENIZER)
    model = GPT2(
        config.model,
        config.attention,
        vocabulary_size=tokenizer.vocabulary_size,
        seed=config.seed,
    )
    load_weights(path, model)
    return LoadedModel(model.to(device).eval(), config, tokenizer, state)


def load_weights(path: Path, model: GPT2) -> None:
    """Give `model` weights and buffers of checkpoint `path`; CheckpointError if they do not fit."""
    try:
        model.load_state_dict(safetensors.torch.load_file(path / WEIGHTS))
    except (RuntimeError, SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path / WEIGHTS} does not fit the configuration: {error}"
        ) from error


def restore(path: Path, engine: TrainingEngine, *, same_world: bool) -> None:
    """Give `engine` the optimizer state of checkpoint `path`, and in the `same_world` its RNG.

    The model must have had the checkpoint's weights before the engine was made, and the checkpoint
    must have been verified. Raises CheckpointError if it does not fit.
    """
    try:
        engine.set_optimizer_moments(safetensors.torch.load_file(path / OPTIMIZER))
        if same_world:
            states = safetensors.torch.load_file(path / rng_name(distributed.rank()))
            torch.set_rng_state(states["cpu"])
            if "cuda" in states and engine.device.type == "cuda":
                torch.cuda.set_rng_state(states["cuda"], engine.device)
    except (OSError, SafetensorError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"{path} cannot be gone on from: {error}") from error


def rng_name(rank: int) -> str:
    """Return the name of the file with the random state of a rank."""
    return f"rng_rank_{rank:05d}.safetensors"


def complete_names(parent: Path) -> list[str]:
    """Return the names of the checkpoints in `parent` that have a manifest, oldest first."""
    found = [p.name for p in parent.glob("update_*") if (p / MANIFEST).is_file()]
    return sorted((n for n in found if NAME.fullmatch(n)), key=lambda n: int(n.split("_")[1]))


def sha256(file: Path) -> str:
    """Return the sha256 of a file's content, hex."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _read_json(folder: Path, name: str, fault: str) -> dict[str, Any]:
    if not folder.is_dir():
        raise CheckpointError(f"no checkpoint at {folder}: there is no such folder")
    try:
        content = json.loads((folder / name).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"checkpoint {folder} is {fault}: {name} is missing") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"checkpoint {folder} is damaged: {name}: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"checkpoint {folder} is damaged: {name} is not an object")
    return content
