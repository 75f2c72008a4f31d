"""The compiled CPU backend is built once, or torch takes over; other builds of it are right too."""

from __future__ import annotations

import multiprocessing
import os
import platform
import signal
import stat
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch

from slayformer.attention import backends
from slayformer.attention.backends import build, engine
from slayformer.errors import ConfigError
from tests.attention.cpu_cases import HEADS, WIDTH, draw, make

ROOT = Path(__file__).parents[2]
WALK = Path(__file__).with_name("test_cpu_backend.py")


@pytest.fixture
def fresh_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Forget the library, use an empty cache, and forget it again afterwards."""
    library = Path(engine.library()._name)
    for kept in (engine.library, build._load_once, backends._warn):
        kept.cache_clear()
    monkeypatch.setenv(build.CACHE_VARIABLE, str(tmp_path / "cache"))
    yield library
    for kept in (engine.library, build._load_once, backends._warn):
        kept.cache_clear()


def compiler(folder: Path, library: Path, sleep_s: float) -> str:
    """Return a compiler that takes `sleep_s` and copies `library`; it notes every call."""
    script = folder / "compiler"
    script.write_text(
        f"#!/bin/sh\necho called >> {folder}/calls\n"
        'while [ "$1" != -o ]; do shift; done\n'
        f'printf half > "$2"\nsleep {sleep_s}\ncp {library} "$2"\n'
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return str(script)


def test_processes_that_start_at_once_compile_once(fresh_build, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("CXX", compiler(tmp_path, fresh_build, 0.5))
    fork = multiprocessing.get_context("fork")
    workers = [fork.Process(target=build.load_library) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert (tmp_path / "calls").read_text().splitlines() == ["called"]
    assert Path(build.load_library()._name).parent == tmp_path / "cache"


def test_a_build_that_was_killed_is_done_again(fresh_build, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("CXX", compiler(tmp_path, fresh_build, 0.5))
    worker = multiprocessing.get_context("fork").Process(target=build.load_library)
    worker.start()
    while not (tmp_path / "calls").exists():
        time.sleep(0.01)
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    worker.join(30)
    assert not list((tmp_path / "cache").glob("*.so"))
    assert build.load_library().slay_bytes() > 0
    assert len((tmp_path / "calls").read_text().splitlines()) == 2


@pytest.mark.parametrize("broken", [False, True])
def test_without_a_compiler_torch_takes_over_with_one_warning(
    broken, fresh_build, monkeypatch, tmp_path
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CXX", "/bin/false" if broken else "")
    q, k, v = (x.float() for x in draw(1, HEADS, 9, WIDTH, count=3))
    attention = make("best", "auto")
    with pytest.warns(UserWarning, match="compiler|failed") as caught:
        y, _ = attention(q, k, v)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attention(q, k, v)
    assert torch.equal(y, make("best", "torch")(q, k, v)[0])
    with pytest.raises(ConfigError, match=r"attention\.backend=cpu"):
        make("best", "cpu")(q, k, v)


def run_tests(chosen: str, environment: dict[str, str]) -> None:
    """Run tests of the walk on another build of the library."""
    command = [sys.executable, "-m", "pytest", "-qx", "-m", "not slow", "-k", chosen, str(WALK)]
    run = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]


another_build = pytest.mark.skipif(
    build.FLAGS_VARIABLE in os.environ, reason="this is the run on another build"
)


@pytest.mark.slow
@another_build
@pytest.mark.skipif(platform.machine() != "x86_64", reason="these are an x86 compiler's flags")
@pytest.mark.parametrize("flags", ["-mno-avx512bf16", "-mno-avx512f", "-mno-avx"])
def test_processors_that_know_less(flags: str) -> None:
    run_tests("widths or half", {build.FLAGS_VARIABLE: flags})


@pytest.mark.slow
@another_build
def test_the_sanitizers_find_nothing() -> None:
    """The fast tests of the walk on a build with AddressSanitizer and UBSan."""
    runtime = [
        subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True).stdout
        for name in ("libasan.so", "libubsan.so", "libstdc++.so")
    ]
    flags = "-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all"
    environment = {
        build.FLAGS_VARIABLE: flags,
        "LD_PRELOAD": " ".join(path.strip() for path in runtime),
        "ASAN_OPTIONS": "detect_leaks=0",
    }
    run_tests("covered or widths or half or padding or states or strides or stretches", environment)
