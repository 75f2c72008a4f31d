"""Mechanisms by name: the same as Hydra composes, and usable in a model of one's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from slayformer.cli import CONFIGURATIONS
from slayformer.config_loading import load_attention_config
from slayformer.errors import ConfigError
from slayformer.presets import load_preset, make_attention, preset_names
from slayformer.registry import load_mechanisms

FOLDER = CONFIGURATIONS / "attention"


def test_every_option_of_train_is_there_and_the_same() -> None:
    assert preset_names() == sorted(path.stem for path in FOLDER.glob("*.yaml"))
    with initialize_config_dir(str(FOLDER), version_base="1.3"):
        for name in preset_names():
            composed = OmegaConf.to_container(compose(name))
            assert load_preset(name) == load_attention_config(composed)


def test_options_replace_those_of_the_file() -> None:
    changed = load_preset("slay_best", local_size=16, epsilon=0.5)
    assert (changed.local_size, changed.epsilon) == (16, 0.5)  # type: ignore[attr-defined]
    assert changed.polynomial == "learned_quadratic"  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["slay", "slay_best", "softmax"])
def test_made_modules_attend_and_learn(name: str) -> None:
    # δ would show where a first token's q and k happen to be near orthogonal
    options: dict[str, Any] = {} if name == "softmax" else {"delta": 1e-20}
    sizes = {"num_heads": 2, "head_dim": 8, "max_sequence_length": 20}
    module = make_attention(name, **sizes, seed=3, **options)
    assert isinstance(module, load_mechanisms()[load_preset(name).mechanism or name].attention)
    draws = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 20, 8, generator=draws).requires_grad_().unbind(0)
    y, state = module(q, k, torch.ones_like(v))
    assert state is None
    torch.testing.assert_close(y, torch.ones_like(y), rtol=0, atol=1e-5)
    (gradient,) = torch.autograd.grad(module(q, k, v)[0].square().sum(), v)
    assert gradient.abs().max() > 0.1


def test_the_seed_draws_the_features() -> None:
    sizes = {"num_heads": 2, "head_dim": 8, "max_sequence_length": 20}
    one, same, other = (
        make_attention("slay", **sizes, seed=seed).state_dict()["exponential.omega_RHND"]
        for seed in (1, 1, 2)
    )
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_what_does_not_exist_is_told() -> None:
    with pytest.raises(ConfigError, match=r"attention=sley: did you mean slay\?"):
        load_preset("sley")
    with pytest.raises(ConfigError, match=r"attention\.nods=5: unknown key; did you mean nodes\?"):
        load_preset("slay", nods=5)
    with pytest.raises(ConfigError, match=r"attention\.epsilon=0"):
        make_attention("slay", num_heads=1, head_dim=4, max_sequence_length=9, epsilon=0.0)
