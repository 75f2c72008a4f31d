"""Checkpoints: what is saved comes back, damage is found, a failed save harms nothing.

The optimizer state of every ZeRO stage is tested with real processes in tests/distributed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from slayformer.config import TrainConfig
from slayformer.data.prepare import PreparedData, prepare
from slayformer.data.tokenizer import BPETokenizer, BytesTokenizer, vocabulary_size
from slayformer.errors import CheckpointError
from slayformer.model.gpt2 import GPT2
from slayformer.training import checkpoint, saving
from slayformer.training.budget import make_plan
from slayformer.training.checkpoint import (
    find_checkpoint,
    find_sound_checkpoint,
    load_model,
    verify_checkpoint,
)
from slayformer.training.going_on import changed_settings, check_fits
from slayformer.training.saving import Saver


class Weights:
    """The part of an engine that saving needs."""

    device = torch.device("cpu")

    def __init__(self, model: GPT2) -> None:
        self.model = model

    def optimizer_moments(self) -> dict[str, torch.Tensor]:
        return {"step": torch.ones(1), "weight.exp_avg": torch.zeros(1000)}

    def consolidated_weights(self) -> dict[str, torch.Tensor]:
        return self.model.state_dict()


Save = Callable[..., Path]


@pytest.fixture
def config(train_config: Any) -> TrainConfig:
    return train_config("attention=slay", "checkpoint.keep=2", "budget.updates=40")


@pytest.fixture
def data(config: TrainConfig) -> PreparedData:
    return prepare(config.data, config.tokenizer)


@pytest.fixture
def engine(config: TrainConfig) -> Weights:
    model = GPT2(config.model, config.attention, vocabulary_size=257, seed=3)
    return Weights(model)


@pytest.fixture
def save(tmp_path: Path, config: TrainConfig, data: PreparedData, engine: Weights) -> Save:
    """Return `save(update)`, which saves into the run `tmp_path`/run and returns the folder."""
    tokenizer = BytesTokenizer()
    saver = Saver(tmp_path / "run", config, tokenizer)

    def save_at(update: int, validation_loss: float | None = None) -> Path:
        state = {
            "validation_loss": validation_loss,
            "update": update,
            "samples": 8 * update,
            "world_size": 1,
            "tokenizer": tokenizer.identity,
            "data": data.directory.name,
            "data_identity": data.identity,
        }
        saver.save(engine, state)  # type: ignore[arg-type]
        saver.wait()
        return tmp_path / "run" / "checkpoints" / f"update_{update:07d}"

    return save_at


def test_a_saved_model_comes_back_bit_for_bit(save: Save, engine: Weights, tmp_path: Path) -> None:
    folder = save(10)
    for path in (folder, tmp_path / "run"):
        loaded = load_model(path)
        expected = engine.model.state_dict()
        assert loaded.model.state_dict().keys() == expected.keys()
        for name, tensor in loaded.model.state_dict().items():
            assert torch.equal(tensor, expected[name]), name
    # the features of the mechanism are among them
    assert any("attention." in name for name, _ in engine.model.named_buffers())
    assert not loaded.model.training
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("héllo")) == "héllo"
    assert loaded.state["update"] == 10


def test_the_newest_are_kept_and_latest_names_the_last(save: Save, tmp_path: Path) -> None:
    for update in (9, 10, 100, 20_000_000):
        save(update)
        assert find_checkpoint(tmp_path / "run").name == f"update_{update:07d}"
    there = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert there == ["latest", "update_0000100", "update_20000000"]


def test_the_best_stays_and_is_named(save: Save, tmp_path: Path) -> None:
    run = tmp_path / "run"
    # keep is 2; not every save follows a validation, and a diverged one is not the best
    losses = {1: 3.5, 2: 3.0, 3: None, 4: 3.2, 5: float("nan"), 6: 3.1}
    for update, loss in losses.items():
        save(update, loss)
    there = sorted(path.name for path in (run / "checkpoints").glob("update_*"))
    assert there == ["update_0000002", "update_0000005", "update_0000006"]
    assert find_checkpoint(run / "checkpoints" / "best").name == "update_0000002"
    assert load_model(run / "checkpoints" / "best").state["validation_loss"] == 3.0
    assert find_checkpoint(run).name == find_checkpoint(run / "checkpoints" / "latest").name
    save(7, 2.9)
    assert find_checkpoint(run / "checkpoints" / "best").name == "update_0000007"
    assert not (run / "checkpoints" / "update_0000002").exists()


def test_a_damaged_newest_falls_back_to_the_one_before(save: Save, tmp_path: Path) -> None:
    save(9)
    good, damaged = save(10), save(11)
    _truncate(damaged)
    found, (warning,) = find_sound_checkpoint(tmp_path / "run")
    assert found == good
    assert "update_0000011 is damaged" in warning
    assert "going on from update_0000010" in warning
    # asked for by name it is refused
    with pytest.raises(CheckpointError, match="update_0000011 is damaged"):
        find_sound_checkpoint(damaged)
    _flip(good)
    with pytest.raises(CheckpointError, match="update_0000011 is damaged"):
        find_sound_checkpoint(tmp_path / "run")


def test_a_newest_that_was_deleted_is_passed_over(save: Save, tmp_path: Path) -> None:
    run = tmp_path / "run"
    kept, gone = save(10), save(11)
    shutil.rmtree(gone)
    found, (warning,) = find_sound_checkpoint(run)
    assert found == kept
    assert "names 'update_0000011', which is not there" in warning
    assert "going on from update_0000010" in warning
    shutil.rmtree(kept)
    with pytest.raises(CheckpointError, match="which is not there; complete: none"):
        find_sound_checkpoint(run)


def test_files_are_readable_by_others(save: Save) -> None:
    folder = save(10)
    modes = {oct(path.stat().st_mode & 0o777) for path in folder.rglob("*") if path.is_file()}
    assert len(modes) == 1


def test_missing_checkpoints(save: Save, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no such folder"):
        find_checkpoint(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="neither a checkpoint folder nor a run directory"):
        find_checkpoint(tmp_path / "empty")
    folder = save(10)
    save(20)
    (folder.parent / "latest").write_text("update_0000030")
    complete = r"complete: update_0000010, update_0000020"
    with pytest.raises(CheckpointError, match=complete):
        find_checkpoint(tmp_path / "run")
    (folder.parent / "latest").write_text("../../elsewhere")
    with pytest.raises(CheckpointError, match="is not there"):
        find_checkpoint(tmp_path / "run")


def _truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def _flip(folder: Path) -> None:
    file = folder / "optimizer.safetensors"
    content = bytearray(file.read_bytes())
    content[500] ^= 1
    file.write_bytes(content)


def _escape(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["../latest"] = {"bytes": 14, "sha256": ""}
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "manifest.json").unlink(), "half-written: manifest.json is missing"),
        (lambda f: (f / "manifest.json").write_text('{"files": '), "damaged: manifest.json"),
        (lambda f: (f / "manifest.json").write_text("{}"), "not a manifest"),
        (lambda f: (f / "state.json").unlink(), "state.json is missing"),
        (lambda f: shutil.rmtree(f / "tokenizer"), "tokenizer/tokenizer.json is missing"),
        (_truncate, r"model.safetensors has [\d,]+ bytes, not [\d,]+"),
        (_flip, "the sha256 of optimizer.safetensors differs"),
        (_escape, "outside the checkpoint"),
    ],
)
def test_damage_is_found(save: Save, damage: Callable[[Path], Any], message: str) -> None:
    folder = save(10)
    verify_checkpoint(folder)
    damage(folder)
    for check in (verify_checkpoint, load_model):
        with pytest.raises(CheckpointError, match=message):
            check(folder)


def test_checkpoint_fits_only_what_it_was_saved_for(
    save: Save, train_config: Any, config: TrainConfig, data: PreparedData
) -> None:
    folder = save(10)

    def fits(*overrides: str, world_size: int = 1) -> None:
        asked = train_config("attention=slay", "budget.updates=40", *overrides)
        plan = make_plan(asked, vocabulary_size(asked.tokenizer), world_size)
        check_fits(folder, asked, plan, data)

    fits()
    fits("budget.updates=10", "optimizer.learning_rate=1", "batch.micro_samples=2")
    for overrides, message in {
        ("model.width=64",): "model.width=32, which is not 64; to go on give the run.s own",
        ("attention=softmax",): "with attention=slay, which is not softmax; to go on give",
        ("attention.nodes=2",): "saved with attention.nodes=3, which is not 2",
        ("tokenizer=gpt2",): "saved with tokenizer=bytes, which is not gpt2",
        ("seed=1",): "saved with seed=0, which is not 1",
        ("batch.samples_per_update=4",): "has seen 80 samples in 10 updates",
        ("budget.updates=9",): "has seen 80 samples in 10 updates",
    }.items():
        with pytest.raises(CheckpointError, match=message):
            fits(*overrides)
    # another topology goes on from the same sample, by another engine
    fits("engine.zero_stage=3", "attention.backend=torch", world_size=2)
    per_device = ("batch.samples_per_update=null", "batch.samples_per_device=8")
    fits(*per_device)
    with pytest.raises(CheckpointError, match="scales with the processes, 1 then and 2 now"):
        fits(*per_device, world_size=2)
    plan = make_plan(config, 257, 1)
    other = BPETokenizer.build(257, lambda: ["text"])
    with pytest.raises(CheckpointError, match="tokenizer of other text"):
        check_fits(folder, config, plan, replace(data, tokenizer=other))
    with pytest.raises(CheckpointError, match=f"other text .* initial_weights={folder}$"):
        check_fits(folder, config, plan, replace(data, identity="0" * 64))


def test_changed_settings_are_named(save: Save, config: TrainConfig) -> None:
    folder = save(10)
    assert changed_settings(folder, config) == []
    changed = replace(config, seed=5, batch=replace(config.batch, micro_samples=2), resume="auto")
    assert changed_settings(folder, changed) == ["batch.micro_samples 4 -> 2", "seed 0 -> 5"]


def _refuse(*arguments: Any, **options: Any) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("failing", ["model", "optimizer", "manifest", "latest"])
def test_a_failed_save_leaves_the_earlier_checkpoints(
    save: Save,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    failing: str,
) -> None:
    earlier = save(10)
    real = saving.write_atomically

    def refuse_one(path: Path, chunks: Any) -> None:
        if path.name.startswith(failing):
            _refuse()
        real(path, chunks)

    real_tensors = saving.safetensors.torch.save_file

    def refuse_tensors(tensors: Any, path: Path) -> None:
        if path.name.startswith(failing):
            _refuse()
        real_tensors(tensors, path)

    if failing in ("model", "optimizer"):
        monkeypatch.setattr(saving.safetensors.torch, "save_file", refuse_tensors)
    else:
        monkeypatch.setattr(saving, "write_atomically", refuse_one)
    with pytest.raises(CheckpointError, match=r"no checkpoint could be saved .*No space left"):
        save(20)
    monkeypatch.undo()
    there = sorted(path.name for path in earlier.parent.iterdir())
    assert there == ["latest", "update_0000010"]
    assert load_model(tmp_path / "run").state["update"] == 10
    # and the next one can be saved
    assert find_checkpoint(tmp_path / "run") != save(20)
    verify_checkpoint(find_checkpoint(tmp_path / "run"))


def test_what_lies_beyond_is_void(save: Save, tmp_path: Path) -> None:
    run = tmp_path / "run"
    save(30, validation_loss=3.0)
    # the newest, and the best
    damaged = save(40, validation_loss=2.0)
    (damaged / "model.safetensors").write_bytes(b"")
    assert find_sound_checkpoint(run)[0].name == "update_0000030"
    saved = save(35)
    assert find_sound_checkpoint(run) == (saved, [])
    there = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert there == ["best", "latest", "update_0000030", "update_0000035"]
    assert find_checkpoint(run / "checkpoints" / "best").name == "update_0000030"


def test_what_a_killed_save_left_is_cleared_away(save: Save, tmp_path: Path) -> None:
    save(10)
    left = tmp_path / "run" / "checkpoints" / "update_0000020.unfinished"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    assert find_checkpoint(tmp_path / "run").name == "update_0000010"
    save(30)
    assert not left.exists()


def test_a_kill_before_the_first_latest_loses_no_checkpoint(save: Save) -> None:
    save(3)
    newest = save(5)
    run = newest.parent.parent
    (run / "checkpoints" / "latest").unlink()
    assert find_checkpoint(run) == newest
    assert checkpoint.has_checkpoint(run)
    assert not checkpoint.has_checkpoint(run / "checkpoints")


@pytest.mark.parametrize(
    "listed",
    [
        *(None, {}, [1, 2], {"bytes": 3}, {"bytes": 3, "sha256": None}),
        *({"bytes": 3, "sha257": "a"}, {"bytes": "3", "sha256": "a"}),
    ],
)
def test_a_manifest_that_says_nothing_of_a_file_is_damage(save: Save, listed: Any) -> None:
    path = save(3)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["state.json"] = listed
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged: it lists state\.json"):
        verify_checkpoint(path)
