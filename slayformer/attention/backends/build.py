"""Compiles the kernels of backends/kernel on first use, once for a machine.

The library has no ties to Python or torch, so its place in the cache follows from the sources, the
compiler, the flags and the processor alone.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from filelock import FileLock

SOURCES = Path(__file__).parent / "kernel"
COMMON_FLAGS = ["-O3", "-std=c++17", "-shared", "-fPIC", "-ffp-contract=fast", "-fno-math-errno"]
COMMON_FLAGS += ["-Wno-psabi"]
# the first that the compiler takes: this very processor and threads, then without either
MACHINE_FLAGS: tuple[list[str], ...] = (
    ["-march=native", "-fopenmp"],
    ["-mcpu=native", "-fopenmp"],
    ["-march=native"],
    ["-fopenmp"],
    [],
)
# more flags for the compiler, for example those of a sanitizer
FLAGS_VARIABLE = "SLAYFORMER_CXXFLAGS"
CACHE_VARIABLE = "SLAYFORMER_CACHE"


class BuildError(Exception):
    """There is no compiler, it failed, or the cache cannot be written."""


def find_compiler() -> str | None:
    """Return the path of the C++ compiler, that of $CXX first."""
    names = [os.environ.get("CXX", ""), "c++", "g++", "clang++"]
    return next((path for name in names if name and (path := shutil.which(name))), None)


def cache_directory() -> Path:
    """Return the folder of what is compiled."""
    given = os.environ.get(CACHE_VARIABLE)
    return Path(given).absolute() if given else Path.home() / ".cache" / "slayformer"


def load_library() -> ctypes.CDLL:
    """Return the compiled library, compiling it if this is its first use here.

    Raises BuildError, after the first time without trying again.
    """
    outcome = _load_once()
    if isinstance(outcome, BuildError):
        raise outcome
    return outcome


@functools.cache
def _load_once() -> ctypes.CDLL | BuildError:
    compiler = find_compiler()
    if compiler is None:
        return BuildError("no C++ compiler was found; install g++ or set CXX")
    try:
        path = cache_directory() / f"cpu-{_key(compiler)}.so"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            # the system frees the lock of a process that dies
            with FileLock(path.with_suffix(".lock")):
                if not path.exists():
                    _compile(compiler, path)
        return ctypes.CDLL(str(path))
    except BuildError as error:
        return error
    except OSError as error:
        return BuildError(f"{cache_directory()} cannot be used: {error}")


def _key(compiler: str) -> str:
    """Return what tells this library from others."""
    known = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        known.update(source.name.encode() + source.read_bytes())
    real = Path(compiler).resolve()
    state = real.stat()
    known.update(f"{real} {state.st_size} {state.st_mtime_ns} {_processor()}".encode())
    known.update(f"{COMMON_FLAGS} {MACHINE_FLAGS} {os.environ.get(FLAGS_VARIABLE)}".encode())
    return known.hexdigest()[:20]


def _processor() -> str:
    """Return the processor with the instructions it knows, as far as the system tells."""
    lines = [platform.machine(), platform.processor()]
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return " ".join(lines)
    # one core's entries are enough
    for line in text.split("\n\n")[0].splitlines():
        if line.split("\t")[0].strip() in ("model name", "flags", "Features", "CPU part"):
            lines.append(line)
    return " ".join(lines)


def _compile(compiler: str, path: Path) -> None:
    """Compile into a folder of its own and move the library to `path` when it is whole."""
    start = time.monotonic()
    print("slayformer: compiling the CPU kernels, once ...", file=sys.stderr, flush=True)
    extra = shlex.split(os.environ.get(FLAGS_VARIABLE, ""))
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="building-") as folder:
        output = Path(folder) / path.name
        for machine in MACHINE_FLAGS:
            flags = [*COMMON_FLAGS, *machine, *extra]
            command = [compiler, *flags, str(SOURCES / "walk.cpp"), "-o", str(output)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode == 0:
                os.replace(output, path)
                taken = time.monotonic() - start
                print(f"slayformer: compiled in {taken:.0f} s: {path}", file=sys.stderr, flush=True)
                return
    lines = done.stderr.strip().splitlines() or ["no message"]
    raise BuildError(f"{compiler} failed: {lines[0]}")
