"""Extreme classification: `python scripts/xmc.py train=FILE test=FILE mechanisms=[slay]`."""

from __future__ import annotations

from slayformer.cli import COMMANDS, compose, entry_point


def main() -> None:
    """Compose, check, train and write."""
    composed = compose("xmc", folder=COMMANDS)
    from slayformer.config_loading import load_config
    from slayformer.paper.xmc_command import XmcConfig, run

    run(load_config(composed, XmcConfig))


if __name__ == "__main__":
    entry_point(main)
