"""Report finished runs side by side: `python scripts/report.py FOLDER...`.

A folder is a run directory, or holds run directories, such as a comparison.
"""

from __future__ import annotations

import sys

from slayformer.cli import COMMANDS, compose, entry_point


def main() -> None:
    """Give Hydra the options, and read the folders."""
    from slayformer.evaluation.report_command import run, split_arguments

    folders, options = split_arguments(sys.argv[1:])
    composed = compose("report", options, folder=COMMANDS)
    from slayformer.config_commands import ReportConfig
    from slayformer.config_loading import load_config

    run(folders, load_config(composed, ReportConfig))


if __name__ == "__main__":
    entry_point(main)
