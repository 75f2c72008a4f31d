"""Every command in README and docs, in blocks and in paragraphs, has options that exist."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slayformer.cli import COMMANDS, compose, multirun_arguments
from slayformer.config_commands import (
    EvalConfig,
    LongContextConfig,
    RecallConfig,
    ReportConfig,
)
from slayformer.config_loading import load_config
from slayformer.presets import preset_names

ROOT = Path(__file__).resolve().parents[2]
NAMES = sorted(["README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))])
Arguments = list[str]


@pytest.fixture(autouse=True)
def _compose_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra composes twice, the first time to learn that this is no sweep, which is known here."""
    monkeypatch.setattr("hydra._internal.hydra.Hydra.get_mode", lambda *_, **__: None)


def read_training(arguments: Arguments) -> Any:
    several = multirun_arguments(arguments)
    if several is None:
        return load_config(compose("train", arguments))
    from slayformer.evaluation.multirun import combinations

    jobs = list(combinations(several[0])[1].values())
    assert len(jobs) > 1
    return load_config(compose("train", jobs[-1]))


def read_comparison(arguments: Arguments) -> Any:
    from slayformer.evaluation.compare import read_config, split_arguments

    own, shared = split_arguments(arguments)
    config = read_config(compose("compare", own, COMMANDS))
    assert set(config.attention) <= set(preset_names())
    return read_training([*shared, f"attention={config.attention[0]}"])


def read_report(arguments: Arguments) -> Any:
    from slayformer.evaluation.report_command import split_arguments

    folders, options = split_arguments(arguments)
    assert folders
    return load_config(compose("report", options, COMMANDS), ReportConfig)


def read_bench_train(arguments: Arguments) -> Any:
    from slayformer.benchmark.update_options import BenchTrainConfig, split_arguments

    own, shared = split_arguments(arguments)
    read_training(shared)
    return load_config(compose("bench_train", own, COMMANDS), BenchTrainConfig)


def read_bench_attention(arguments: Arguments) -> Any:
    from slayformer.benchmark.options import read_config

    return read_config(compose("bench_attention", arguments, COMMANDS))


def read_paper(arguments: Arguments) -> Any:
    from slayformer.paper.run import read_config

    return read_config(compose("paper", arguments, COMMANDS))


def read_generate(arguments: Arguments) -> Any:
    return runpy.run_path(str(ROOT / "scripts" / "generate.py"))["parse"](arguments)


def read_nothing(arguments: Arguments) -> None:
    assert arguments == []


def of(name: str, schema: type[Any] | None = None, folder: Path = COMMANDS) -> Callable[..., Any]:
    """Return what reads the options of a command that has one configuration."""

    def read(arguments: Arguments) -> Any:
        composed = compose(name, arguments, folder)
        return composed if schema is None else load_config(composed, schema)

    return read


READERS: dict[str, Callable[[Arguments], Any]] = {
    "train.py": read_training,
    "eval.py": of("eval", EvalConfig),
    "scripts/prepare_data.py": read_training,
    "scripts/compare.py": read_comparison,
    "scripts/report.py": read_report,
    "scripts/recall.py": of("recall", RecallConfig, COMMANDS.parent),
    "scripts/long_context.py": of("long_context", LongContextConfig),
    "scripts/export_hf.py": of("export_hf"),
    "scripts/inspect_attention.py": of("inspect_attention"),
    "scripts/bench_attention.py": read_bench_attention,
    "scripts/bench_train.py": read_bench_train,
    "scripts/paper.py": read_paper,
    "scripts/tasks.py": of("tasks"),
    "scripts/xmc.py": of("xmc"),
    "scripts/generate.py": read_generate,
    "scripts/check_kernels.py": read_nothing,
}


@pytest.mark.parametrize("name", NAMES)
def test_every_option_exists(name: str, pages: Any, tmp_path: Path) -> None:
    page = pages[name]
    for block in page.blocks():
        if block.file is not None:
            (tmp_path / block.file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / block.file).write_text(block.text)
    # a mechanism that the page adds is not there; any other stands for it
    added = {path.stem: "slay" for path in (tmp_path / "configs" / "attention").glob("*.yaml")}
    replaced = {**added, "=NAME": "=slay", "[…]": "[slay]", "attention.power": "attention.nodes"}
    seen = set()
    for command in [*page.commands(), *page.mentioned()]:
        if not command.is_ours:
            continue
        script, arguments, _ = command.launched(tmp_path)
        for old, new in replaced.items():
            arguments = [argument.replace(old, new) for argument in arguments]
        if (script, *arguments) not in seen and arguments != ["--help"]:
            seen.add((script, *arguments))
            READERS[script](arguments)


def test_every_script_and_block_is_known(pages: Any) -> None:
    scripts = {f"scripts/{path.name}" for path in (ROOT / "scripts").glob("*.py")}
    without_examples = {"scripts/prepare_xmc.py"}
    assert scripts - without_examples == READERS.keys() - {"train.py", "eval.py"}
    for page in pages.values():
        for block in page.blocks():
            assert block.file or block.language in ("bash", "console", "python"), page.name
        indented = re.findall(
            r"^    (?:python|deepspeed|torchrun|make) .*", page.text, re.MULTILINE
        )
        assert indented == [], page.name
