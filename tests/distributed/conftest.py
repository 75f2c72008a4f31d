"""Launches of real processes over gloo, and what they are compared with."""

from __future__ import annotations

import functools
import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from slayformer.cli import compose
from slayformer.config_loading import load_config
from slayformer.data.loader import WindowLoader
from slayformer.data.prepare import prepare
from slayformer.model.gpt2 import GPT2
from tests.distributed.cases import cases, reshaped_runs

ROOT = Path(__file__).resolve().parents[2]
LAUNCH_SECONDS = 900

TINY = [
    *("attention=slay", "tokenizer=bytes", "data=text", "data.validation_fraction=0.3"),
    *("model.layers=2", "model.heads=2", "model.width=32", "model.context_length=16"),
    *("optimizer.learning_rate=3e-3", "schedule.warmup_updates=3"),
    *("validation.tokens=160", "validation.every_updates=8", "logging.sample_tokens=4"),
]


@pytest.fixture(scope="session")
def tiny(text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the overrides of a tiny run; every launch shares one cache of tokens."""
    cache = tmp_path_factory.mktemp("cache")
    return [*TINY, f"data.source.path={text_folder}", f"data.cache_directory={cache}"]


def read_metrics(directory: Path, key: str) -> list[float]:
    """Return that number in every training record of a run."""
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [record[key] for record in records if record["kind"] == "train"]


@pytest.fixture(scope="session")
def metrics() -> Callable[[Path, str], list[float]]:
    """Return `read_metrics`."""
    return read_metrics


@pytest.fixture(scope="session")
def plain_training(tiny: list[str]) -> Callable[..., Any]:
    """Return `train(sizes, rates, clipping=1.0, z_loss=0.0, skipped=())`: PyTorch alone.

    It takes an update of each size at each learning rate, changes nothing in those `skipped`, and
    returns losses, gradient norms and weights. Only model, tokens and their order are shared with
    the code under test.
    """

    def train(
        sizes: list[int],
        rates: list[float],
        *,
        clipping: float = 1.0,
        z_loss: float = 0.0,
        skipped: Collection[int] = (),
    ) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
        config = load_config(compose("train", tiny))
        data = prepare(config.data, config.tokenizer)
        end_of_text = data.tokenizer.end_of_text
        loader = WindowLoader(data.train, context_length=16, seed=0, end_of_text=end_of_text)
        model = GPT2(config.model, config.attention, vocabulary_size=257, seed=0)
        matrices = [p for p in model.parameters() if p.ndim > 1]
        vectors = [p for p in model.parameters() if p.ndim == 1]
        optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
            betas=(0.9, 0.95),
            eps=1e-8,
            foreach=False,
        )
        losses, norms, seen = [], [], 0
        for update, (size, rate) in enumerate(zip(sizes, rates, strict=True)):
            batch = loader.batch(range(seen, seen + size))
            seen += size
            logits = model.logits(model(batch.ids_BT)[0]).flatten(0, 1)
            nats = F.cross_entropy(logits, batch.targets_BT.flatten())
            optimizer.zero_grad()
            (nats + z_loss * logits.logsumexp(-1).square().mean()).backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clipping)))
            for group in optimizer.param_groups:
                group["lr"] = rate
            if update not in skipped:
                optimizer.step()
            losses.append(nats.item())
        return losses, norms, model.state_dict()

    return train


@dataclass(frozen=True)
class Launch:
    """What a launch of `world_size` processes left in `folder`, a run a case.

    `cases` holds the overrides of each.
    """

    world_size: int
    folder: Path
    cases: dict[str, list[str]]

    def metrics(self, case: str, key: str) -> list[float]:
        """Return that number in every training record of a case."""
        return read_metrics(self.folder / case, key)

    def weights(self, case: str, update: int | None = None) -> dict[str, torch.Tensor]:
        """Return what a case saved after `update`, or last."""
        saved = self.folder / case / "checkpoints"
        name = (saved / "latest").read_text() if update is None else f"update_{update:07d}"
        return load_file(saved / name / "model.safetensors")

    def digests(self, case: str) -> list[dict[str, str]]:
        """Return the digests of the tensors that each rank had at the end of a case."""
        told = [self.folder / f"{case}-{rank}.json" for rank in range(self.world_size)]
        return [json.loads(path.read_text()) for path in told]


Launches = Callable[[int], Launch]


def start(
    run_command: Any,
    world_size: int,
    folder: Path,
    runs: dict[str, list[str]],
    worker: str = "train_worker.py",
) -> Launch:
    """Return one launch of `worker` that has trained all `runs` one after another."""
    (folder / "cases.json").write_text(json.dumps(runs))
    script = str(Path(__file__).with_name(worker))
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world_size}"]
    finished = run_command(
        [*(launcher if world_size > 1 else []), script, str(folder / "cases.json"), str(folder)],
        timeout_s=LAUNCH_SECONDS,
    )
    assert finished.code == 0, finished.stdout[-2000:] + finished.stderr[-4000:]
    return Launch(world_size, folder, runs)


@pytest.fixture(scope="session")
def start_launch(run_command: Any) -> Callable[..., Launch]:
    """Return `start_launch(world_size, folder, runs, worker="train_worker.py")`: see `start`."""
    return functools.partial(start, run_command)


@pytest.fixture(scope="session")
def launches(
    tmp_path_factory: pytest.TempPathFactory, run_command: Any, tiny: list[str]
) -> Launches:
    """Return `launched(world_size)`: all cases, trained once.

    Two processes also go on with what one has saved.
    """

    @functools.cache
    def launched(world_size: int) -> Launch:
        folder = tmp_path_factory.mktemp(f"launch{world_size}")
        runs = cases(tiny, folder, world_size)
        if world_size == 2:
            runs |= reshaped_runs(tiny, launched(1).folder)
        return start(run_command, world_size, folder, runs)

    return launched


@pytest.fixture(scope="session", params=[1, 2], ids=["1 process", "2 processes"])
def launch(request: pytest.FixtureRequest, launches: Launches) -> Launch:
    """Return the launch of one world size."""
    return launches(request.param)


@pytest.fixture(scope="session", params=[(1, 2), (2, 1)], ids=["1 to 2", "2 to 1"])
def reshaped(
    request: pytest.FixtureRequest,
    launches: Launches,
    tmp_path_factory: pytest.TempPathFactory,
    run_command: Any,
    tiny: list[str],
) -> tuple[Launch, Launch]:
    """Return a launch, and one of another world size that goes on from its checkpoints."""
    before, after = request.param
    source = launches(before)
    if after == 2:
        return source, launches(after)
    folder = tmp_path_factory.mktemp(f"reshaped{after}")
    return source, start(run_command, after, folder, reshaped_runs(tiny, source.folder))


@pytest.fixture
def free_port() -> int:
    """Return a port that nobody listens on right now."""
    return find_free_port()


def find_free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


Processes = list[subprocess.Popen[str]]
StartRanks = Callable[..., Processes]


@pytest.fixture
def start_ranks() -> Iterator[StartRanks]:
    """Return `start(arguments, world_size, file_limit_bytes=None, program=train.py)`.

    It starts processes without a launcher; one process plainly, without any variable of a launcher.
    They are killed at the end of the test if they still run.
    """
    started: Processes = []

    def start(
        arguments: list[str],
        world_size: int,
        file_limit_bytes: int | None = None,
        program: tuple[str, ...] = (str(ROOT / "train.py"),),
    ) -> Processes:
        def limit() -> None:
            if file_limit_bytes is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit_bytes, file_limit_bytes))

        port = str(find_free_port())
        for rank in range(world_size):
            variables = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }
            if world_size == 1:
                variables = {}
            environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
            started.append(
                subprocess.Popen(
                    [sys.executable, *program, *arguments],
                    env={**environment, **variables},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    preexec_fn=limit,
                )
            )
        return started[-world_size:]

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()
