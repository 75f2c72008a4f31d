"""Checkpoints: written whole or not at all, checked before they are read.

A checkpoint is the folder checkpoints/update_NNNNNNN of a run. Its manifest.json, written last,
lists every file with size and sha256. `checkpoints/latest` names the newest, `checkpoints/best`
the one with the lowest validation loss of those saved right after a validation.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from safetensors import SafetensorError

from slayformer.config import TrainConfig
from slayformer.config_loading import load_config, to_plain
from slayformer.data.shards import write_atomically
from slayformer.data.tokenizer import Tokenizer, load_tokenizer
from slayformer.errors import CheckpointError, UserError
from slayformer.model.gpt2 import GPT2
from slayformer.training import distributed

if TYPE_CHECKING:
    from slayformer.training.engine import TrainingEngine

# 2: AdamW's moments by parameter, where 1 had DeepSpeed's own files
FORMAT_VERSION, READABLE_VERSIONS = 2, (1, 2)
FOLDER, LATEST, BEST, MANIFEST = "checkpoints", "latest", "best", "manifest.json"
WEIGHTS, CONFIG, STATE, TOKENIZER = "model.safetensors", "config.yaml", "state.json", "tokenizer"
OPTIMIZER = "optimizer.safetensors"
UNFINISHED = ".unfinished"
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
        complete = _complete_names(path / FOLDER)
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
        there = ", ".join(_complete_names(file.parent)) or "none"
        raise CheckpointError(f"{file} names {name!r}, which is not there; complete: {there}")
    return folder


def find_sound_checkpoint(path: Path) -> tuple[Path, list[str]]:
    """Return the checkpoint `find_checkpoint` finds, verified, and warnings.

    If the newest of a run directory is damaged, the newest sound one before it is returned with a
    warning. Raises CheckpointError if there is none.
    """
    warnings: list[str] = []
    newest = find_checkpoint(path)
    earlier = []
    if (path / FOLDER).is_dir():
        names = _complete_names(path / FOLDER)
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
    return (parent / LATEST).exists() or bool(_complete_names(parent))


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
        if not isinstance(listed, dict) or listed.keys() < {"bytes", "sha256"}:
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
        if _sha256(file) != listed["sha256"]:
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


def save_checkpoint(
    run_directory: Path,
    engine: TrainingEngine,
    *,
    config: TrainConfig,
    tokenizer: Tokenizer,
    state: dict[str, Any],
) -> Path:
    """Save on all ranks and return the folder; the newest `checkpoint.keep` and the best stay.

    The best is that with the lowest `validation_loss` in its `state`, where there is one.

    Raises CheckpointError on every rank if any could not write: what had been written is removed,
    `latest` and the checkpoints before stay as they were.
    """
    parent = run_directory / FOLDER
    folder = parent / f"update_{state['update']:07d}"
    unfinished = folder.with_name(folder.name + UNFINISHED)
    try:
        distributed.run_on_main(lambda: _guard(run_directory, lambda: _make_empty(unfinished)))
        weights, moments = engine.consolidated_weights(), engine.optimizer_moments()
        error: OSError | None = None
        try:
            _write_rng(unfinished, engine.device)
            if weights is not None:
                _write_model(unfinished, weights, config, tokenizer, state)
                _write_tensors(unfinished / OPTIMIZER, moments)
        except OSError as own_error:
            error = own_error
        errors = [one for one in distributed.gather_objects(error and str(error)) if one]
        if errors:
            raise CheckpointError(_not_saved(run_directory, errors[0]))
        keep = config.checkpoint.keep
        distributed.run_on_main(
            lambda: _guard(run_directory, lambda: _publish(unfinished, folder, keep))
        )
    except CheckpointError:
        if distributed.is_main():
            shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return folder


def restore(path: Path, engine: TrainingEngine, *, same_world: bool) -> None:
    """Give `engine` the optimizer state of checkpoint `path`, and in the `same_world` its RNG.

    The model must have had the checkpoint's weights before the engine was made, and the checkpoint
    must have been verified. Raises CheckpointError if it does not fit.
    """
    try:
        engine.set_optimizer_moments(safetensors.torch.load_file(path / OPTIMIZER))
        if same_world:
            states = safetensors.torch.load_file(path / _rng_name(distributed.rank()))
            torch.set_rng_state(states["cpu"])
            if "cuda" in states and engine.device.type == "cuda":
                torch.cuda.set_rng_state(states["cuda"], engine.device)
    except (OSError, SafetensorError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"{path} cannot be gone on from: {error}") from error


def _write_model(
    folder: Path,
    weights: dict[str, torch.Tensor],
    config: TrainConfig,
    tokenizer: Tokenizer,
    state: dict[str, Any],
) -> None:
    _write_tensors(folder / WEIGHTS, weights)
    OmegaConf.save(OmegaConf.create(to_plain(config)), folder / CONFIG)
    tokenizer.save(folder / TOKENIZER)
    (folder / STATE).write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")


def _rng_name(rank: int) -> str:
    return f"rng_rank_{rank:05d}.safetensors"


def _write_rng(folder: Path, device: torch.device) -> None:
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    _write_tensors(folder / _rng_name(distributed.rank()), states)


def _write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    try:
        safetensors.torch.save_file(tensors, path)
    except SafetensorError as error:
        raise OSError(f"{path.name} could not be written: {error}") from error
    # the library lets nobody but the owner read it
    path.chmod(path.parent.stat().st_mode & 0o666)


def _make_empty(folder: Path) -> None:
    """Make `folder` new, without what runs killed while saving have left beside it."""
    for leftover in folder.parent.glob(f"update_*{UNFINISHED}"):
        shutil.rmtree(leftover)
    folder.mkdir(parents=True)


def _publish(unfinished: Path, folder: Path, keep: int) -> None:
    """Turn the folder all ranks have written into the newest checkpoint, and drop the oldest."""
    files = {
        file.relative_to(unfinished).as_posix(): {
            "bytes": file.stat().st_size,
            "sha256": _sha256(file),
        }
        for file in sorted(unfinished.rglob("*"))
        if file.is_file()
    }
    manifest = json.dumps({"format_version": FORMAT_VERSION, "files": files}, indent=2) + "\n"
    write_atomically(unfinished / MANIFEST, [manifest.encode()])
    # only a damaged one can be there: a run never saves an update twice
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(unfinished, folder)
    try:
        write_atomically(folder.parent / LATEST, [folder.name.encode()])
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    names = _complete_names(folder.parent)
    losses = {name: _validation_loss(folder.parent / name) for name in names}
    scored = {name: loss for name, loss in losses.items() if loss is not None}
    best = min(scored, key=lambda name: scored[name], default=None)
    if best is not None:
        write_atomically(folder.parent / BEST, [best.encode()])
    for name in names[:-keep]:
        if name != best:
            shutil.rmtree(folder.parent / name, ignore_errors=True)


def _validation_loss(path: Path) -> float | None:
    """Return the finite validation loss that checkpoint `path` knows of itself, if any."""
    try:
        loss = read_state(path).get("validation_loss")
    except CheckpointError:
        return None
    return loss if isinstance(loss, float) and math.isfinite(loss) else None


def _guard(run_directory: Path, action: Callable[[], None]) -> None:
    """Run `action`; an OSError becomes a CheckpointError."""
    try:
        action()
    except OSError as error:
        raise CheckpointError(_not_saved(run_directory, str(error))) from error


def _not_saved(run_directory: Path, reason: str) -> str:
    return f"no checkpoint could be saved in {run_directory}: {reason}; earlier ones are untouched"


def _complete_names(parent: Path) -> list[str]:
    """Return the names of the checkpoints in `parent` that have a manifest, oldest first."""
    found = [p.name for p in parent.glob("update_*") if (p / MANIFEST).is_file()]
    return sorted((n for n in found if NAME.fullmatch(n)), key=lambda n: int(n.split("_")[1]))


def _sha256(file: Path) -> str:
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
