"""Saving in the background: one at a time, seen through, and never at the cost of what is there."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from slayformer.config import TrainConfig
from slayformer.data.tokenizer import BytesTokenizer
from slayformer.errors import CheckpointError
from slayformer.model.gpt2 import GPT2
from slayformer.training import saving
from slayformer.training.checkpoint import find_sound_checkpoint, has_checkpoint, load_model
from slayformer.training.saving import Saver, Snapshot

Begin = Callable[[int], None]
# Python tells of these before it does them
STEPS = ("open", "os.mkdir", "os.chmod", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")


class Weights:
    """The part of an engine that saving needs."""

    device = torch.device("cpu")

    def __init__(self, model: GPT2) -> None:
        self.model = model

    def optimizer_moments(self) -> dict[str, torch.Tensor]:
        return {"step": torch.ones(1)}

    def consolidated_weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}


@pytest.fixture
def config(train_config: Any) -> TrainConfig:
    return train_config("attention=slay", "budget.updates=40")


@pytest.fixture
def saver(tmp_path: Path, config: TrainConfig) -> Saver:
    return Saver(tmp_path / "run", config, BytesTokenizer())


@pytest.fixture
def begin(saver: Saver, config: TrainConfig) -> Begin:
    """Return `begin(update)`, which begins to save weights that all equal `update`."""
    model = GPT2(config.model, config.attention, vocabulary_size=257, seed=3)

    def save(update: int) -> None:
        with torch.no_grad():
            model.token_embedding.weight.fill_(update)
        saver.save(Weights(model), {"update": update})  # type: ignore[arg-type]
        with torch.no_grad():
            model.token_embedding.weight.fill_(-1)

    return save


def newest(run: Path) -> int:
    """Return the update of the newest checkpoint, which must be sound and hold its weights."""
    path, warnings = find_sound_checkpoint(run)
    assert warnings == []
    loaded = load_model(path)
    update = loaded.state["update"]
    assert path.name == f"update_{update:07d}"
    assert (loaded.model.token_embedding.weight == update).all()
    return update


def test_training_goes_on_and_the_next_save_waits(
    saver: Saver, begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, may_write, real = tmp_path / "run", threading.Event(), saving.write_checkpoint

    def when_allowed(directory: Path, snapshot: Snapshot, *rest: Any) -> Path:
        may_write.wait()
        return real(directory, snapshot, *rest)

    monkeypatch.setattr(saving, "write_checkpoint", when_allowed)
    begin(10)
    assert not has_checkpoint(run)
    later = threading.Timer(0.2, may_write.set)
    later.start()
    begin(20)
    # one at a time: the first is there before the second is copied
    assert has_checkpoint(run)
    saver.wait()
    assert newest(run) == 20
    assert load_model(run / "checkpoints" / "update_0000010").state["update"] == 10


def test_a_failure_is_told_once_to_whoever_waits(
    saver: Saver, begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(10)
    saver.wait()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saving, "_to_disk", full)
    with saver:
        begin(20)
        assert saver._thread is not None
        saver._thread.join()
        assert saver.failed
        with pytest.raises(CheckpointError, match="No space left on device; earlier ones are unt"):
            begin(30)
        assert not saver.failed
    begin(40)
    # an end for another reason is not hidden by this one
    with pytest.raises(KeyError), saver:
        raise KeyError
    monkeypatch.undo()
    assert newest(tmp_path / "run") == 10


def test_leaving_waits_for_what_is_being_written(
    saver: Saver, begin: Begin, tmp_path: Path
) -> None:
    def fail() -> None:
        with saver:
            begin(10)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert newest(tmp_path / "run") == 10


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_at_any_step_the_newest_checkpoint_is_sound(
    saver: Saver, begin: Begin, tmp_path: Path
) -> None:
    run, before = tmp_path / "run", tmp_path / "before"
    begin(10)
    saver.wait()
    run.rename(before)
    seen, steps = [], 0
    while True:
        shutil.copytree(before, run)
        child = os.fork()
        if child == 0:
            _save_and_die(saver, begin, steps)
        _, status = os.waitpid(child, 0)
        seen.append(newest(run))
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
        shutil.rmtree(run)
        steps += 1
    # first the old one is the newest, from some step on the new one
    assert seen == sorted(seen)
    assert set(seen) == {10, 20}
    assert len(seen) > 20


def _save_and_die(saver: Saver, begin: Begin, steps: int) -> None:
    """Save, and kill this process before the step of that number that touches a file."""
    left = steps

    def count(event: str, _: Any) -> None:
        nonlocal left
        if event in STEPS:
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    code = 1
    try:
        sys.addaudithook(count)
        begin(20)
        saver.wait()
        code = 0
    finally:
        os._exit(code)
