"""Saving while training goes on: a copy of everything is taken, and a thread writes it.

A checkpoint is written whole or not at all: into a folder of another name, which gets the final
one when every file is on the disk. Rank 0 writes for all.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from omegaconf import OmegaConf
from safetensors import SafetensorError
from torch import Tensor

from slayformer.config import TrainConfig
from slayformer.config_loading import to_plain
from slayformer.data.shards import write_atomically
from slayformer.data.tokenizer import Tokenizer
from slayformer.errors import CheckpointError
from slayformer.training import distributed
from slayformer.training.checkpoint import (
    BEST,
    CONFIG,
    FOLDER,
    LATEST,
    MANIFEST,
    OPTIMIZER,
    STATE,
    TOKENIZER,
    WEIGHTS,
    complete_names,
    read_state,
    rng_name,
    sha256,
)

if TYPE_CHECKING:
    from slayformer.training.engine import TrainingEngine

FORMAT_VERSION = 2
UNFINISHED = ".unfinished"


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint holds, copied to the host: training changes none of it.

    `random_states` are those of every rank, in their order.
    """

    state: dict[str, Any]
    weights: dict[str, Tensor]
    moments: dict[str, Tensor]
    random_states: list[dict[str, Tensor]]


class Saver:
    """Writes the checkpoints of a run, one at a time; every rank has one, rank 0 alone writes.

    As a context it leaves nothing half-written behind, whatever ends the training.
    """

    def __init__(self, run_directory: Path, config: TrainConfig, tokenizer: Tokenizer) -> None:
        self._run_directory, self._config, self._tokenizer = run_directory, config, tokenizer
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, *exception: object) -> None:
        # the other ranks may not come any more
        self._join()

    @property
    def failed(self) -> bool:
        """Whether this process could not write; `wait` then raises what it was on every rank."""
        return self._error is not None

    def save(self, engine: TrainingEngine, state: dict[str, Any]) -> None:
        """Copy what `engine` holds and begin to write it. Every rank must call it.

        Waits for the checkpoint before, and raises what `wait` does.
        """
        self.wait()
        snapshot = take_snapshot(engine, state)
        if snapshot is not None:
            self._thread = threading.Thread(target=self._write, args=(snapshot,), name="saving")
            self._thread.start()

    def wait(self) -> None:
        """Return once nothing is being written. Every rank must call it.

        Raises CheckpointError on every rank if it could not be written.
        """
        distributed.run_on_main(self._finish)

    def _write(self, snapshot: Snapshot) -> None:
        try:
            write_checkpoint(self._run_directory, snapshot, self._config, self._tokenizer)
        except BaseException as error:
            self._error = error

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _finish(self) -> None:
        self._join()
        error, self._error = self._error, None
        if error is not None:
            raise error


def take_snapshot(engine: TrainingEngine, state: dict[str, Any]) -> Snapshot | None:
    """Return a copy of what `engine` holds; None off rank 0. Every rank must call it."""
    own = {"cpu": torch.get_rng_state()}
    if engine.device.type == "cuda":
        own["cuda"] = torch.cuda.get_rng_state(engine.device)
    random_states = distributed.gather_objects(own)
    weights, moments = engine.consolidated_weights(), engine.optimizer_moments()
    return None if weights is None else Snapshot(state, weights, moments, random_states)


def write_checkpoint(
    run_directory: Path, snapshot: Snapshot, config: TrainConfig, tokenizer: Tokenizer
) -> Path:
    """Write `snapshot` and return its folder; the newest `checkpoint.keep` and the best stay.

    Checkpoints of later updates go: the run has gone on from before them.

    The best is that with the lowest `validation_loss` in its state, where there is one.

    Raises CheckpointError if it cannot: what had been written is removed, `latest` and the
    checkpoints before stay as they were.
    """
    folder = run_directory / FOLDER / f"update_{snapshot.state['update']:07d}"
    unfinished = folder.with_name(folder.name + UNFINISHED)
    try:
        _make_empty(unfinished)
        _write_tensors(unfinished / WEIGHTS, snapshot.weights)
        _write_tensors(unfinished / OPTIMIZER, snapshot.moments)
        for rank, states in enumerate(snapshot.random_states):
            _write_tensors(unfinished / rng_name(rank), states)
        OmegaConf.save(OmegaConf.create(to_plain(config)), unfinished / CONFIG)
        tokenizer.save(unfinished / TOKENIZER)
        told = json.dumps(snapshot.state, indent=2) + "\n"
        (unfinished / STATE).write_text(told, encoding="utf-8")
        _publish(unfinished, folder, config.checkpoint.keep)
    except OSError as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise CheckpointError(
            f"no checkpoint could be saved in {run_directory}: {error}; earlier ones are untouched"
        ) from error
    return folder


def _make_empty(folder: Path) -> None:
    """Make `folder` new, without what runs killed while saving have left beside it."""
    for leftover in folder.parent.glob(f"update_*{UNFINISHED}"):
        shutil.rmtree(leftover)
    folder.mkdir(parents=True)


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    try:
        safetensors.torch.save_file(tensors, path)
    except SafetensorError as error:
        raise OSError(f"{path.name} could not be written: {error}") from error
    # the library lets nobody but the owner read it
    path.chmod(path.parent.stat().st_mode & 0o666)


def _publish(unfinished: Path, folder: Path, keep: int) -> None:
    """Turn what has been written into the newest checkpoint, and drop the oldest."""
    files = {}
    for file in sorted(unfinished.rglob("*")):
        if file.is_file():
            _to_disk(file)
            name = file.relative_to(unfinished).as_posix()
            files[name] = {"bytes": file.stat().st_size, "sha256": sha256(file)}
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
    names = complete_names(folder.parent)
    # what lies beyond is of a way that was left, for a damaged checkpoint at its end
    void = names[names.index(folder.name) + 1 :]
    names = names[: len(names) - len(void)]
    losses = {name: _validation_loss(folder.parent / name) for name in names}
    scored = {name: loss for name, loss in losses.items() if loss is not None}
    best = min(scored, key=lambda name: scored[name], default=None)
    if best is not None:
        write_atomically(folder.parent / BEST, [best.encode()])
    for name in names[:-keep] + void:
        if name != best:
            shutil.rmtree(folder.parent / name, ignore_errors=True)


def _to_disk(file: Path) -> None:
    """Wait until the content of `file` would survive a power cut."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())


def _validation_loss(path: Path) -> float | None:
    """Return the finite validation loss that checkpoint `path` knows of itself, if any."""
    try:
        loss = read_state(path).get("validation_loss")
    except CheckpointError:
        return None
    return loss if isinstance(loss, float) and math.isfinite(loss) else None
