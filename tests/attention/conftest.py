"""Triton's interpreter, calmed, for the tests of attention that it runs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.attention.triton_cases import INTERPRETED

prepared: set[str] = set()


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let short sequences have many chunks, and spare the interpreter repeated preparations."""
    if not INTERPRETED:
        return
    from triton.runtime import interpreter

    from slayformer.attention.backends import triton_pass

    monkeypatch.setattr(triton_pass, "CHUNK", 48)
    monkeypatch.setattr(triton_pass, "ONE_CHUNK", 0)

    def call(function: Any, *arguments: Any, **named: Any) -> Any:
        # a kernel has prepared its language; triton's own modules need it once
        module = function.fn.__module__
        if module.startswith("triton.") and module not in prepared:
            interpreter._patch_lang(function.fn)
            prepared.add(module)
        return function.rewrite()(*arguments, **named)

    monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", call)
