"""What every test shares: a calm environment, a folder of text, and a way to run our commands."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

ROOT = Path(__file__).resolve().parent.parent

# before anything imports torch: a few threads, no network, no reports, and an extension folder of
# this test run alone (a killed build leaves a lock behind that the next run would wait for)
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    HF_HUB_DISABLE_PROGRESS_BARS="1",
    TOKENIZERS_PARALLELISM="false",
    WANDB_MODE="disabled",
    MPLBACKEND="Agg",
)
for _name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "HYDRA_FULL_ERROR"):
    os.environ.pop(_name, None)
_extensions = tempfile.TemporaryDirectory(prefix="torch_extensions_")
os.environ["TORCH_EXTENSIONS_DIR"] = _extensions.name


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where torch sees none; keep together what must share a worker."""
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.xdist_group("gpu"))
            elif item.path.parent.name == "distributed":
                # they share launches, which take a minute
                context = item.path.name.startswith("test_context")
                item.add_marker(pytest.mark.xdist_group("context" if context else "launch"))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


_SUBJECTS = ["the river", "a farmer", "our congress", "an old teacher", "every citizen"]
_VERBS = ["carried", "remembered", "repaired", "looked for", "could not find", "wrote about"]
_OBJECTS = ["the bridge", "two letters", "a quiet harbour", "its own history", "the harvest"]
_ENDINGS = ["before the winter", "with great care", "in 1897", "for the first time", "alone"]


def english_text(seed: int, length_bytes: int) -> str:
    """Return English-like prose (ASCII) of exactly `length_bytes` bytes, the same for a seed."""
    draw = random.Random(seed)
    parts: list[str] = []
    while sum(map(len, parts)) < length_bytes:
        sentence = " ".join(draw.choice(w) for w in (_SUBJECTS, _VERBS, _OBJECTS, _ENDINGS))
        parts.append(sentence.capitalize() + draw.choice([". ", ". ", "! ", ".\n", ".\n\n"]))
    return "".join(parts)[:length_bytes]


@pytest.fixture(autouse=True)
def _same_draws_every_time() -> None:
    """Seed torch, so that a test that draws without a generator draws the same in every run."""
    import torch

    torch.manual_seed(0)


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of ten English-like .txt documents, 2,000 to 6,500 bytes, 42,500 in all.

    Shared by the whole session: copy it before changing a file.
    """
    folder = tmp_path_factory.mktemp("documents")
    for number in range(10):
        text = english_text(seed=number, length_bytes=2000 + 500 * number)
        (folder / f"document_{number:02d}.txt").write_text(text, encoding="utf-8")
    return folder


class Gate:
    """Where a run waits on its way until `open`, so that no run is faster than the test.

    The file of its samples, written after each validation, is a pipe that nobody reads yet.
    """

    def __init__(self, run_directory: Path) -> None:
        self._pipe = run_directory / "samples.txt"
        self._reader: int | None = None
        run_directory.mkdir(parents=True, exist_ok=True)
        os.mkfifo(self._pipe)

    def open(self) -> None:
        """Let the run go on, this time and every other; what waited is read by nobody."""
        if self._reader is None:
            self._reader = os.open(self._pipe, os.O_RDONLY | os.O_NONBLOCK)
            self._pipe.unlink()

    def close(self) -> None:
        """Leave nobody waiting."""
        self.open()
        if self._reader is not None:
            os.close(self._reader)


@pytest.fixture
def make_gate() -> Iterator[Callable[[Path], Gate]]:
    """Return `make_gate(run_directory)`: see Gate. All are open after the test."""
    gates: list[Gate] = []

    def make(run_directory: Path) -> Gate:
        gates.append(Gate(run_directory))
        return gates[-1]

    yield make
    for gate in gates:
        gate.close()


@dataclass(frozen=True)
class Finished:
    """How a command ended: its exit code and what it printed."""

    code: int
    stdout: str
    stderr: str


RunCommand = Callable[..., Finished]


@pytest.fixture(scope="session")
def run_command(tmp_path_factory: pytest.TempPathFactory) -> RunCommand:
    """Return `run(arguments, cwd=None, env=None, timeout_s=300) -> Finished`.

    `run(["train.py", "seed=1"])` starts this project's train.py under the tests' Python; a first
    word that is neither a script nor an option is a program of its environment (`deepspeed`).
    The working directory is a new empty folder unless `cwd` is given, the device is the CPU unless
    `env` sets CUDA_VISIBLE_DEVICES. One that runs over its time is ended with its children and
    raises TimeoutError.
    """

    def run(
        arguments: Sequence[str],
        cwd: Path | None = None,
        env: dict[str, str] | None = None,
        timeout_s: float = 300,
    ) -> Finished:
        programs = str(Path(sys.executable).parent)
        environment = {
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "",
            "PATH": programs + os.pathsep + os.environ.get("PATH", ""),
            "PYTHONPATH": str(ROOT),
            **(env or {}),
        }
        command = [str(ROOT / a) if a.endswith(".py") else a for a in arguments]
        if command[0].endswith(".py") or command[0].startswith("-"):
            command.insert(0, sys.executable)
        process = subprocess.Popen(
            command,
            cwd=cwd or tmp_path_factory.mktemp("command"),
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            stdout, stderr = process.communicate(timeout=timeout_s)
        except BaseException as error:
            # launchers give each process that they start a session of its own
            for child in [*psutil.Process(process.pid).children(recursive=True), process]:
                with suppress(psutil.NoSuchProcess):
                    child.kill()
            stdout, stderr = process.communicate()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            told = f"{' '.join(command)} ran over {timeout_s} s\n{stdout}\n{stderr}"
            raise TimeoutError(told) from None
        return Finished(process.returncode, stdout, stderr)

    return run
