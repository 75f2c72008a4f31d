"""Times whole updates of a GPT-2: data, forward and backward, optimizer, mechanisms in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slayformer.benchmark.attention import Progress, silent
from slayformer.benchmark.clock import Clock
from slayformer.benchmark.machine import describe
from slayformer.benchmark.update_options import BenchTrainConfig
from slayformer.benchmark.update_plan import PLAIN, REFERENCE, check, plan
from slayformer.benchmark.update_results import UpdateCell, UpdateResult
from slayformer.config import TrainConfig
from slayformer.data.loader import Batch, WindowLoader
from slayformer.data.shards import TokenStream, token_dtype
from slayformer.data.tokenizer import vocabulary_size
from slayformer.model.gpt2 import GPT2
from slayformer.training import distributed
from slayformer.training.devices import check_precision, found_device
from slayformer.training.engine import TrainingEngine, compile_blocks
from slayformer.training.meters import UPDATE_PARTS, Meter, model_flops_utilisation
from slayformer.training.objective import LanguageModelObjective
from slayformer.training.optimizer import build_optimizer
from slayformer.training.plan_table import own_parameters

GPU_BUDGET_S = 480.0


class PlainLoop:
    """An update in plain PyTorch: the same model, objective, clipping and optimizer, no more."""

    def __init__(self, objective: LanguageModelObjective, config: TrainConfig) -> None:
        self.device = distributed.device()
        check_precision(config.engine.precision, self.device)
        objective.model.recompute(config.engine.activation_checkpointing)
        self.objective = objective.to(self.device)
        if config.engine.compile:
            compile_blocks(objective.model, self.device)
        self._optimizer = build_optimizer(objective, config.optimizer, self.device)
        self._clipping = config.optimizer.gradient_clipping or float("inf")

    def forward(self, batch: Batch) -> Tensor:
        """Return the loss of every target in nats."""
        parts = (batch.ids_BT, batch.targets_BT, batch.document_ids_BT, batch.position_ids_BT)
        return self.objective(*(part if part is None else part.to(self.device) for part in parts))

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradients of `loss`; nothing depends on which is `last`."""
        loss.backward()

    def step(self, learning_rate: float) -> float:
        """Update the weights and return the norm of the gradients before clipping."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate * group["learning_rate_scale"]
        parameters = list(self.objective.parameters())
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, self._clipping))
        self._optimizer.step()
        self._optimizer.zero_grad()
        return norm

    def close(self) -> None:
        """Nothing is held beyond the objects themselves."""


@dataclass
class _Running:
    """A loop under way, with the updates it has done."""

    loop: PlainLoop | TrainingEngine
    config: TrainConfig
    loader: WindowLoader
    meter: Meter
    flops_per_token: int
    updates: int
    told: list[dict[str, float]]

    def update(self) -> None:
        """Do one update and keep what it took."""
        samples = self.config.batch.micro_samples
        first = self.updates * samples
        self.updates += 1
        with self.meter.part("data"):
            batch = self.loader.batch(range(first, first + samples))
        targets = batch.targets_BT.numel()
        with self.meter.part("forward_backward", wait=True):
            loss = self.loop.forward(batch).sum() / targets
            self.loop.backward(loss, last=True)
        with self.meter.part("optimizer", wait=True):
            self.loop.step(self.config.optimizer.learning_rate)
        self.told.append(self.meter.end_update(targets))


def measure_updates(
    config: BenchTrainConfig, overrides: Sequence[str] = (), progress: Progress = silent
) -> UpdateResult:
    """Return what an update takes for every mechanism, loop and length, or why it was left out.

    Raises UserError for a request that train.py would refuse.
    """
    started = time.monotonic()
    check(config)
    assert config.rounds is not None
    configs = plan(config, overrides)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    distributed.initialize()
    device = distributed.device()
    budget = config.time_budget_s
    if budget is None and device.type == "cuda":
        budget = GPU_BUDGET_S
    clock = Clock(device, deadline=None if budget is None else started + budget)
    machine = describe(device, torch.get_num_threads())
    first = next(iter(configs.values()))
    shared = {
        "model": asdict(first.model) | {"context_length": config.lengths},
        "precision": first.engine.precision,
        "vocabulary_size": vocabulary_size(first.tokenizer),
        "overrides": list(overrides),
    }
    total, done = len(configs) * (1 + config.rounds), 0

    def advance(told: str) -> None:
        nonlocal done
        done += 1
        progress(told, done, total)

    cells: list[UpdateCell] = []
    for length in config.lengths or []:
        wanted = {key[1:]: one for key, one in configs.items() if key[0] == length}
        cells += _measure_length(wanted, length, config.rounds, clock, advance)
    return UpdateResult(machine, asdict(config), shared, cells)


def _measure_length(
    wanted: dict[tuple[str, str], TrainConfig],
    length: int,
    rounds: int,
    clock: Clock,
    advance: Callable[[str], None],
) -> list[UpdateCell]:
    """Return the cells of one context length; all its models are in memory together."""
    running: dict[tuple[str, str], _Running] = {}
    left_out: dict[tuple[str, str], str] = {}
    for key, config in wanted.items():
        told = f"{length:,} tokens {key[0]} {key[1]}"
        if clock.expired():
            left_out[key] = "the time budget was used up"
        else:
            try:
                running[key] = _start(config, loop=key[1], updates=2 + rounds)
                # the first updates allocate and compile
                running[key].update()
                running[key].update()
            except torch.cuda.OutOfMemoryError:
                running.pop(key, None)
                left_out[key] = "more than the GPU's memory"
                torch.cuda.empty_cache()
        advance(told)
    for one in running.values():
        one.told.clear()
    for _ in range(rounds):
        for key, one in running.items():
            if clock.expired():
                break
            one.update()
            advance(f"{length:,} tokens {key[0]} {key[1]}")
    times = {
        key: [told["milliseconds"] for told in one.told] for key, one in running.items() if one.told
    }
    cells = []
    for key in wanted:
        if key in times:
            cells.append(_cell(key, length, running[key], times))
        else:
            reason = left_out.get(key, "the time budget was used up")
            cells.append(UpdateCell(*key, length=length, left_out=reason))
    for one in running.values():
        one.loop.close()
    return cells


def _start(config: TrainConfig, *, loop: str, updates: int) -> _Running:
    vocabulary = vocabulary_size(config.tokenizer)
    model = GPT2(config.model, config.attention, vocabulary_size=vocabulary, seed=config.seed)
    flops = model.flops_per_token(config.model.context_length)
    objective = LanguageModelObjective(model, config.engine.precision, config.optimizer.z_loss)
    made = PlainLoop(objective, config) if loop == PLAIN else TrainingEngine(objective, config)
    made.objective.train()
    return _Running(
        loop=made,
        config=config,
        loader=_random_windows(config, vocabulary, updates),
        meter=Meter(distributed.device()),
        flops_per_token=flops,
        updates=0,
        told=[],
    )


def _random_windows(config: TrainConfig, vocabulary: int, updates: int) -> WindowLoader:
    """Return a loader of random tokens, enough for `updates` without seeing any twice."""
    length, samples = config.model.context_length, config.batch.micro_samples
    draws = np.random.Generator(np.random.PCG64(config.seed))
    count = updates * samples * length + 1
    ids = draws.integers(vocabulary, size=count).astype(token_dtype(vocabulary))
    return WindowLoader(
        TokenStream([ids]),
        context_length=length,
        seed=config.seed,
        end_of_text=vocabulary - 1,
        isolate_documents=config.data.isolate_documents,
    )


def _cell(
    key: tuple[str, str],
    length: int,
    running: _Running,
    times: dict[tuple[str, str], list[float]],
) -> UpdateCell:
    """Return the cell of a loop; `times` are the milliseconds of everybody's updates."""
    mechanism, loop = key
    own = times[key]

    def against(other: tuple[str, str], invert: bool) -> float | None:
        if other not in times:
            return None
        pairs = zip(own, times[other], strict=False)
        return statistics.median(b / a if invert else a / b for a, b in pairs)

    lower, upper = own[0], own[0]
    if len(own) > 1:
        lower, _, upper = statistics.quantiles(own, n=4, method="inclusive")
    median = statistics.median(own)
    tokens = running.config.batch.micro_samples * length
    speed = 1000 * tokens / median
    parts: dict[str, Any] = {
        f"{part}_milliseconds": statistics.median(t[f"{part}_milliseconds"] for t in running.told)
        for part in UPDATE_PARTS
    }
    return UpdateCell(
        mechanism=mechanism,
        loop=loop,
        length=length,
        parameters=own_parameters(running.loop.objective.model),
        rounds=len(own),
        milliseconds=median,
        lower_milliseconds=lower,
        upper_milliseconds=upper,
        **parts,
        tokens_per_second=speed,
        mfu=model_flops_utilisation(
            speed,
            forward_flops=running.flops_per_token,
            device=found_device(running.config.engine.precision),
            devices=1,
        ),
        ratio=against((REFERENCE, loop), invert=True),
        overhead=against((mechanism, PLAIN), invert=False),
    )
