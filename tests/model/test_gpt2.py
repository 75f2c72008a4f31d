"""GPT-2 against transformers' GPT-2, its cached form against its parallel form, and its sizes."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest
import torch

from slayformer.config import ModelConfig
from slayformer.huggingface.gpt2_weights import load_gpt2_weights
from slayformer.model.gpt2 import GPT2
from slayformer.presets import load_preset, preset_names

SHAPE = ModelConfig(
    layers=3, heads=4, width=48, context_length=96, mlp_ratio=4, dropout=0.0, vocabulary_multiple=64
)
# signed maps amplify rounding; tests/attention measures them with the slack they need
SIGNED = {"slay_nystrom", "slay_random_maclaurin", "slay_tensor_sketch"}
NAMES = sorted({*preset_names()} - SIGNED)

CASES = [(name, 0) for name in NAMES] + [(name, 4) for name in ("softmax", "slay", "slay_best")]


def build(
    name: str, *, vocabulary_size: int = 301, seed: int = 0, short_convolution: int = 0
) -> GPT2:
    shape = dataclasses.replace(SHAPE, short_convolution=short_convolution)
    model = GPT2(shape, load_preset(name), vocabulary_size=vocabulary_size, seed=seed).eval()
    for name, parameter in model.named_parameters():
        if "convolution" in name:
            # away from the identity it starts as
            parameter.data += torch.linspace(-0.5, 0.5, parameter.numel()).view_as(parameter)
    return model


@pytest.fixture(scope="module")
def theirs():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(3)
    config = GPT2Config(
        vocab_size=301, n_positions=96, n_embd=48, n_layer=3, n_head=4, initializer_range=0.2
    )
    return GPT2LMHeadModel(config).eval()


def test_logits_equal_those_of_transformers(theirs):
    ours = build("softmax")
    load_gpt2_weights(ours, theirs.state_dict())
    ids = torch.randint(0, 301, (2, 65), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = ours.logits(ours(ids)[0])
        reference = theirs(ids).logits
    assert logits.shape == reference.shape
    assert reference.abs().max() > 1
    assert (logits - reference).abs().max() <= 1e-4


def test_left_padded_logits_equal_those_of_transformers(theirs):
    ours = build("softmax")
    load_gpt2_weights(ours, theirs.state_dict())
    ids = torch.randint(0, 301, (3, 33), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(33) >= torch.tensor([0, 3, 7])[:, None]
    positions = (mask.long().cumsum(1) - 1).clamp_min(0)
    with torch.no_grad():
        logits = ours.logits(ours(ids, mask_BT=mask)[0])
        reference = theirs(ids, attention_mask=mask.long(), position_ids=positions).logits
    assert (logits - reference)[mask].abs().max() <= 1e-4


def test_foreign_weights_of_another_shape_are_refused(theirs):
    weights = dict(theirs.state_dict())
    weights["transformer.h.1.mlp.c_fc.weight"] = torch.zeros(3, 3)
    with pytest.raises(ValueError, match=r"h\.1\.mlp\.c_fc"):
        load_gpt2_weights(build("softmax"), weights)
    del weights["transformer.h.1.mlp.c_fc.weight"]
    with pytest.raises(ValueError, match="lack"):
        load_gpt2_weights(build("softmax"), weights)


@pytest.mark.parametrize(("name", "convolution"), CASES)
def test_cached_steps_equal_the_parallel_form(name, convolution):
    model = build(name, short_convolution=convolution)
    ids = torch.randint(0, 301, (2, 40), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        whole, _ = model(ids)
        states, parts = model.init_states(2), []
        for bounds in ((0, 17), (17, 18), (18, 19), (19, 40)):
            hidden, states = model(ids[:, slice(*bounds)], states=states)
            parts.append(hidden)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "convolution"), CASES)
def test_left_padding_equals_the_row_alone_prefill_and_steps(name, convolution):
    model = build(name, short_convolution=convolution)
    ids = torch.randint(0, 301, (3, 20), generator=torch.Generator().manual_seed(4))
    mask = torch.arange(20) >= torch.tensor([0, 3, 7])[:, None]
    with torch.no_grad():
        states = model.init_states(3)
        first, states = model(ids[:, :15], mask_BT=mask[:, :15], states=states)
        second, _ = model(ids[:, 15:], states=states)
        hidden = torch.cat([first, second], 1)
        for row, start in enumerate((0, 3, 7)):
            alone, _ = model(ids[row : row + 1, start:])
            torch.testing.assert_close(hidden[row, start:], alone[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "convolution"), CASES)
def test_padding_anywhere_equals_the_row_without_it(name, convolution):
    model = build(name, short_convolution=convolution)
    ids = torch.randint(0, 301, (4, 40), generator=torch.Generator().manual_seed(4))
    mask = torch.ones(4, 40, dtype=torch.bool)
    # runs longer than anything reaches back, single ones, at both ends and where pieces meet
    mask[1, :9] = mask[1, 14:25] = mask[1, 33:] = False
    mask[2, 1::2] = mask[2, 20:32] = mask[3, 12:20] = False
    with torch.no_grad():
        whole, _ = model(ids, mask_BT=mask)
        states, parts = model.init_states(4), []
        for start, stop in pairwise((0, 15, 16, 17, 24, 31, 40)):
            piece = slice(start, stop)
            hidden, states = model(ids[:, piece], mask_BT=mask[:, piece], states=states)
            parts.append(hidden)
        for row, real in enumerate(mask):
            alone, _ = model(ids[row : row + 1, real])
            for hidden in (whole, torch.cat(parts, 1)):
                torch.testing.assert_close(hidden[row, real], alone[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "convolution"), CASES)
def test_isolated_documents_equal_each_alone(name, convolution):
    model = build(name, short_convolution=convolution)
    ids = torch.randint(0, 301, (1, 60), generator=torch.Generator().manual_seed(5))
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor([10, 1, 49]))[None]
    positions = torch.cat([torch.arange(n) for n in (10, 1, 49)])[None]
    with torch.no_grad():
        hidden, _ = model(ids, document_ids_BT=documents, position_ids_BT=positions)
        for start, stop in ((0, 10), (10, 11), (11, 60)):
            alone, _ = model(ids[:, start:stop])
            torch.testing.assert_close(hidden[:, start:stop], alone, rtol=1e-4, atol=1e-5)


def test_weights_outside_the_mechanism_depend_on_the_seed_alone():
    torch.manual_seed(0)
    reference = build("softmax").state_dict()
    for name in NAMES:
        torch.manual_seed(17)
        weights = build(name).state_dict()
        assert all(torch.equal(weights[key], reference[key]) for key in reference)
    other = build("softmax", seed=1).state_dict()
    assert not torch.equal(other["token_embedding.weight"], reference["token_embedding.weight"])


def test_initial_spread_is_that_of_gpt2():
    weights = build("softmax", vocabulary_size=5000).state_dict()
    assert weights["token_embedding.weight"][:5000].std() == pytest.approx(0.02, rel=0.02)
    small = 0.02 / (2 * SHAPE.layers) ** 0.5
    assert weights["blocks.1.mlp_output.weight"].std() == pytest.approx(small, rel=0.05)
    assert weights["blocks.1.mlp_input.weight"].std() == pytest.approx(0.02, rel=0.05)
    assert not weights["blocks.1.mlp_input.bias"].any()


def test_layers_draw_their_own_features():
    model = build("slay")
    weights = model.state_dict()
    first, second = (weights[f"blocks.{i}.attention.exponential.omega_RHND"] for i in (0, 1))
    assert not torch.equal(first, second)


def test_vocabulary_is_padded_inside_only():
    model = build("softmax")
    assert model.padded_vocabulary_size == 320
    assert model.head_weight.shape == (320, 48)
    assert not model.head_weight[301:].any()
    hidden, _ = model(torch.zeros(1, 2, dtype=torch.long))
    assert model.logits(hidden).shape == (1, 2, 301)


def test_context_has_an_end():
    model = build("softmax")
    with pytest.raises(ValueError, match="context of 96 tokens"):
        model(torch.zeros(1, 97, dtype=torch.long))
    states = model.init_states(1)
    _, states = model(torch.zeros(1, 96, dtype=torch.long), states=states)
    with pytest.raises(ValueError, match="position 96"):
        model(torch.zeros(1, 1, dtype=torch.long), states=states)


def test_flops_by_hand():
    # 12 C² multiply-adds a layer, the head, and half the square of scores and values
    matrices = 2 * (3 * 12 * 48**2 + 301 * 48)
    attention = 3 * 4 * (96 + 1) / 2 * (2 * 12 + 2 + 2 * 12)
    assert build("softmax").flops_per_token(96) == matrices + attention


def test_short_convolution_starts_as_the_identity_and_is_a_convolution():
    from slayformer.model.short_convolution import ShortConvolution

    module = ShortConvolution(5, 4)
    x = torch.randn(2, 9, 5)
    assert torch.equal(module(x, None, None, None)[0], x)
    module.weight.data = torch.randn(4, 5)
    padded = torch.nn.functional.pad(x.mT, (3, 0))
    kernel = module.weight.flip(0).T[:, None]
    expected = torch.nn.functional.conv1d(padded, kernel, groups=5).mT
    torch.testing.assert_close(module(x, None, None, None)[0], expected)
