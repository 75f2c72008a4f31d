"""What a process raises arrives in another as it was."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import pytest

from slayformer.errors import ConfigError, UserError


def kinds(kind: type[UserError] = UserError) -> Iterator[type[UserError]]:
    yield kind
    for below in kind.__subclasses__():
        yield from kinds(below)


@pytest.mark.parametrize("kind", kinds())
def test_errors_survive_the_way_from_a_process(kind: type[UserError]) -> None:
    arguments = ("a.b", None, "use 1") if issubclass(kind, ConfigError) else ("told",)
    error = kind(*arguments)
    arrived = pickle.loads(pickle.dumps(error))
    assert type(arrived) is kind
    assert str(arrived) == str(error)
    assert vars(arrived) == vars(error)
