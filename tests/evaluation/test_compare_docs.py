"""docs/compare.md is true: every command in it composes to runs that could start."""

from __future__ import annotations

import shlex
from pathlib import Path

from slayformer.cli import COMMANDS, compose, multirun_arguments
from slayformer.config_commands import CompareConfig, ReportConfig
from slayformer.config_loading import load_config
from slayformer.evaluation import compare, report_command
from slayformer.evaluation.cells import training_cell
from slayformer.evaluation.multirun import combinations

PAGE = Path(__file__).parents[2] / "docs" / "compare.md"


def commands() -> list[list[str]]:
    """Return the words of every command in a block of the page."""
    blocks = PAGE.read_text(encoding="utf-8").split("```bash\n")[1:]
    lines = [line for block in blocks for line in block.split("```")[0].splitlines()]
    return [shlex.split(line) for line in lines if line]


def test_every_command_could_start(tmp_path: Path) -> None:
    started = []
    for python, script, *arguments in commands():
        assert python == "python"
        started.append(script)
        if script == "scripts/compare.py":
            own, overrides = compare.split_arguments(arguments)
            config = load_config(compose("compare", own, folder=COMMANDS), CompareConfig)
            cells = compare.plan_cells(config, overrides, tmp_path)
            assert len(cells) == len(config.attention) * len(config.seeds)
        elif script == "train.py":
            several = multirun_arguments(arguments)
            assert several is not None
            directory, jobs = combinations(several[0])
            assert [*jobs] == ["nodes2-seed1", "nodes2-seed2", "nodes3-seed1", "nodes3-seed2"]
            assert directory.name == "nodes"
            for name, job in jobs.items():
                training_cell(tmp_path / name, name, job)
        else:
            folders, options = report_command.split_arguments(arguments)
            assert folders
            load_config(compose("report", options, folder=COMMANDS), ReportConfig)
    assert set(started) == {"scripts/compare.py", "train.py", "scripts/report.py"}
