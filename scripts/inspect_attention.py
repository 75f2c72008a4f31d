"""See how mechanisms attend: `python scripts/inspect_attention.py attention=[slay,softmax]`.

Prints a table and writes it beside a picture; `checkpoint=runs/NAME` looks into a trained model.
"""

from __future__ import annotations

from slayformer.cli import COMMANDS, compose, entry_point


def main() -> None:
    """Compose, check and measure."""
    composed = compose("inspect_attention", folder=COMMANDS)
    from slayformer.evaluation.inspection import read_config, run

    run(read_config(composed))


if __name__ == "__main__":
    entry_point(main)
