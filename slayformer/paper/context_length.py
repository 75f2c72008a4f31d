"""The longest context under a memory limit: measured, each mechanism in a process of its own.

The process may take so much memory beyond what it has after loading; it doubles the length, then
halves the gap, until the system refuses or a forward pass takes too long.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from slayformer.errors import UserError
from slayformer.paper.figures import line_styles, new_figure
from slayformer.paper.item import (
    FAILS,
    HOLDS,
    HOLDS_AT,
    NOT_SETTLED,
    Claim,
    Data,
    Item,
    Picture,
    Request,
    Table,
)
from slayformer.paper.published import LONGER_THAN_SOFTMAX

EXPLICIT = "softmax, matrix written out"
MECHANISMS = (EXPLICIT, "softmax", "yat_spherical", "slay", "slay_best", "linear_elu", "performer")
HEADS, HEAD_WIDTH = 8, 32
FIRST_TOKENS = 1024
# between the longest that worked and the shortest that did not
HALVINGS = 2


def compute(request: Request) -> Data:
    """Return for each mechanism the longest length, what ended it, and times by length."""
    limit_bytes = request.choose(quick=256 * 2**20, full=2**30)
    seconds = request.choose(quick=4.0, full=60.0)
    found = {}
    for number, name in enumerate(MECHANISMS):
        found[name] = longest(name, limit_bytes, seconds)
        request.progress((number + 1) / len(MECHANISMS))
    return {"limit_bytes": limit_bytes, "seconds": seconds, "found": found}


def longest(mechanism: str, limit_bytes: int, seconds: float) -> dict[str, Any]:
    """Return {tokens, ended, trials} of `mechanism`; `ended` is `memory` or `time`.

    Raises UserError where the system has no limit on memory, or for another error.
    """
    if sys.platform != "linux":
        raise UserError("the longest context is measured with Linux's limit on a process's memory")
    command = [sys.executable, "-m", __name__, mechanism, str(limit_bytes), str(seconds)]
    # a library that cannot get memory may end the process, so what worked is told line by line
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in finished.stdout.splitlines() if line.startswith("{")]
    trials = [line for line in lines if "seconds" in line]
    # a system that ends the process for want of memory does so by a signal
    if not trials or finished.returncode > 0:
        told = finished.stderr.strip().splitlines()[-1:]
        raise UserError(f"{mechanism} did not run: {''.join(told)}")
    return {
        "tokens": max(trial["tokens"] for trial in trials),
        # nothing told: the system ended the process for want of memory
        "ended": next((line["ended"] for line in lines if "ended" in line), "memory"),
        "trials": sorted(trials, key=lambda trial: trial["tokens"]),
    }


def search(attempt: Callable[[int], str]) -> str:
    """Try lengths, doubling and then halving the gap; return what ended the doubling.

    `attempt` returns `worked`, `memory` where there was not enough, or `time` where it worked and
    longer ones would take too long.
    """
    tokens = FIRST_TOKENS
    while (ended := attempt(tokens)) == "worked":
        tokens *= 2
    low, high = tokens // 2, tokens
    for _ in range(HALVINGS if ended == "memory" and tokens > FIRST_TOKENS else 0):
        middle = (low + high) // 2
        low, high = (middle, high) if attempt(middle) == "worked" else (low, middle)
    return ended


def probe(mechanism: str, limit_bytes: int, seconds: float) -> None:
    """Try lengths in this process and print each that worked as a line of JSON."""
    import resource

    import torch

    from slayformer.benchmark.memory import is_out_of_memory
    from slayformer.presets import make_attention

    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    draws = torch.Generator().manual_seed(0)

    def attend(tokens: int) -> None:
        q, k, v = (torch.randn(1, HEADS, tokens, HEAD_WIDTH, generator=draws) for _ in range(3))
        if mechanism == EXPLICIT:
            scores = (q @ k.mT) * HEAD_WIDTH**-0.5
            later = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
            scores.masked_fill_(later, -torch.inf).softmax(-1) @ v
            return
        attention = make_attention(
            mechanism,
            num_heads=HEADS,
            head_dim=HEAD_WIDTH,
            max_sequence_length=tokens,
            backend="torch",
        )
        attention.eval()(q, k, v)

    # what the first call loads belongs to the process, not to the length
    attend(64)
    limit = _data_bytes() + limit_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    def attempt(tokens: int) -> str:
        # of the processor, so that other work on the machine does not count
        start = time.process_time()
        try:
            attend(tokens)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return "memory"
        taken = time.process_time() - start
        print(json.dumps({"tokens": tokens, "seconds": taken}), flush=True)
        return "worked" if taken <= seconds else "time"

    print(json.dumps({"ended": search(attempt)}), flush=True)


def _data_bytes() -> int:
    """Return what counts towards the limit now: private memory the process may write to."""
    with open("/proc/self/status", encoding="ascii") as status:
        (line,) = (line for line in status if line.startswith("VmData:"))
    return 1024 * int(line.split()[1])


def draw(data: Data) -> list[Picture]:
    """Draw the time by length up to the longest that worked."""
    figure = new_figure(9.5, 4.8)
    axes = figure.subplots()
    styles = line_styles(MECHANISMS)
    for name in MECHANISMS:
        trials = data["found"][name]["trials"]
        tokens = [trial["tokens"] for trial in trials]
        times = [trial["seconds"] for trial in trials]
        axes.plot(tokens, times, marker=".", label=name, **styles[name])
        mark = "x" if data["found"][name]["ended"] == "memory" else ">"
        axes.plot(tokens[-1], times[-1], mark, color=styles[name]["color"], markersize=9)
    axes.plot([], [], "x", color="#555555", label="out of memory beyond")
    axes.plot([], [], ">", color="#555555", label="longer takes too long")
    axes.set_xscale("log", base=2)
    axes.set(
        yscale="log", xlabel="context (tokens)", ylabel="forward pass (processor s, one thread)"
    )
    axes.set_title(f"Until {data['limit_bytes'] / 2**20:,.0f} MiB are used up")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.tick_params(axis="x", rotation=30)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5))
    caption = (
        f"Time of a forward pass ({HEADS} heads of width {HEAD_WIDTH}, batch 1, fp32, inputs "
        "included in the memory) up to the longest context that the memory allows."
    )
    return [Picture("context_length", caption, figure)]


def tables(data: Data) -> list[Table]:
    """Return the longest context of each mechanism."""
    explicit = data["found"][EXPLICIT]["tokens"]
    rows = [
        [
            name,
            f"{one['tokens']:,}",
            f"{one['tokens'] / explicit:.1f}",
            one["ended"],
            f"{one['trials'][-1]['seconds']:.2f}",
        ]
        for name, one in data["found"].items()
    ]
    columns = [
        "mechanism",
        "tokens",
        "÷ explicit softmax",
        "ended by",
        "forward there (processor s)",
    ]
    note = (
        f"{data['limit_bytes'] / 2**20:,.0f} MiB beyond the loaded libraries, set as the process's "
        f"limit; {HEADS} heads of width {HEAD_WIDTH}, fp32, one thread, a forward pass of at most "
        f"about {data['seconds']:g} s of the processor. q, k, v and the output alone take "
        f"{4 * HEADS * HEAD_WIDTH * 4 / 1024:g} KiB a token."
    )
    return [Table("context_length", "Longest context under a memory limit", columns, rows, note)]


def claims(data: Data) -> list[Claim]:
    """Return the paper's claim on longer sequences."""
    found = data["found"]
    slay, explicit, fused = (found[name]["tokens"] for name in ("slay", EXPLICIT, "softmax"))
    fused_end = "stopped by time" if found["softmax"]["ended"] == "time" else "stopped by memory"
    limit = f"{data['limit_bytes'] / 2**20:,.0f} MiB"
    ratio = slay / explicit
    verdict = f"{NOT_SETTLED} {ratio:.0f}× in {limit}" if ratio > 1 else FAILS
    if ratio >= LONGER_THAN_SOFTMAX:
        verdict = f"{HOLDS_AT} softmax with its matrix written out"
        verdict = HOLDS if slay >= LONGER_THAN_SOFTMAX * fused else verdict
    return [
        Claim(
            f"SLAY processes sequences up to {LONGER_THAN_SOFTMAX}× longer than softmax",
            "Section 4",
            f"{slay:,} tokens in {limit} against {explicit:,} with the matrix written out "
            f"({ratio:.0f}×; it grows as the root of the memory); fused softmax {fused:,} "
            f"({slay / fused:.1f}×), {fused_end}",
            verdict,
        )
    ]


ITEM = Item(
    name="context_length",
    title="the longest context under a memory limit",
    sources=("Section 4",),
    minutes=2.5,
    compute=compute,
    published=f"up to {LONGER_THAN_SOFTMAX} times the context of standard softmax attention",
    draw=draw,
    tables=tables,
    claims=claims,
)

if __name__ == "__main__":
    probe(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
