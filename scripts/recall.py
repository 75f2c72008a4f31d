"""Measure associative recall: `python scripts/recall.py attention=slay`."""

from __future__ import annotations

from slayformer.cli import compose, entry_point


def main() -> None:
    """Compose, check and run."""
    composed = compose("recall")
    from slayformer.config_commands import RecallConfig
    from slayformer.config_loading import load_config
    from slayformer.evaluation.recall import run

    run(load_config(composed, RecallConfig))


if __name__ == "__main__":
    entry_point(main)
