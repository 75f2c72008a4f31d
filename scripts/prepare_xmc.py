"""Make an extreme classification set from WordNet: `python scripts/prepare_xmc.py`."""

from __future__ import annotations

from slayformer.cli import COMMANDS, compose, entry_point


def main() -> None:
    """Compose, check and write."""
    composed = compose("prepare_xmc", folder=COMMANDS)
    from slayformer.config_loading import load_config
    from slayformer.paper.xmc_command import PrepareXmcConfig, prepare

    prepare(load_config(composed, PrepareXmcConfig))


if __name__ == "__main__":
    entry_point(main)
