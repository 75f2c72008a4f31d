"""Times one token after many: its milliseconds, what the state holds, and whether it is right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from slayformer.attention.states import tensor_bytes
from slayformer.benchmark.clock import Clock, time_rounds
from slayformer.benchmark.contestants import PEERS, REFERENCE, Shape, load_mechanism, make_runner
from slayformer.benchmark.memory import failure
from slayformer.benchmark.results import Cell, finished_cell

# tokens decoded and compared with the same computed in parallel
CHECKED_TOKENS = 8


def can_decode(name: str) -> bool:
    """Return whether decoding is measured: of our mechanisms, and of torch's attention."""
    return name == REFERENCE or name not in PEERS


@dataclass(frozen=True)
class Step:
    """A contestant after its context: a call that computes the next token, again and again."""

    call: Callable[[], Any]
    state_bytes: int
    error: float


def measure_decode(
    names: Sequence[str],
    shape: Shape,
    *,
    contexts: Sequence[int],
    rounds: int,
    clock: Clock,
    longest_seconds: float,
    begin: Callable[[str], None] = lambda told: None,
    advance: Callable[[int], None] = lambda count: None,
) -> list[Cell]:
    """Return a cell for every contestant and context; the rounds go over all contexts too."""
    left_out: dict[tuple[str, int], str] = {}
    steps: dict[int, dict[str, Step]] = {context: {} for context in contexts}
    for name in names:
        reason = None
        for context in contexts:
            begin(f"decode behind {context:,} tokens: {name}")
            if reason is None and clock.expired():
                reason = "the time budget was used up"
            seconds = 0.0
            if reason is None:
                whole = replace(shape, length=context + CHECKED_TOKENS)
                try:
                    steps[context][name], seconds = _timed_prepare(
                        name, whole, clock, longest_seconds
                    )
                except Exception as error:
                    reason = str(failure(error))
            if reason is not None:
                left_out[name, context] = reason
                advance(rounds)
            elif seconds > longest_seconds:
                # longer contexts are not read
                reason = f"longer than {longest_seconds:g} s to read {context:,} tokens"
            advance(1)
    calls = {
        f"{name} {context}": step.call
        for context, made in steps.items()
        for name, step in made.items()
    }
    begin("decode: all in turns")
    timed = time_rounds(calls, rounds=rounds, clock=clock, advance=lambda: advance(1))
    cells = []
    for context, made in steps.items():
        samples = {name: timed[key] for name in made if (key := f"{name} {context}") in timed}
        for name in names:
            if (name, context) in left_out:
                cells.append(Cell(name, "decode", context, left_out=left_out[name, context]))
                continue
            cells.append(
                finished_cell(
                    name,
                    "decode",
                    context,
                    samples,
                    tokens=shape.batch,
                    memory_bytes=made[name].state_bytes,
                    error=made[name].error,
                )
            )
    return cells


def _timed_prepare(
    name: str, shape: Shape, clock: Clock, longest_seconds: float
) -> tuple[Step, float]:
    """Return what `prepare` does and its seconds; a second time counts where the first was long."""
    made: list[Step] = []

    def make() -> None:
        made[:] = [prepare(name, shape)]

    seconds = clock.seconds(make)
    if seconds > longest_seconds:
        # kernels may have been compiled
        seconds = clock.seconds(make)
    return made[0], seconds


@torch.no_grad()
def prepare(name: str, shape: Shape) -> Step:
    """Return mechanism or reference `name` after all but the last tokens of `shape`.

    Those are decoded one by one and compared with the whole sequence computed at once.
    """
    q, k, v = shape.draw()
    expected = make_runner(name, shape).attend(q, k, v)
    context = shape.length - CHECKED_TOKENS
    if name == REFERENCE:
        return _prepare_reference(q, k, v, expected, context)
    attention = load_mechanism(name, shape)
    state = attention.init_state(shape.batch, shape.device)
    _, state = attention(*(x[:, :, :context] for x in (q, k, v)), state=state)
    new = [x[:, :, context : context + 1].contiguous() for x in (q, k, v)]

    @torch.no_grad()
    def step() -> Any:
        # a state is a value: the same one can be continued many times
        return attention(*new, state=state)

    found, after = [], state
    for position in range(context, shape.length):
        one = (x[:, :, position : position + 1] for x in (q, k, v))
        y, after = attention(*one, state=after)
        found.append(y)
    return Step(step, tensor_bytes(state), _difference(torch.cat(found, dim=2), expected, context))


def _prepare_reference(q: Tensor, k: Tensor, v: Tensor, expected: Tensor, context: int) -> Step:
    """Return torch's attention over keys and values in their place already."""
    new = q[:, :, context : context + 1].contiguous()
    keys, values = k[:, :, : context + 1], v[:, :, : context + 1]

    @torch.no_grad()
    def step() -> Any:
        return scaled_dot_product_attention(new, keys, values)

    y = scaled_dot_product_attention(new, keys, values)
    size = 2 * context * k[:, :, 0].numel() * k.element_size()
    return Step(step, size, _difference(y, expected[:, :, : context + 1], context))


def _difference(found: Tensor, whole: Tensor, start: int) -> float:
    expected = whole[:, :, start:]
    return float((found.double() - expected.double()).norm() / expected.double().norm())
