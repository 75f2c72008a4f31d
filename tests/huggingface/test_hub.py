"""Names of the Hugging Face hub: its own code finds what it has stored here, the rest is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2Config, GPT2LMHeadModel

from slayformer.cli import compose
from slayformer.config_commands import EvalConfig
from slayformer.config_loading import load_config
from slayformer.errors import ConfigError
from slayformer.evaluation.perplexity import run as evaluate
from slayformer.huggingface.hub import is_hub_name, model_folder
from slayformer.training.initial_weights import find_initial_weights
from slayformer.training.run import run as train
from slayformer.training.run_directory import with_absolute_paths

REVISION = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of `someone/tiny` as the hub's library stores what it has downloaded."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    home = tmp_path / "hub" / "models--someone--tiny"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text(REVISION)
    folder = home / "snapshots" / REVISION
    GPT2LMHeadModel(
        GPT2Config(vocab_size=257, n_positions=32, n_embd=16, n_layer=1, n_head=2)
    ).save_pretrained(folder)
    return folder


def training(name: str) -> Any:
    shape = ["model.layers=1", "model.width=16", "model.heads=2", "model.context_length=32"]
    overrides = [*shape, "tokenizer=bytes", "attention=softmax", "dry_run=true"]
    return load_config(compose("train", [*overrides, f"initial_weights={name}"]))


def test_a_name_of_the_hub_is_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    names = {"openai-community/gpt2": True, "someone/my.model_2": True, "runs/mine": False}
    names |= {"gpt2": False, "a/b/c": False, "/a": False, "./a": False, "../a": False, "~/a": False}
    assert {name: is_hub_name(name) for name in names} == names
    assert model_folder("checkpoint", "runs/mine") == Path("runs/mine")


def test_stored_weights_are_found_by_name(stored: Path) -> None:
    config = with_absolute_paths(training("someone/tiny"))
    assert config.initial_weights == "someone/tiny"
    weights = find_initial_weights(config, 257)
    assert weights is not None
    assert (weights.path, weights.kind) == (stored, "gpt2")
    assert set(weights.files.values()) == {stored / "model.safetensors"}


def test_what_the_hub_does_not_give_is_told(stored: Path) -> None:
    for field, command in (
        ("initial_weights", lambda name: train(training(name))),
        ("checkpoint", lambda name: evaluate(EvalConfig(checkpoint=name, data="."))),
    ):
        with pytest.raises(ConfigError, match=f"{field}=someone/else: .* hub does not give it: "):
            command("someone/else")
