"""When Triton is taken, and what is told when it is not: without a GPU, a compiler or room."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from slayformer.attention import backends
from slayformer.attention.backends import triton_engine
from slayformer.attention.linear import LinearAttention
from slayformer.errors import ConfigError
from slayformer.presets import make_attention

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter needs no GPU"
)


def make(name: str, backend: str = "auto") -> LinearAttention:
    """Return a mechanism of one head of 16 for at most 8 tokens."""
    attention = make_attention(
        name, num_heads=1, head_dim=16, max_sequence_length=8, backend=backend
    )
    assert isinstance(attention, LinearAttention)
    return attention


def draw(length: int = 5) -> Tensor:
    """Return q, k and v."""
    draws = torch.Generator().manual_seed(length)
    return torch.randn(3, 1, 1, length, 16, generator=draws)


def test_triton_is_neither_imported_nor_chosen_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # nor is torch's compiler, which looks for triton and takes more than a second
    code = "import sys, slayformer.presets as p; p.make_attention('slay', num_heads=1, head_dim=4,"
    code += " max_sequence_length=8); print(*sys.modules)"
    command = [sys.executable, "-c", code]
    loaded = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True).stdout
    modules = set(loaded.split())
    assert "slayformer.attention.backends.triton_engine" in modules
    assert not {"triton", "torch._dynamo", "slayformer.attention.backends.triton_math"} & modules
    code = "import sys, slayformer; assert not {'torch', 'triton'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
    q, k, v = draw()
    with pytest.raises(ConfigError, match=r"attention\.backend=triton: .*GPU.*not on cpu"):
        make("slay_best", "triton")(q, k, v)
    # on a GPU where it is not installed
    monkeypatch.setattr(triton_engine, "INTERPRETED", True)
    monkeypatch.setattr(triton_engine.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"attention\.backend=triton: .*triton is not installed"):
        make("slay_best", "triton")(q, k, v)


def test_auto_says_why_it_is_torch_where_triton_is_missing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    # as on a GPU: the compiled CPU walk refuses its tensors
    refuses = dataclasses.replace(backends.BACKENDS["cpu"], obstacle=lambda q, v: "no CPU")
    monkeypatch.setitem(backends.BACKENDS, "cpu", refuses)
    monkeypatch.setattr(triton_engine, "INTERPRETED", True)
    monkeypatch.setattr(triton_engine.importlib.util, "find_spec", lambda name: None)
    backends._say.cache_clear()
    q, k, v = draw()
    attention = make("linear_elu")
    attention(q, k, v)
    attention(q, k, v)
    backends._say.cache_clear()
    (line,) = capfd.readouterr().err.splitlines()
    assert "runs on torch" in line
    assert "triton: the package triton is not installed" in line


@pytest.mark.parametrize(
    ("shape", "dtype", "told"),
    [
        ((1, 1, 2, 160), torch.float32, "160"),
        ((1, 1, 2, 16), torch.float64, "float64"),
        ((257, 256, 2, 16), torch.float32, "65,792"),
    ],
)
def test_what_the_kernels_do_not_take(
    shape: tuple[int, ...], dtype: torch.dtype, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(triton_engine, "INTERPRETED", True)
    q = torch.zeros((), dtype=dtype).expand(shape)
    found = triton_engine.obstacle(q, q[..., :8])
    assert found is not None
    assert told in found
    assert triton_engine.obstacle(q[:255, ..., :16].float(), q[:255, ..., :8].float()) is None


def test_without_the_headers_of_python_triton_is_not_tried(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(triton_engine.shutil, "which", lambda name: "/usr/bin/gcc")
    monkeypatch.setattr(triton_engine.sysconfig, "get_path", lambda *scheme: str(tmp_path))
    q: Any = SimpleNamespace(
        device=torch.device("cuda"), dtype=torch.float32, shape=torch.Size([1, 2, 3, 16])
    )
    told = triton_engine.obstacle(q, q)
    assert told is not None
    assert "Python's C headers" in told
    (tmp_path / "Python.h").touch()
    assert triton_engine.obstacle(q, q) is None


def test_kernels_that_cannot_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward torch takes over with a warning; a backward pass that has begun says what to do."""
    pytest.importorskip("triton")
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    from slayformer.attention.backends import triton_start

    refuses = dataclasses.replace(backends.BACKENDS["cpu"], obstacle=lambda q, v: "no CPU")
    monkeypatch.setitem(backends.BACKENDS, "cpu", refuses)
    monkeypatch.setattr(triton_engine, "INTERPRETED", True)
    errors: list[Exception] = [
        CompilationError("x", None, "no"),
        OutOfResources(3, 2, "registers"),
        PTXASError("no"),
        subprocess.CalledProcessError(1, ["gcc"]),
    ]

    heads = draw()
    expected, _ = make("slay_best", "torch")(*heads)
    for error in errors:
        backends._warn.cache_clear()
        attention = make("slay_best")
        given = [x.clone().requires_grad_() for x in heads]
        monkeypatch.setattr(triton_start, "launch", failing(error, "pairs_backward"))
        y, _ = attention(*given)
        with pytest.raises(ConfigError, match=r"attention.backend=triton: .*backend=torch"):
            y.sum().backward()
        monkeypatch.setattr(triton_start, "launch", failing(error, "chunk_outputs"))
        with pytest.warns(UserWarning, match="runs on torch.*could not compile"):
            y, _ = attention(*given)
        assert torch.equal(y, expected)


def failing(error: Exception, name: str) -> Any:
    """Return what starts no kernel, and raises `error` for that of a name."""

    def launch(kernel: Any, *rest: Any) -> None:
        if kernel.__name__ == name:
            raise error

    return launch
