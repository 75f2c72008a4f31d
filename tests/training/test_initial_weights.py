"""Weights-only starts: from our checkpoints, our exports and GPT-2, against their writers."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from slayformer.config import TrainConfig
from slayformer.data.loader import WindowLoader
from slayformer.data.prepare import prepare
from slayformer.data.tokenizer import BytesTokenizer
from slayformer.errors import CheckpointError, ConfigError
from slayformer.evaluation.runs import read_run
from slayformer.huggingface.model_card import model_card
from slayformer.model.gpt2 import GPT2
from slayformer.training.checkpoint import find_checkpoint, load_model
from slayformer.training.initial_weights import (
    check_tokenizer,
    find_initial_weights,
    load_initial_weights,
    recorded_identity,
    write_record,
)
from slayformer.training.run import run as train
from slayformer.training.saving import Snapshot, write_checkpoint

VOCABULARY = 257


def other_weights(config: TrainConfig) -> GPT2:
    """Return a model with weights that no seed gives."""
    model = GPT2(config.model, config.attention, vocabulary_size=VOCABULARY, seed=9)
    draws = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draws), alpha=0.1)
        # rows that pad the vocabulary are no tokens
        model.token_embedding.weight[VOCABULARY:] = 0
    return model.eval()


def save(run: Path, config: TrainConfig, model: GPT2) -> Path:
    tokenizer = BytesTokenizer()
    state = {"update": 4, "samples": 32, "tokenizer": tokenizer.identity}
    return write_checkpoint(run, Snapshot(state, model.state_dict(), {}, []), config, tokenizer)


def start(config: TrainConfig, path: Path) -> tuple[GPT2, list[str]]:
    """Return the model a run of `config` starts with, and what is told of it."""
    weights = find_initial_weights(replace(config, initial_weights=str(path)), VOCABULARY)
    assert weights is not None
    assert check_tokenizer(weights, BytesTokenizer()) is None
    model = GPT2(config.model, config.attention, vocabulary_size=VOCABULARY, seed=config.seed)
    return model, load_initial_weights(weights, model)


def test_a_checkpoint_of_the_same_mechanism_gives_every_tensor(
    train_config: Any, tmp_path: Path
) -> None:
    config = train_config("attention=slay_best")
    source = other_weights(config)
    folder = save(tmp_path / "run", config, source)
    # rows that only pad the vocabulary may be others
    wider = train_config("attention=slay_best", "model.vocabulary_multiple=1", "seed=3")
    for path in (folder, tmp_path / "run", folder.parent / "latest"):
        model, told = start(wider, path)
        assert len(told) == 1
        assert "checkpoint" in told[0]
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, source.state_dict()[name][: len(tensor)]), name


def test_another_mechanism_keeps_its_own_tensors(train_config: Any, tmp_path: Path) -> None:
    softmax = train_config("attention=softmax")
    source = other_weights(softmax)
    folder = save(tmp_path / "run", softmax, source)
    config = train_config("attention=slay_best", "model.short_convolution=4")
    drawn = GPT2(config.model, config.attention, vocabulary_size=VOCABULARY, seed=0).state_dict()
    model, told = start(config, folder)
    own = [name for name in drawn if ".attention." in name or ".convolution." in name]
    numbers = sum(drawn[name].numel() for name in own)
    assert len(own) > 4
    assert f"{len(own)} tensors ({numbers:,} numbers) of attention and convolution" in told[1]
    expected = source.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, drawn[name] if name in own else expected[name]), name


@pytest.fixture
def gpt2_folder(train_config: Any, tmp_path: Path) -> Callable[..., tuple[Path, Any]]:
    """Return `make(**settings) -> (folder, model)`: a GPT-2 of transformers in pieces."""
    from transformers import GPT2Config, GPT2LMHeadModel

    def make(**settings: Any) -> tuple[Path, Any]:
        shape = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 16}
        sizes = {"vocab_size": VOCABULARY, **shape, "initializer_range": 0.3, **settings}
        theirs = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).eval()
        folder = tmp_path / "gpt2"
        theirs.save_pretrained(folder, max_shard_size="50KB")
        return folder, theirs

    return make


def test_gpt2_gives_its_logits(train_config: Any, gpt2_folder: Any, tmp_path: Path) -> None:
    folder, theirs = gpt2_folder()
    assert (folder / "model.safetensors.index.json").is_file()
    config = replace(train_config("attention=softmax"), initial_weights=str(folder))
    weights = find_initial_weights(config, VOCABULARY)
    assert weights is not None
    # a folder without a tokenizer cannot tell
    assert "only their number" in (check_tokenizer(weights, BytesTokenizer()) or "")
    model = GPT2(config.model, config.attention, vocabulary_size=VOCABULARY, seed=0).eval()
    load_initial_weights(weights, model)
    ids = torch.randint(VOCABULARY, (2, 16))
    with torch.no_grad():
        logits = model.logits(model(ids)[0])
        torch.testing.assert_close(logits, theirs(ids).logits, rtol=0, atol=1e-4)
    # as on the hub: one file, half precision, no stem, buffers of the causal mask
    plain = {n.removeprefix("transformer."): t.half() for n, t in theirs.state_dict().items()}
    plain = {n: t.contiguous() for n, t in plain.items() if n != "lm_head.weight"}
    plain["h.0.attn.bias"] = torch.ones(1, 1, 16, 16)
    hub = tmp_path / "hub"
    hub.mkdir()
    shutil.copy(folder / "config.json", hub)
    save_file(plain, hub / "model.safetensors")
    weights = find_initial_weights(replace(config, initial_weights=str(hub)), VOCABULARY)
    assert weights is not None
    load_initial_weights(weights, model)
    with torch.no_grad():
        logits = model.logits(model(ids)[0])
    assert (logits - theirs(ids).logits).abs().max() < 0.05


def test_an_export_gives_back_its_checkpoint(train_config: Any, tmp_path: Path) -> None:
    from slayformer.huggingface.export import to_transformers
    from slayformer.huggingface.tokenizer import fast_tokenizer

    config = train_config("attention=slay")
    folder = save(tmp_path / "run", config, other_weights(config))
    loaded = load_model(folder)
    exported = tmp_path / "exported"
    to_transformers(loaded).save_pretrained(exported)
    fast_tokenizer(loaded.tokenizer, context_length=16).save_pretrained(exported)
    model, told = start(config, exported)
    assert "slayformer" in told[0]
    for name, tensor in model.state_dict().items():
        expected = loaded.model.state_dict()[name]
        # rows of no token are not exported
        assert torch.equal(tensor[:VOCABULARY], expected[:VOCABULARY]), name
    written = json.loads((exported / "tokenizer.json").read_text())
    tokens = written["model"]["vocab"]
    tokens["a"], tokens["b"] = tokens["b"], tokens["a"]
    (exported / "tokenizer.json").write_text(json.dumps(written))
    with pytest.raises(ConfigError, match="its tokens are not those of the bytes tokenizer"):
        start(config, exported)


@pytest.mark.parametrize(
    ("override", "field"),
    [
        ("model.layers=3", r"model\.layers=3: .* have 2: set model\.layers=2"),
        ("model.heads=4", r"model\.heads=4: .* have 2"),
        ("model.width=64", r"model\.width=64: .* have 32"),
        ("model.context_length=32", r"model\.context_length=32: .* have 16"),
        ("model.mlp_ratio=2", r"model\.mlp_ratio=2: .* have 4"),
        ("tokenizer=gpt2", r"tokenizer=gpt2: has 50,257 tokens; .* for 257"),
    ],
)
def test_another_shape_names_the_field(
    train_config: Any, gpt2_folder: Any, tmp_path: Path, override: str, field: str
) -> None:
    config = train_config("attention=softmax")
    checkpoint = save(tmp_path / "run", config, other_weights(config))
    vocabulary = 50257 if "tokenizer" in override else VOCABULARY
    for path in (checkpoint, gpt2_folder()[0]):
        other = replace(train_config(override), initial_weights=str(path))
        with pytest.raises(ConfigError, match=field):
            find_initial_weights(other, vocabulary)


def test_a_convolution_there_is_not_dropped(train_config: Any, tmp_path: Path) -> None:
    config = train_config("model.short_convolution=4")
    folder = save(tmp_path / "run", config, other_weights(config))
    with pytest.raises(ConfigError, match=r"set model\.short_convolution=4"):
        start(train_config(), folder)


def test_what_is_damaged_or_no_weights_is_refused(
    train_config: Any, gpt2_folder: Any, tmp_path: Path
) -> None:
    config = train_config("attention=softmax")

    def refused(path: Path) -> str:
        with pytest.raises(ConfigError) as caught:
            start(config, path)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "no checkpoint at" in refused(tmp_path / "nowhere")
    assert "its activation_function is relu" in refused(gpt2_folder(activation_function="relu")[0])
    folder, _ = gpt2_folder()
    index = folder / "model.safetensors.index.json"
    pieces = json.loads(index.read_text())
    first = folder / pieces["weight_map"]["transformer.wpe.weight"]
    whole = first.read_bytes()
    # a header that promises 2 EiB, one that promises more than the file has, half a file
    for content in (
        (2**61).to_bytes(8, "little") + whole[8:],
        (len(whole) * 2).to_bytes(8, "little") + whole[8:],
        whole[: len(whole) // 2],
    ):
        first.write_bytes(content)
        assert "is damaged" in refused(folder)
    # a shape the configuration does not admit to
    tensors = load_file(folder / first.name) if first.write_bytes(whole) else {}
    tensors["transformer.wpe.weight"] = torch.zeros(4096, 32)
    save_file(tensors, first)
    assert "transformer.wpe.weight is (4096, 32), not (16, 32)" in refused(folder)
    del tensors["transformer.wpe.weight"]
    save_file(tensors, first)
    assert "it lacks transformer.wpe.weight" in refused(folder)
    pieces["weight_map"]["transformer.wpe.weight"] = "../secret.safetensors"
    index.write_text(json.dumps(pieces))
    assert "does not list files of its folder" in refused(folder)
    index.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")
    assert "no model.safetensors" in refused(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    assert "model_type is llama" in refused(folder)
    checkpoint = save(tmp_path / "run", config, other_weights(config))
    with (checkpoint / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"?")
    with pytest.raises(CheckpointError, match=r"sha256 of model\.safetensors differs"):
        start(config, checkpoint)


def test_it_contradicts_a_checkpoint_to_resume(train_config: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"initial_weights=.*leave one of them out"):
        train(train_config(f"initial_weights={tmp_path}", f"resume={tmp_path}/x"))


def test_one_model_in_two_places_is_one_beginning(train_config: Any, tmp_path: Path) -> None:
    config = train_config("attention=softmax")
    model = other_weights(config)
    identities = []
    for name in ("here", "there", "other"):
        if name == "other":
            model.final_norm.bias.data += 1
        source, run = save(tmp_path / name, config, model), tmp_path / f"{name}-run"
        weights = find_initial_weights(replace(config, initial_weights=str(source)), VOCABULARY)
        assert weights is not None
        run.mkdir()
        assert recorded_identity(run) is None
        write_record(run, weights)
        identities.append(recorded_identity(run))
    here, there, other = identities
    digest = hashlib.sha256((source / "model.safetensors").read_bytes()).hexdigest()
    assert other == f"sha256 {digest[:12]}"
    assert here == there != other


@pytest.mark.slow
def test_a_run_starts_from_them_and_goes_on_without_the_path(
    run_command: Any, train_config: Any, tmp_path: Path
) -> None:
    config = train_config("attention=softmax")
    source = other_weights(config)
    folder = save(tmp_path / "source", config, source)
    run, data = tmp_path / "run", config.data
    overrides = [
        *("attention=linear_elu", "tokenizer=bytes", "data=text", "data.validation_fraction=0.3"),
        *(f"data.source.path={data.source.path}", f"data.cache_directory={data.cache_directory}"),
        *("model.layers=2", "model.heads=2", "model.width=32", "model.context_length=16"),
        *("batch.samples_per_update=8", "budget=updates", "schedule.warmup_updates=1"),
        *("validation.tokens=160", "budget.updates=2", f"run_directory={run}"),
    ]
    given = f"initial_weights={folder}"
    finished = run_command(["train.py", *overrides, given])
    assert finished.code == 0, finished.stderr
    assert f"initial weights: 28 tensors of {folder} (checkpoint)" in finished.stdout
    record = json.loads((run / "initial_weights.json").read_text())
    assert record["path"] == str(folder)

    # the first loss is that of those weights
    elu = train_config("attention=linear_elu")
    model = GPT2(elu.model, elu.attention, vocabulary_size=VOCABULARY, seed=0)
    model.load_state_dict(source.state_dict(), strict=False)
    prepared = prepare(data, config.tokenizer)
    loader = WindowLoader(prepared.train, context_length=16, seed=0, end_of_text=256)
    batch = loader.batch(range(8))
    with torch.no_grad():
        logits = model.logits(model(batch.ids_BT)[0]).flatten(0, 1)
        expected = F.cross_entropy(logits, batch.targets_BT.flatten()).item()
    records = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    assert np.isclose(records[0]["loss"], expected, rtol=0, atol=1e-5)

    shutil.rmtree(folder.parent)
    finished = run_command(["train.py", *overrides, "budget.updates=3", "resume=auto"])
    assert finished.code == 0, finished.stderr
    assert f"initial_weights: {folder}" in (run / "config.yaml").read_text()
    branch = tmp_path / "branch"
    branching = [*overrides, f"resume={run}", "budget.updates=4", f"run_directory={branch}"]
    finished = run_command(["train.py", *branching])
    assert finished.code == 0, finished.stderr
    identities = {read_run(one).config["initial_weights"] for one in (run, branch)}
    assert identities == {recorded_identity(run)} != {None}
    card = model_card(
        "mine", find_checkpoint(branch), load_model(branch), model_format="slayformer"
    )
    assert "trained further with SLAYformer" in card
    assert f"| started from | `source` ({recorded_identity(run)}) |" in card
    assert str(tmp_path) not in card
    # what the branch saved can be used, and goes on; killed before it saved it begins there again
    assert load_model(branch).state["update"] == 4
    first = [json.loads(line) for line in (branch / "metrics.jsonl").open()]
    shutil.rmtree(branch / "checkpoints")
    going_on = [*overrides, f"run_directory={branch}", "resume=auto"]
    for updates in (4, 5):
        finished = run_command(["train.py", *going_on, f"budget.updates={updates}"])
        assert finished.code == 0, finished.stderr
    assert "going on after update 4" in finished.stdout
    again = [json.loads(line) for line in (branch / "metrics.jsonl").open()]
    losses = [
        {r["update"]: r["loss"] for r in records if r["kind"] == "train"}
        for records in (first, again)
    ]
    assert [*losses[1]] == [1, 2, 3, 4, 5]
    assert {update: losses[1][update] for update in losses[0]} == losses[0]
    finished = run_command(["train.py", *overrides, "resume=auto", f"initial_weights={tmp_path}"])
    assert finished.code == 2
    assert "started from initial_weights=" in finished.stderr
    # killed before its first checkpoint, it has not forgotten: what it needs is gone
    shutil.rmtree(run / "checkpoints")
    finished = run_command(["train.py", *overrides, "resume=auto"])
    assert finished.code == 2
    assert f"error: initial_weights={folder}: no checkpoint at" in finished.stderr
