"""Mechanisms by name for a model of one's own: `make_attention("slay", num_heads=8, head_dim=64)`.

The names and their options are those of configs/attention, which is part of the package as
`attention_options`.
"""

from __future__ import annotations

from importlib import resources
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from slayformer.config import AttentionConfig
from slayformer.config_loading import load_attention_config, refuse_without_effect
from slayformer.errors import ConfigError, nearest
from slayformer.registry import build_attention

if TYPE_CHECKING:
    from slayformer.attention.base import Attention


def preset_names() -> list[str]:
    """Return the name of every mechanism that `make_attention` makes."""
    names = (file.name for file in (resources.files(__package__) / "attention_options").iterdir())
    return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))


def load_preset(name: str, **options: Any) -> AttentionConfig:
    """Return the options of mechanism `name`, with `options` in place of its own.

    Raises ConfigError for a name or an option that does not exist, or a value that cannot work.
    """
    if name not in preset_names():
        raise ConfigError("attention", name, nearest(name, preset_names()))
    config = load_attention_config(_read(name) | options)
    refuse_without_effect(config, options)
    return config


def make_attention(
    name: str,
    *,
    num_heads: int,
    head_dim: int,
    max_sequence_length: int,
    seed: int = 0,
    **options: Any,
) -> Attention:
    """Return mechanism `name` as a module that takes q, k, v [B, H, T, D] (`Attention.forward`).

    `seed` is the layer's own: give each layer another, or all draw the same features. `options`
    replace those of the name's file. Raises ConfigError as `load_preset` does.
    """
    return build_attention(
        load_preset(name, **options),
        num_heads=num_heads,
        head_dim=head_dim,
        max_sequence_length=max_sequence_length,
        seed=seed,
    )


def _read(name: str) -> dict[str, Any]:
    """Return the options in `name`.yaml upon those it is based on, in the order of `defaults`."""
    file = resources.files(__package__) / "attention_options" / f"{name}.yaml"
    own: Any = OmegaConf.to_container(OmegaConf.create(file.read_text(encoding="utf-8")))
    merged: dict[str, Any] = {}
    for base in own.pop("defaults", ["_self_"]):
        merged |= own if base == "_self_" else _read(base)
    return merged
