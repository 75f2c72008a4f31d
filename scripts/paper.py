"""The paper's tables and figures, computed: `python scripts/paper.py items=[figure_7,table_2]`."""

from __future__ import annotations

from slayformer.cli import COMMANDS, compose, entry_point


def main() -> None:
    """Compose, check, compute and write."""
    composed = compose("paper", folder=COMMANDS)
    from slayformer.paper.run import read_config, run

    run(read_config(composed))


if __name__ == "__main__":
    entry_point(main)
