"""The register of attention mechanisms: one entry a mechanism, found by name everywhere."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slayformer.errors import ConfigError, nearest

if TYPE_CHECKING:
    from slayformer.attention.base import Attention

MECHANISM_PACKAGES = ("slayformer.attention", "slayformer.baselines")


@dataclass(frozen=True)
class Entry:
    """A mechanism: its module class and the dataclass of its options."""

    attention: type[Attention]
    config: type[Any]


_ENTRIES: dict[str, Entry] = {}


def register_attention(
    name: str, config: type[Any]
) -> Callable[[type[Attention]], type[Attention]]:
    """Class decorator: register an `Attention` under `name` with its options dataclass `config`.

    Raises ValueError if the name is taken.
    """

    def register(attention: type[Attention]) -> type[Attention]:
        if name in _ENTRIES:
            raise ValueError(f"attention mechanism {name!r} is registered twice")
        _ENTRIES[name] = Entry(attention, config)
        return attention

    return register


def load_mechanisms() -> dict[str, Entry]:
    """Import every module of the mechanism packages and return all entries by name."""
    for package_name in MECHANISM_PACKAGES:
        package = importlib.import_module(package_name)
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{package_name}.{module.name}")
    return dict(sorted(_ENTRIES.items()))


def attention_entry(name: str) -> Entry:
    """Return the entry of mechanism `name`; raises ConfigError naming the nearest one."""
    entries = load_mechanisms()
    if name not in entries:
        raise ConfigError("attention", name, nearest(name, entries))
    return entries[name]


def build_attention(
    config: Any, *, num_heads: int, head_dim: int, max_sequence_length: int, seed: int
) -> Attention:
    """Build the mechanism that `config` (an instance of a registered options class) describes."""
    for entry in load_mechanisms().values():
        if type(config) is entry.config:
            return entry.attention(
                config,
                num_heads=num_heads,
                head_dim=head_dim,
                max_sequence_length=max_sequence_length,
                seed=seed,
            )
    raise TypeError(f"{type(config).__name__} is not the options class of a registered mechanism")
