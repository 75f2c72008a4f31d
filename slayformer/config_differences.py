"""Which settings of configurations with dotted keys differ (`config_loading.dotted` makes them).

A key that a configuration lacks is an option that its version did not have, and says nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Any

# where a run lives, what it tells and how often, and what only decides how fast it is
INCIDENTAL = (
    *("run_directory", "resume", "dry_run", "logging.", "checkpoint.", "validation.every_updates"),
    *("data.cache_directory", "data.workers", "data.processes", "data.verify", "data.shard_tokens"),
    *("data.source.streaming", "engine.planned_", "engine.timeout_seconds"),
)
# below these any key may be set: one that is not there is not set
FREE = ("engine.deepspeed.",)
ABSENT = object()


def value_of(config: Mapping[str, Any], key: str) -> Any:
    """Return the value of `key`: None within something null, ABSENT if there is no such option."""
    if key in config:
        return config[key]
    around = list(accumulate(key.split("."), "{}.{}".format))[:-1]
    if key.startswith(FREE) or any(config.get(part, ABSENT) is None for part in around):
        return None
    return ABSENT


def differing_keys(
    configs: Iterable[Mapping[str, Any]], ignored: tuple[str, ...] = INCIDENTAL
) -> list[str]:
    """Return the keys that have different values in `configs`, without those that are `ignored`.

    `ignored` are keys and beginnings of keys.
    """
    configs = list(configs)
    found = []
    for key in dict.fromkeys(key for config in configs for key in config):
        values = [value for config in configs if (value := value_of(config, key)) is not ABSENT]
        if not key.startswith(ignored) and any(value != values[0] for value in values):
            found.append(key)
    return found
