"""A decoded token as a CUDA graph: what can be known without a GPU, and what it gives on one."""

from __future__ import annotations

import pytest
import torch

from slayformer.attention.states import map_tensors, tensors_of
from slayformer.config import ModelConfig
from slayformer.errors import ConfigError
from slayformer.model.generation import generate
from slayformer.model.gpt2 import GPT2
from slayformer.model.token_graph import TokenGraph, check_constant
from slayformer.presets import load_preset, preset_names

QUADRATIC = ["softmax", "softmax_chunk_factor", "yat", "yat_spherical"]
LINEAR = sorted(set(preset_names()) - set(QUADRATIC))


def small(name: str, backend: str = "auto") -> GPT2:
    """Return two layers with mechanism `name` and short convolutions."""
    shape = ModelConfig(layers=2, heads=2, width=32, context_length=64, short_convolution=4)
    return GPT2(shape, load_preset(name, backend=backend), vocabulary_size=65, seed=3).eval()


@pytest.mark.parametrize("name", QUADRATIC)
@torch.no_grad()
def test_states_that_grow_are_refused(name: str) -> None:
    model = small(name)
    ids = torch.zeros(1, 1, dtype=torch.long)
    _, states = model(ids, states=model.init_states(1))
    with pytest.raises(ConfigError, match=r"cuda_graph.*linear"):
        check_constant(states, model(ids, states=states)[1])


@pytest.mark.parametrize("name", LINEAR)
@torch.no_grad()
def test_a_recorded_step_puts_the_next_states_in_place(name: str) -> None:
    """What is recorded, played as it is: tensors keep their places, and numbers are the step's."""
    model = small(name)
    graph = object.__new__(TokenGraph)
    ids = torch.randint(65, (2, 30), generator=torch.Generator().manual_seed(1))
    _, states = model(ids[:, :7], states=model.init_states(2))
    graph._states = map_tensors(states, torch.clone)
    graph._ids_B1 = torch.zeros(2, 1, dtype=torch.long)
    places = [x.data_ptr() for x in tensors_of(graph._states)]
    for t in range(7, 30):
        graph._ids_B1.copy_(ids[:, t : t + 1])
        logits = graph._record(model)
        hidden, states = model(ids[:, t : t + 1], states=states)
        assert torch.equal(logits, model.logits(hidden[:, -1]))
    assert places == [x.data_ptr() for x in tensors_of(graph._states)]
    for kept, expected in zip(tensors_of(graph._states), tensors_of(states), strict=True):
        assert torch.equal(kept, expected)


def test_a_graph_needs_a_gpu() -> None:
    model = small("slay")
    with pytest.raises(ConfigError, match=r"cuda_graph.*the model is on the cpu"):
        generate(model, [1, 2], max_new_tokens=3, cuda_graph=True)
    with pytest.raises(ConfigError, match=r"cuda_graph.*the model is on the cpu"):
        TokenGraph(model, model.init_states(1))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["torch", "auto"])
@pytest.mark.parametrize("name", LINEAR)
def test_replayed_text_equals_computed_text(name: str, backend: str) -> None:
    model = small(name, backend).cuda()
    texts = [
        list(generate(model, [5, 6, 7], max_new_tokens=50, temperature=0, cuda_graph=graph))
        for graph in (False, True, True)
    ]
    assert texts[0] == texts[1] == texts[2]
    assert len(texts[0]) == 50
