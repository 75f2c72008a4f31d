"""Time attention alone: `python scripts/bench_attention.py mechanisms=[slay,softmax]`.

Writes JSON, CSV, Markdown and a picture; `quick=true` is a look of a minute.
"""

from __future__ import annotations

from slayformer.cli import COMMANDS, compose, entry_point


def main() -> None:
    """Compose, check and measure."""
    composed = compose("bench_attention", folder=COMMANDS)
    from slayformer.benchmark.command import run
    from slayformer.benchmark.options import read_config

    run(read_config(composed))


if __name__ == "__main__":
    entry_point(main)
