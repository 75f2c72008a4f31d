"""GPT-2's weights: transformers → ours → transformers, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from slayformer.cli import compose
from slayformer.config import ModelConfig, TrainConfig
from slayformer.config_loading import load_config
from slayformer.errors import CheckpointError, ConfigError
from slayformer.evaluation.scored_model import load_scored_model
from slayformer.huggingface import (
    SlayformerConfig,
    SlayformerForCausalLM,
    load_gpt2_weights,
    to_gpt2,
)
from slayformer.huggingface.gpt2_weights import shape_of_gpt2
from slayformer.model.gpt2 import GPT2
from slayformer.presets import load_preset
from slayformer.training.initial_weights import find_initial_weights


def ours(attention: str, **changes: Any) -> GPT2:
    # the vocabulary is padded to 320 rows inside
    shape = ModelConfig(layers=3, heads=4, width=48, context_length=96, **changes)
    return GPT2(shape, load_preset(attention), vocabulary_size=301, seed=0).eval()


@pytest.fixture(scope="module")
def theirs() -> GPT2LMHeadModel:
    torch.manual_seed(3)
    sizes = {"vocab_size": 301, "n_positions": 96, "n_embd": 48, "n_layer": 3, "n_head": 4}
    ends = {"bos_token_id": 300, "eos_token_id": 300}
    return GPT2LMHeadModel(GPT2Config(**sizes, **ends, initializer_range=0.2)).eval()


@torch.no_grad()
def test_there_and_back_is_bit_equal(theirs: GPT2LMHeadModel, tmp_path: Path) -> None:
    model = ours("softmax")
    load_gpt2_weights(model, theirs.state_dict())
    back = to_gpt2(model)
    before, after = theirs.state_dict(), back.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    back.save_pretrained(tmp_path)
    loaded = GPT2LMHeadModel.from_pretrained(tmp_path)
    ids = torch.randint(0, 301, (2, 65), generator=torch.Generator().manual_seed(0))
    assert torch.equal(loaded(ids).logits, theirs(ids).logits)
    torch.testing.assert_close(loaded(ids).logits, model.logits(model(ids)[0]), rtol=0, atol=1e-5)


@torch.no_grad()
def test_gpt2_generates_the_same_among_our_models(theirs: GPT2LMHeadModel) -> None:
    config = SlayformerConfig(
        attention="softmax", vocab_size=301, layers=3, heads=4, width=48, context_length=96
    )
    model = SlayformerForCausalLM(config).eval()
    load_gpt2_weights(model.model.transformer, theirs.state_dict())
    ids = torch.randint(0, 300, (2, 9), generator=torch.Generator().manual_seed(1))
    options = {"max_new_tokens": 40, "do_sample": False, "num_beams": 2, "pad_token_id": 0}
    expected = theirs.generate(ids, **options, eos_token_id=300)
    assert torch.equal(model.generate(ids, **options, eos_token_id=300), expected)


def test_dropout_and_width_of_the_mlp_go_along() -> None:
    back = to_gpt2(ours("softmax", dropout=0.25, mlp_ratio=2))
    config = back.config
    assert (config.resid_pdrop, config.embd_pdrop, config.attn_pdrop) == (0.25, 0.25, 0.0)
    assert back.transformer.h[0].mlp.c_fc.weight.shape == (48, 96)
    assert not back.training


def test_any_mechanism_starts_from_gpt2_and_keeps_its_own_weights(theirs: GPT2LMHeadModel) -> None:
    model = ours("slay_best")
    own = {k: v.clone() for k, v in model.state_dict().items() if ".attention." in k}
    load_gpt2_weights(model, theirs.state_dict())
    weights = model.state_dict()
    expected = theirs.transformer.h[1].mlp.c_fc.weight.T
    assert torch.equal(weights["blocks.1.mlp_input.weight"], expected)
    assert all(torch.equal(weights[key], value) for key, value in own.items())


OTHER_SETTINGS = {
    "activation_function": "relu",
    "tie_word_embeddings": False,
    "scale_attn_weights": False,
    "scale_attn_by_inverse_layer_idx": True,
    "layer_norm_epsilon": 1e-6,
    "n_inner": 100,
}


@pytest.mark.parametrize("name", OTHER_SETTINGS)
def test_another_function_is_neither_scored_nor_started_from(
    name: str, theirs: GPT2LMHeadModel, tmp_path: Path
) -> None:
    config = GPT2Config(**{**theirs.config.to_dict(), name: OTHER_SETTINGS[name]})
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    told = rf"its {name} is {OTHER_SETTINGS[name]}, ours is"
    with pytest.raises(CheckpointError, match=told):
        load_scored_model(tmp_path, torch.device("cpu"))
    changes = [f"initial_weights={tmp_path}", "attention=softmax", "data.source.path=unused"]
    composed = compose("train", ["data=text", "model.layers=3", "model.width=48", *changes])
    with pytest.raises(ConfigError, match=told):
        find_initial_weights(load_config(composed, TrainConfig), 301)


def test_the_shape_is_read_from_a_configuration(theirs: GPT2LMHeadModel) -> None:
    settings = theirs.config.to_dict()
    shape = {"layers": 3, "heads": 4, "width": 48, "context_length": 96, "vocabulary_multiple": 1}
    assert shape_of_gpt2(settings) == ModelConfig(**shape)
    assert shape_of_gpt2(settings | {"n_inner": 96}) == ModelConfig(**shape, mlp_ratio=2)
    with pytest.raises(ValueError, match="its n_embd is None"):
        shape_of_gpt2(settings | {"n_embd": None})


def test_what_gpt2_is_not_is_refused() -> None:
    with pytest.raises(ConfigError, match="attention=slay: GPT-2 has attention=softmax"):
        to_gpt2(ours("slay"))
    with pytest.raises(ConfigError, match="short_convolution=3"):
        to_gpt2(ours("softmax", short_convolution=3))
