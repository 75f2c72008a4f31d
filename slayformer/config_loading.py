"""From the composed Hydra configuration to typed, checked dataclasses, and back to plain data.

Unknown keys, wrong types and impossible values raise ConfigError, which names the field, the value
and what would work.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from slayformer.config import AttentionConfig, TrainConfig
from slayformer.config_checks import check_fields, validate
from slayformer.config_commands import RecallConfig
from slayformer.errors import ConfigError, nearest


def load_config(composed: DictConfig, schema: type[Any] = TrainConfig) -> Any:
    """Return `composed` as an instance of `schema`, every value checked.

    Raises ConfigError for an unknown key, a wrong type or an impossible value.
    """
    try:
        plain: Any = OmegaConf.to_container(composed, resolve=True)
    except OmegaConfBaseException as error:
        value = str(error.msg).splitlines()[0]
        raise ConfigError(str(error.full_key), "${...}", value) from error
    for key, one in dotted(plain).items():
        # written into config.yaml it would be a reference to another option
        if isinstance(one, str) and "${" in one:
            raise ConfigError(key, one, "must be text without ${")
    attention = plain.get("attention")
    if schema in (TrainConfig, RecallConfig):
        # the schema has no attention of its own: each mechanism brings its options
        plain["attention"] = None
    config = _typed(schema, plain, prefix="")
    if schema in (TrainConfig, RecallConfig):
        config.attention = load_attention_config(attention)
    validate(config)
    return config


def load_attention_config(options: Any) -> Any:
    """Return the options dataclass of the mechanism named by `options['name']`, checked."""
    from slayformer.registry import attention_entry

    if not isinstance(options, dict) or "name" not in options:
        raise ConfigError("attention", options, "needs a mechanism, for example attention=slay")
    name, mechanism = str(options["name"]), options.get("mechanism")
    entry = attention_entry(str(mechanism or name))
    # a preset's label tells whose options they are
    if mechanism and not re.fullmatch(re.escape(str(mechanism)) + r"\w*", name):
        hint = f"is a label of {mechanism}'s options; another mechanism is attention={name}"
        raise ConfigError("attention.name", name, hint)
    known = {item.name for item in fields(entry.config)}
    for key in options.keys() - known:
        hint = "unknown key; " + unknown_option_hint(str(key), options)
        raise ConfigError(f"attention.{key}", options[key], hint)
    config = _typed(entry.config, options, prefix="attention.")
    check_fields(config, prefix="attention.")
    if config.backend not in entry.attention.backends:
        hint = f"{name} can be computed by {', '.join(entry.attention.backends)}"
        raise ConfigError("attention.backend", config.backend, hint)
    config.check()
    return config


def unknown_option_hint(key: str, options: Mapping[str, Any]) -> str:
    """Return what can be set of the mechanism with `options`, which has no option `key`.

    That is also what its YAML file leaves out: the backend, where there is a choice. Its name can
    be set where it is a label. Raises ConfigError for a mechanism that does not exist.
    """
    from slayformer.registry import attention_entry

    name, mechanism = str(options["name"]), options.get("mechanism")
    entry = attention_entry(str(mechanism or name))
    hidden = {"mechanism"} if mechanism else {"mechanism", "name"}
    if len({*entry.attention.backends} - {"auto"}) == 1:
        hidden.add("backend")
    known = {item.name for item in fields(entry.config)} - hidden
    return nearest(key, known) if known else f"{name} has no options"


def refuse_without_effect(config: AttentionConfig, given: Mapping[str, Any]) -> None:
    """Raise ConfigError for an option `given` by the user that `config`'s mechanism ignores."""
    unused = config.without_effect()
    for name in given.keys() & unused.keys():
        hint = f"has no effect with {unused[name]}"
        raise ConfigError(f"attention.{name}", given[name], hint)


def fill_list(composed: DictConfig, key: str, every: Sequence[str] = ()) -> None:
    """Make a list of the single value in field `key`, or of `every` choice where it is `all`."""
    value = composed.get(key)
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        composed[key] = list(every) if every and value == "all" else [value]


def to_plain(config: Any) -> dict[str, Any]:
    """Return a configuration as plain dictionaries, such as `load_config` takes again."""
    plain = OmegaConf.to_container(OmegaConf.structured(config), resolve=True)
    assert isinstance(plain, dict)
    return plain  # type: ignore[return-value]


def dotted(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return every value of nested dictionaries by its dotted key."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= dotted(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _typed(schema: type[Any], values: dict[str, Any], prefix: str) -> Any:
    """Build dataclass `schema` from `values`; `prefix` leads the field names in errors."""
    _refuse_unknown_keys(schema, values, prefix)
    try:
        merged = OmegaConf.merge(OmegaConf.structured(schema), values)
        return OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        path = re.sub(r"\[(\w+)\]", r".\1", str(error.full_key or "?"))
        if isinstance(error, MissingMandatoryValue):
            hint = f"must be given: {prefix}{path}={_kind(schema, path)[1]}"
            raise ConfigError(prefix + path, "???", hint) from error
        value = OmegaConf.select(OmegaConf.create(values), path, throw_on_missing=False)
        hint = f"must be {_kind(schema, path)[0]}"
        if isinstance(value, float) and value.is_integer() and "whole" in hint:
            hint += f": {int(value)}"
        raise ConfigError(prefix + path, value, hint) from error


_KINDS = {
    int: ("a whole number", "NUMBER"),
    float: ("a number", "NUMBER"),
    bool: ("true or false", "true"),
    str: ("text", "TEXT"),
}


def _kind(schema: Any, path: str) -> tuple[str, str]:
    """Return in words what the field `path` of dataclass `schema` takes, and how to write it."""
    hint = schema
    for name in path.split("."):
        inside = next((t for t in (hint, *typing.get_args(hint)) if is_dataclass(t)), None)
        hint = typing.get_type_hints(inside)[name] if inside else typing.get_args(hint)[0]
    choices = [t for t in typing.get_args(hint) or (hint,) if t is not type(None)]
    or_null = " or null" if len(choices) < len(typing.get_args(hint)) else ""
    if typing.get_origin(hint) is list:
        return f"a list of {_KINDS[choices[0]][0].removeprefix('a ')}s, [A,B]", "[A,B]"
    if is_dataclass(choices[0]):
        written = "{" + ", ".join(f"{item.name}: ..." for item in fields(choices[0])) + "}"
        return f"the fields {written}{or_null}", f"'{written}'"
    words, placeholder = _KINDS.get(choices[0], (str(choices[0]), "VALUE"))
    return words + or_null, placeholder


def _refuse_unknown_keys(schema: Any, values: dict[str, Any], prefix: str) -> None:
    hints = typing.get_type_hints(schema)
    known = {item.name for item in fields(schema)}
    for key, value in values.items():
        if key not in known:
            raise ConfigError(f"{prefix}{key}", value, "unknown key; " + nearest(str(key), known))
        nested = [t for t in (hints[key], *typing.get_args(hints[key])) if is_dataclass(t)]
        if nested and isinstance(value, dict):
            _refuse_unknown_keys(nested[0], value, f"{prefix}{key}.")
