"""Errors a user can mend. The command line prints them as one line and exits with code 2."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from typing import Any


class UserError(Exception):
    """A mistake in what the user asked for or gave; the message alone tells how to mend it."""


class ConfigError(UserError):
    """A configuration field holds a value that cannot work.

    `field` is the dotted path a user would type, `value` what it holds, `hint` what would work.
    """

    def __init__(self, field: str, value: object, hint: str) -> None:
        super().__init__(f"{field}={as_written(value)}: {hint}")
        self.field, self.value, self.hint = field, value, hint

    def __reduce__(self) -> tuple[Any, ...]:
        # a process hands it on: without this it would be made anew of the message alone
        return type(self), (self.field, self.value, self.hint)


def as_written(value: object) -> str:
    """Return `value` as a user writes it: null, true and false."""
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


class DataError(UserError):
    """Text or token shards are missing, damaged, too short, or made for something else."""


class CheckpointError(UserError):
    """A checkpoint is missing, incomplete, damaged, or belongs to another set-up."""


def nearest(name: str, choices: Iterable[str]) -> str:
    """Return a hint that lists `choices`, led by the one closest to `name` if one is close.

    Initials are close: `lr` is `learning_rate`.
    """
    choices = sorted(choices)
    close = [choice for choice in choices if "".join(w[:1] for w in choice.split("_")) == name]
    close = close or difflib.get_close_matches(name, choices, n=1)
    listed = "choose from " + ", ".join(choices)
    return f"did you mean {close[0]}? ({listed})" if close else listed
