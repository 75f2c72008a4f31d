"""Find needles in haystacks of up to 64k tokens: `python scripts/long_context.py`."""

from __future__ import annotations

from slayformer.cli import COMMANDS, compose, entry_point


def main() -> None:
    """Compose, check and run."""
    composed = compose("long_context", folder=COMMANDS)
    from slayformer.config_commands import LongContextConfig
    from slayformer.config_loading import fill_list, load_config
    from slayformer.evaluation.long_context import run

    for key in ("attention", "lengths_tokens", "training_lengths_tokens"):
        fill_list(composed, key)
    run(load_config(composed, LongContextConfig))


if __name__ == "__main__":
    entry_point(main)
