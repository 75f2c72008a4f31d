"""Our mechanisms in other models: softmax changes nothing, and each is what a naive swap gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from slayformer.errors import ConfigError
from slayformer.huggingface import load_gpt2_weights, swap_attention

SIZES = {"vocab_size": 101, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


def gpt2(**changes: Any) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    shape = {"n_positions": 64, "n_embd": 48, "n_layer": 2, "n_head": 4, "initializer_range": 0.3}
    return GPT2LMHeadModel(GPT2Config(**SIZES, **{**shape, **changes})).eval()


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"max_position_embeddings": 64, "hidden_size": 48, "intermediate_size": 96}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**SIZES, **shape, **heads)).eval()


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(1, 101, (2, 20), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("make", [gpt2, llama])
@pytest.mark.parametrize("name", ["softmax", "performer"])
@torch.no_grad()
def test_softmax_changes_nothing_and_padding_is_nothing(name: str, make: Any, ids: Tensor) -> None:
    model = make()
    before = model(ids).logits
    swap_attention(model, name)
    after = model(ids).logits
    assert (name == "softmax") == bool((after - before).abs().max() < 1e-5)
    mask = torch.arange(20) >= torch.tensor([0, 6])[:, None]
    positions = (mask.long().cumsum(1) - 1).clamp_min(0)
    padded = model(ids, attention_mask=mask.long(), position_ids=positions).logits
    torch.testing.assert_close(padded[0], after[0], rtol=1e-4, atol=1e-4)
    alone = model(ids[1:, 6:]).logits
    torch.testing.assert_close(padded[1, 6:], alone[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["slay", "slay_best", "cosformer"])
@torch.no_grad()
def test_swapped_gpt2_is_ours_with_its_weights(name: str, ids: Tensor, tiny: Any) -> None:
    theirs = gpt2()
    swap_attention(theirs, name)
    ours = tiny(name, vocab_size=101, context_length=64, width=48, heads=4)
    load_gpt2_weights(ours.model.transformer, theirs.state_dict())
    for layer, block in enumerate(theirs.transformer.h):
        ours.model.transformer.blocks[layer].attention.load_state_dict(
            block.attn.mechanism.state_dict()
        )
    torch.testing.assert_close(theirs(ids).logits, ours(ids).logits, rtol=1e-4, atol=1e-4)
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    cached = theirs.generate(ids, **options)
    assert torch.equal(cached, theirs.generate(ids, use_cache=False, **options))
    assert torch.equal(cached, ours.generate(ids, pad_token_id=0, **options))


def test_a_swapped_model_learns_with_its_mechanism(ids: Tensor) -> None:
    model = gpt2().train()
    swap_attention(model, "slay_best", local_size=4)
    first, second = (block.attn.mechanism for block in model.transformer.h)
    drawn = (max(one.parameters(), key=torch.Tensor.numel) for one in (first, second))
    assert not torch.equal(*drawn)
    model(ids, labels=ids).loss.backward()
    assert all(p.grad is not None for p in first.parameters())
    assert {f"transformer.h.0.attn.mechanism.{n}" for n in first.state_dict()} <= set(
        model.state_dict()
    )


def test_attention_dropout_drops_the_output(ids: Tensor) -> None:
    model = gpt2(attn_pdrop=0.5, resid_pdrop=0.0, embd_pdrop=0.0)
    swap_attention(model, "slay")
    assert torch.equal(model(ids).logits, model(ids).logits)
    model.train()
    assert not torch.equal(model(ids).logits, model(ids).logits)


def test_what_cannot_be_swapped_is_refused(ids: Tensor) -> None:
    model = gpt2()
    with pytest.raises(ConfigError, match=r"did you mean slay\?"):
        swap_attention(model, "sley")
    bert = BertModel(BertConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1))
    with pytest.raises(ConfigError, match="model=BertModel"):
        swap_attention(bert, "slay")
    swap_attention(model, "slay")
    packed = torch.cat([torch.arange(12), torch.arange(8)])[None]
    with pytest.raises(ConfigError, match="packed"):
        model(ids[:1], position_ids=packed, use_cache=False)
    with pytest.raises(ConfigError, match="only caches that grow"):
        model.generate(ids, max_new_tokens=3, cache_implementation="static")
