"""Models of transformers' kind against our own GPT2: logits, files, loss, padding, bad input."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch.nn import functional as F

from slayformer.config_loading import to_plain
from slayformer.errors import CheckpointError, ConfigError
from slayformer.huggingface import SlayformerConfig, SlayformerForCausalLM, SlayformerModel
from slayformer.model.gpt2 import GPT2
from slayformer.presets import load_preset, preset_names

# every mechanism, these on each check
QUICK = {"softmax", "slay", "slay_best", "slay_tensor_sketch", "cosformer"}
NAMES = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in preset_names()
]


def changed_buffers(model: Any) -> None:
    """Make everything random in `model` something that its seed does not give."""
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.mul_(1.01)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_saved_and_loaded_is_the_same_model(
    name: str, tiny: Any, ids: torch.Tensor, tmp_path: Path
) -> None:
    model = tiny(name)
    changed_buffers(model)
    config = model.config
    ours = GPT2(
        config.shape(), config.attention_options(), vocabulary_size=config.vocab_size, seed=9
    ).eval()
    ours.load_state_dict(model.model.transformer.state_dict())
    expected = ours.logits(ours(ids)[0])
    assert torch.equal(model(ids).logits, expected)

    model.save_pretrained(tmp_path)
    loaded = SlayformerForCausalLM.from_pretrained(tmp_path)
    assert not loaded.training
    assert torch.equal(loaded(ids).logits, expected)
    state, saved = model.state_dict(), loaded.state_dict()
    assert state.keys() == saved.keys()
    assert all(torch.equal(state[key], saved[key]) for key in state)
    # the head is stored once and shared again
    names = safetensors.torch.load_file(tmp_path / "model.safetensors").keys()
    assert {key for key in saved if key not in names} == {"lm_head.weight"}
    assert loaded.lm_head.weight is loaded.get_input_embeddings().weight
    base = SlayformerModel.from_pretrained(tmp_path)
    assert torch.equal(base(ids).last_hidden_state, ours(ids)[0])


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_half_precision_keeps_the_mechanism_whole(
    name: str, tiny: Any, ids: torch.Tensor, tmp_path: Path
) -> None:
    model = tiny(name)
    model.save_pretrained(tmp_path)
    half = SlayformerForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    dtypes = {key.split(".attention.")[0]: t.dtype for key, t in half.state_dict().items()}
    assert dtypes["lm_head.weight"] == torch.bfloat16
    before = model.state_dict()
    for key, tensor in half.state_dict().items():
        if ".attention." in key:
            assert torch.equal(tensor, before[key])
    logits, reference = half(ids).logits, model(ids).logits
    assert logits.dtype == torch.bfloat16
    if name not in ("slay_nystrom", "slay_random_maclaurin", "slay_tensor_sketch"):
        # signed maps have normalisers near zero, which rounding of q and k moves far
        assert (logits - reference).norm() < 0.05 * reference.norm()


def test_a_new_model_is_the_one_train_starts_with() -> None:
    config = SlayformerConfig(
        attention="slay", vocab_size=50, layers=2, heads=2, width=8, context_length=16, seed=3
    )
    model = SlayformerForCausalLM(config)
    ours = GPT2(config.shape(), config.attention_options(), vocabulary_size=50, seed=3)
    for key, tensor in ours.state_dict().items():
        assert torch.equal(model.state_dict()[f"model.transformer.{key}"], tensor)


def test_loss_is_the_mean_over_targets_or_the_sum_over_all_batches(
    tiny: Any, ids: torch.Tensor
) -> None:
    model = tiny("slay")
    labels = ids.clone()
    labels[0, :7] = -100
    logits = model(ids).logits
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    loss = model(ids, labels=labels).loss
    torch.testing.assert_close(loss, expected)
    targets = 3 * 19 - 6
    loss_of_many = model(ids, labels=labels, num_items_in_batch=torch.tensor(100)).loss
    torch.testing.assert_close(loss_of_many, expected * targets / 100)
    loss.backward()
    gradient = model.model.transformer.blocks[0].query_key_value.weight.grad
    torch.testing.assert_close(
        gradient,
        torch.autograd.grad(expected, model.model.transformer.blocks[0].query_key_value.weight)[0],
    )


@pytest.mark.parametrize("name", ["softmax", "slay", "slay_best", "performer", "cosformer"])
@torch.no_grad()
def test_left_and_right_padding_are_nothing(name: str, tiny: Any, ids: torch.Tensor) -> None:
    model = tiny(name, short_convolution=3)
    for side in (1, -1):
        mask = torch.arange(20) >= torch.tensor([0, 3, 7])[:, None]
        mask = mask if side == 1 else mask.flip(1)
        logits = model(ids, attention_mask=mask.long()).logits
        for row in range(3):
            alone = model(ids[row][mask[row]][None]).logits
            torch.testing.assert_close(logits[row][mask[row]], alone[0], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_hidden_states_and_positions_are_those_of_the_model(tiny: Any, ids: torch.Tensor) -> None:
    model = tiny("slay")
    inner = model.model.transformer
    outputs = model(ids, output_hidden_states=True)
    first, *_, last = outputs.hidden_states
    assert len(outputs.hidden_states) == 3
    embedded = inner.token_embedding(ids) + inner.position_embedding.weight[:20]
    assert torch.equal(first, embedded)
    assert torch.equal(model.lm_head(last), outputs.logits)
    assert torch.equal(model(ids, return_dict=False)[0], outputs.logits)
    assert torch.equal(model(ids, logits_to_keep=2).logits, outputs.logits[:, -2:])
    moved = model(ids, position_ids=torch.arange(5, 25)[None]).logits
    inner.position_embedding.weight[:20] = inner.position_embedding.weight[5:25].clone()
    assert torch.equal(model(ids).logits, moved)


@torch.no_grad()
def test_more_tokens_can_be_added(tiny: Any, ids: torch.Tensor, tmp_path: Path) -> None:
    model = tiny("slay")
    before = model(ids).logits
    model.resize_token_embeddings(230, mean_resizing=False)
    assert torch.equal(model(ids).logits[..., :211], before)
    assert model(torch.tensor([[229]])).logits.shape == (1, 1, 230)
    model.save_pretrained(tmp_path)
    loaded = SlayformerForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(ids).logits, model(ids).logits)


@torch.no_grad()
def test_new_tokens_are_drawn_as_gpt2_draws_them(tiny: Any) -> None:
    model = tiny("slay")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.resize_token_embeddings(600, mean_resizing=False)
    after = model.state_dict()
    new = after.pop("model.transformer.token_embedding.weight")[211:]
    # 12,448 draws: the standard deviation of theirs is a hundredth of it
    assert new.std().item() == pytest.approx(0.02, rel=0.05)
    assert abs(new.mean().item()) < 1e-3
    assert model.lm_head.weight is model.get_input_embeddings().weight
    after.pop("lm_head.weight")
    assert all(torch.equal(after[name], before[name]) for name in after)


@pytest.mark.parametrize("use_reentrant", [None, True])
@pytest.mark.parametrize("name", ["softmax", "slay", "slay_best", "performer", "cosformer"])
def test_gradients_are_the_same_with_checkpointing(
    name: str, use_reentrant: bool | None, tiny: Any, ids: torch.Tensor
) -> None:
    gradients, calls = [], []
    for every in (None, 1, 2):
        model = tiny(name, dropout=0.2, short_convolution=3).train()
        if every is not None:
            options = None if use_reentrant is None else {"use_reentrant": use_reentrant}
            model.activation_checkpointing_enable(options, every_n_layers=every)
            assert model.is_activation_checkpointing
        count = [0, 0]
        for layer, block in enumerate(model.model.transformer.blocks):
            hook = partial(_count, count, layer)
            block.attention_norm.register_forward_hook(hook)
        torch.manual_seed(3)
        mask = torch.ones_like(ids)
        mask[0, :5] = 0
        model(ids, attention_mask=mask, labels=ids).loss.backward()
        calls.append([*count])
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        model.activation_checkpointing_disable()
        assert not model.is_activation_checkpointing
        count[:] = [0, 0]
        model(ids, labels=ids).loss.backward()
        assert count == [1, 1]
    # the chosen blocks are computed a second time
    assert calls == [[1, 1], [2, 2], [2, 1]]
    for other in gradients[1:]:
        assert all(torch.equal(a, b) for a, b in zip(gradients[0], other, strict=True))


def _count(count: list[int], layer: int, *_: Any) -> None:
    count[layer] += 1


def test_damaged_files_are_refused(tiny: Any, tmp_path: Path) -> None:
    tiny("slay").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = safetensors.torch.load_file(file)
    lost = "model.transformer.blocks.1.attention.exponential.omega_RHND"
    del weights[lost]
    safetensors.torch.save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=lost):
        SlayformerForCausalLM.from_pretrained(tmp_path)


GOOD = {
    "attention": "slay",
    "vocab_size": 50,
    "layers": 1,
    "heads": 2,
    "width": 8,
    "context_length": 16,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention": "sley"}, "attention=sley: did you mean slay?"),
        ({"attention": {"name": "slay"}}, "attention.polynomial=.*must be given"),
        ({"attention": {}}, "attention={}: needs a mechanism"),
        ({"heads": 3}, "heads=3: must divide width=8"),
        ({"layers": 0}, "layers=0: must be greater than 0"),
        ({"dropout": 1.0}, "dropout=1.0: must be"),
        ({"vocab_size": 0}, "vocab_size=0: must be greater than 0"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings=false"),
    ],
)
def test_impossible_configurations_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SlayformerConfig(**{**GOOD, **change})


def test_impossible_requests_are_refused(tiny: Any, ids: torch.Tensor) -> None:
    from transformers import DynamicCache

    model = tiny("slay")
    with pytest.raises(ConfigError, match="output_attentions=true"):
        model(ids, output_attentions=True)
    with pytest.raises(ConfigError, match=r"attention_mask=\[3, 1, 20, 20\]"):
        model(ids, attention_mask=torch.ones(3, 1, 20, 20))
    with pytest.raises(ConfigError, match=r"attention_mask=\[3, 19\]"):
        model(ids, attention_mask=torch.ones(3, 19))
    with pytest.raises(ConfigError, match="cache=DynamicCache: make it with"):
        model(ids, cache=DynamicCache())
    with pytest.raises(ConfigError, match="use_cache=false"):
        model(ids, cache=DynamicCache(config=model.config), use_cache=False)
    with pytest.raises(ValueError, match="position 96 is beyond the context of 96 tokens"):
        model(torch.ones(1, 97, dtype=torch.long))
    with pytest.raises(TypeError, match="inputs_embeds"):
        model(inputs_embeds=torch.zeros(1, 2, 32))


@pytest.mark.parametrize("name", ["softmax", "slay", "slay_best", "cosformer"])
def test_packed_documents_see_nothing_of_one_another(
    name: str, tiny: Any, ids: torch.Tensor
) -> None:
    """As DataCollatorWithFlattening packs them: positions begin anew, and there is no mask."""
    model = tiny(name)
    rows = [ids[0], ids[1, :7], ids[2, :1]]
    packed = torch.cat(rows)[None]
    places = torch.cat([torch.arange(len(row)) for row in rows])[None]
    with torch.no_grad():
        together = model(packed, position_ids=places).logits[0]
        apart = torch.cat([model(row[None]).logits[0] for row in rows])
        # positions that go on by one are one document
        later = torch.arange(3, 23)[None]
        moved = model(ids[:1], position_ids=later).logits
        masked = model(ids[:1], position_ids=later, attention_mask=torch.ones(1, 20)).logits
        # a row may be longer than the context, a document may not
        longer = model(
            ids.reshape(1, -1).repeat(1, 2), position_ids=torch.arange(20).repeat(6)[None]
        )
        whole = model(ids.repeat(2, 1)).logits.reshape(1, 120, -1)
    torch.testing.assert_close(longer.logits, whole, rtol=0, atol=2e-5)
    with pytest.raises(ValueError, match="position 100 is beyond the context of 96 tokens"):
        model(ids[:1], position_ids=torch.arange(81, 101)[None])
    torch.testing.assert_close(together, apart, rtol=0, atol=2e-5)
    torch.testing.assert_close(moved, masked, rtol=0, atol=2e-5)


def test_draws_that_change_are_not_recomputed(tiny: Any) -> None:
    attention = {**to_plain(load_preset("performer_favor")), "redraw_every": 3}
    with pytest.raises(ConfigError, match="gradient_checkpointing=true: cannot follow draws"):
        tiny(attention).gradient_checkpointing_enable()
    tiny("performer_favor").gradient_checkpointing_enable()
