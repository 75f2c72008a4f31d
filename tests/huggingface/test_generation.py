"""generate(): with a cache as without, padded as alone, and as our own generation says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from slayformer.errors import ConfigError
from slayformer.huggingface.cache import StateLayer
from slayformer.model.generation import generate
from slayformer.presets import preset_names

NAMES = ["softmax", "slay", "slay_best", "performer", "cosformer"]
CASES = [(name, 0) for name in NAMES] + [("slay_best", 4)]
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 2.0, "top_k": 20, "num_return_sequences": 2},
    "beams": {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
}


def continued(model: Any, ids: torch.Tensor, count: int, **options: Any) -> Any:
    torch.manual_seed(11)
    return model.generate(ids, max_new_tokens=count, pad_token_id=0, **options)


def states(cache: DynamicCache) -> list[StateLayer]:
    assert all(isinstance(layer, StateLayer) for layer in cache.layers)
    return cache.layers


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("name", "convolution"), CASES)
def test_cached_is_uncached(
    name: str, convolution: int, way: str, tiny: Any, ids: torch.Tensor
) -> None:
    model = tiny(name, short_convolution=convolution)
    cached = continued(model, ids, 12, **WAYS[way])
    assert torch.equal(cached, continued(model, ids, 12, use_cache=False, **WAYS[way]))
    assert len(set(cached[:, 20:].flatten().tolist())) > 5


@pytest.mark.slow
@pytest.mark.parametrize(("way", "count"), [("greedy", 200), ("sampling", 50), ("beams", 50)])
@pytest.mark.parametrize("name", preset_names())
def test_every_mechanism_cached_is_uncached(
    name: str, way: str, count: int, tiny: Any, ids: torch.Tensor
) -> None:
    model = tiny(name, context_length=256)
    cached = continued(model, ids, count, **WAYS[way])
    assert torch.equal(cached, continued(model, ids, count, use_cache=False, **WAYS[way]))


@pytest.mark.parametrize("name", NAMES)
def test_greedy_is_what_our_own_generation_gives(name: str, tiny: Any, ids: torch.Tensor) -> None:
    model = tiny(name)
    ours = generate(model.model.transformer, ids[0].tolist(), max_new_tokens=1000, temperature=0)
    # both end where the context does
    theirs = continued(model, ids[:1], 1000, do_sample=False)[0]
    assert len(theirs) == 96
    assert theirs[20:].tolist() == list(ours)


@pytest.mark.parametrize("way", ["greedy", "beams"])
@pytest.mark.parametrize(("name", "convolution"), CASES)
def test_left_padded_rows_are_each_alone(
    name: str, convolution: int, way: str, tiny: Any, ids: torch.Tensor
) -> None:
    model = tiny(name, short_convolution=convolution)
    mask = torch.arange(20) >= torch.tensor([0, 3, 7])[:, None]
    padded = torch.where(mask, ids, 0)
    together = continued(model, padded, 15, attention_mask=mask.long(), **WAYS[way])
    together = together.view(3, -1, 35)
    for row in range(3):
        alone = continued(model, ids[row][mask[row]][None], 15, **WAYS[way])
        assert torch.equal(together[row, :, 20:], alone[:, -15:])


def test_beams_and_rows_move_the_states_along(tiny: Any, ids: torch.Tensor) -> None:
    model = tiny("slay_best", short_convolution=2)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, cache=cache)
        cache.reorder_cache(torch.tensor([2, 2, 0]))
        moved = model(ids[[2, 2, 0], :1], cache=cache).logits
        expected = model(torch.cat([ids, ids[:, :1]], dim=1)).logits[[2, 2, 0], -1:]
        torch.testing.assert_close(moved, expected, rtol=1e-4, atol=1e-4)
        cache.batch_select_indices(torch.tensor([1]))
        cache.batch_repeat_interleave(2)
        again = model(ids[[2, 2], 1:2], cache=cache).logits
        expected = model(torch.cat([ids, ids[:, :2]], dim=1)).logits[[2, 2], -1:]
        torch.testing.assert_close(again, expected, rtol=1e-4, atol=1e-4)
        cache.reset()
        assert cache.get_seq_length() == 0
        fresh = model(ids, cache=cache).logits
        torch.testing.assert_close(fresh, model(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in NAMES else pytest.mark.slow) for n in preset_names()],
)
def test_states_of_linear_mechanisms_do_not_grow(name: str, tiny: Any, ids: torch.Tensor) -> None:
    model = tiny(name)
    sizes = []
    for count in (2, 50):
        made = continued(model, ids, count, do_sample=False, return_dict_in_generate=True)
        assert made.cache.get_seq_length() == 20 + count - 1
        sizes.append(sum(layer.state_bytes() for layer in states(made.cache)))
    grows = name in ("softmax", "softmax_chunk_factor", "yat", "yat_spherical")
    if grows:
        # at least the key and the value of each new token, in fp32
        assert sizes[1] - sizes[0] >= 2 * 3 * 48 * 2 * 32 * 4
    else:
        assert sizes[0] == sizes[1]
        least = 3 * sum(b.attention.state_bytes(20) for b in model.model.transformer.blocks)
        assert least <= sizes[0] < least + 3 * 2 * 4096


def test_a_text_goes_on_from_its_cache(tiny: Any, ids: torch.Tensor) -> None:
    model = tiny("slay_best")
    first = continued(model, ids[:1], 10, do_sample=False, return_dict_in_generate=True)
    longer = torch.cat([first.sequences, ids[1:2, :5]], dim=1)
    whole = continued(model, longer, 12, do_sample=False)
    assert torch.equal(continued(model, longer, 12, do_sample=False, cache=first.cache), whole)
    in_chunks = continued(model, longer, 12, do_sample=False, prefill_chunk_size=8)
    assert torch.equal(in_chunks, whole)


def test_generation_that_cannot_work_is_refused(tiny: Any, ids: torch.Tensor) -> None:
    model = tiny("slay")
    with pytest.raises(ConfigError, match=r"input_ids=96 tokens: must be shorter .* 96 tokens"):
        continued(model, ids[:1].repeat(1, 5)[:, :96], 5)
    for kind in ("static", "quantized", "offloaded"):
        with pytest.raises(ConfigError, match=f"cache_implementation={kind}"):
            continued(model, ids, 5, cache_implementation=kind)
    with pytest.raises(ValueError, match="cache that can be cropped"):
        continued(model, ids[:1], 5, assistant_model=tiny("softmax"), do_sample=False)


@pytest.mark.parametrize("name", ["softmax", "slay"])
def test_offloaded_weights_generate_the_same(
    name: str, tiny: Any, ids: torch.Tensor, tmp_path: Path
) -> None:
    from slayformer.huggingface import SlayformerForCausalLM

    model = tiny(name, short_convolution=3)
    model.save_pretrained(tmp_path / "saved")
    offloaded = SlayformerForCausalLM.from_pretrained(
        tmp_path / "saved", device_map={"": "disk"}, offload_folder=tmp_path / "offloaded"
    )
    assert offloaded.model.transformer.token_embedding.weight.device.type == "meta"
    options: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False}
    assert torch.equal(offloaded.generate(ids, **options), model.generate(ids, **options))
