"""The paper's synthetic tasks: `python scripts/tasks.py mechanisms=[softmax,slay] tasks=[mqar]`."""

from __future__ import annotations

from slayformer.cli import COMMANDS, compose, entry_point


def main() -> None:
    """Compose, check, train and write."""
    composed = compose("tasks", folder=COMMANDS)
    from slayformer.config_loading import load_config
    from slayformer.paper.tasks_command import TasksConfig, run

    run(load_config(composed, TasksConfig))


if __name__ == "__main__":
    entry_point(main)
