"""README and docs are true: their commands are run, or declared here with the reason why not.

A bash block is run as it is printed, in order, in a copy of the project; what SMALLER appends makes
it a matter of seconds. A console block also shows what is answered, `…` standing for anything. A
python block is run, and a block that names a file is written there. Commands in paragraphs are read
by the program they name.
"""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from slayformer.cli import COMMANDS, compose, multirun_arguments
from slayformer.config_commands import (
    CompareConfig,
    EvalConfig,
    LongContextConfig,
    RecallConfig,
    ReportConfig,
)
from slayformer.config_loading import load_config
from slayformer.presets import preset_names

ROOT = Path(__file__).resolve().parents[2]
NAMES = sorted(["README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))])

# what is appended to the commands of our scripts in which a pattern is found
TRAINING = (
    "budget.tokens=1024 batch.samples_per_update=2 validation.tokens=1024 schedule.warmup_updates=1"
)
SMALLER = {
    r"train\.py|compare\.py": TRAINING,
    r"train\.py -m": "seed=1",
    r"compare\.py": "seeds=[1] threads=1",
    r"compare\.py attention=\[softmax,": "attention=[softmax,slay]",
    r"eval\.py": "tokens=600",
    r"generate\.py": "tokens=5",
    r"long_context\.py": "updates=2 schedule.warmup_updates=1 lengths_tokens=[64] samples=1",
    r"inspect_attention\.py": "attention=[slay] seeds=1 length=32 head_dim=[16]",
    r"bench_attention\.py": "mechanisms=[slay] peers=[torch_sdpa] lengths=[64] contexts=[64]"
    " heads=2 rounds=1",
    r"bench_train\.py": "quick=true attention=[slay] lengths=[64] tokens=64 rounds=1",
    r"paper\.py": "items=[figure_9] size=quick",
    r"tasks\.py": "mechanisms=[slay] seeds=[42] tasks=[copy] updates=2 processes=1",
}
# what cannot be run here, and why; its options are read, and what trains is planned
NOT_RUN = {
    r"^(make|source|pip) ": "makes an environment, which the tests run in",
    r"--num_gpus|--nnodes|--hostfile|--nproc_per_node=8|processes=8": "needs several GPUs",
    r"experiment=gpt2_small_chinchilla(?!.* dry_run=true)": "needs the hub, and GPUs for days",
    r"data=(wikitext2|wikitext103|fineweb)(?!.* source.path=)": "needs the hub",
    r"initial_weights=openai-community/": "needs the hub",
    r"lm_eval .*lambada": "needs the hub",
    r"lm_eval .*my_text": "tests/huggingface/test_export.py runs it and checks the score",
    r"gpu_session\.sh": "needs a GPU; tests/benchmark/test_gpu_session.py takes its dry run",
}
# pages whose commands need a process each: they change the package that this process has imported
APART = {"docs/add_a_mechanism.md"}

Arguments = list[str]


def of_launcher(words: Sequence[str], folder: Path) -> tuple[str, Arguments, int]:
    """Return script, arguments and number of processes as the launcher itself reads them."""
    launcher, *rest = words
    if launcher == "torchrun":
        from torch.distributed.run import config_from_args, parse_args

        arguments = parse_args(rest)
        settings, _, _ = config_from_args(arguments)
        script, passed = arguments.training_script, arguments.training_script_args
        return script, passed, settings.max_nodes * settings.nproc_per_node
    if launcher == "deepspeed":
        from deepspeed.launcher.runner import fetch_hostfile
        from deepspeed.launcher.runner import parse_args as parse

        arguments = parse(rest)
        world_size = max(1, arguments.num_gpus)
        if "--hostfile" in rest:
            slots = fetch_hostfile(str(folder / arguments.hostfile)) or {}
            world_size = sum(slots.values())
        return arguments.user_script, arguments.user_args, world_size
    assert launcher == "python", words
    return rest[0], rest[1:], 1


def read_training(arguments: Arguments) -> Any:
    several = multirun_arguments(arguments)
    if several is None:
        return load_config(compose("train", arguments))
    from slayformer.evaluation.multirun import combinations

    jobs = list(combinations(several[0])[1].values())
    assert len(jobs) > 1
    return load_config(compose("train", jobs[-1]))


def read_comparison(arguments: Arguments) -> Any:
    from slayformer.evaluation.compare import split_arguments

    own, shared = split_arguments(arguments)
    config = load_config(compose("compare", own, COMMANDS), CompareConfig)
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
    "scripts/generate.py": read_generate,
    "scripts/check_kernels.py": read_nothing,
}


def why_not(words: Sequence[str]) -> str | None:
    """Return why a command is not run, None if it is."""
    reasons = (why for pattern, why in NOT_RUN.items() if re.search(pattern, " ".join(words)))
    return next(reasons, None)


def is_ours(words: Sequence[str]) -> bool:
    """Return whether a command starts a script of the project."""
    return words[0] in ("torchrun", "deepspeed") or (words[0] == "python" and words[1] != "-m")


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
    for words in [*page.commands(), *page.mentioned()]:
        if not is_ours(words):
            continue
        script, arguments, _ = of_launcher(words, tmp_path)
        for old, new in replaced.items():
            arguments = [argument.replace(old, new) for argument in arguments]
        if (script, *arguments) not in seen and arguments != ["--help"]:
            seen.add((script, *arguments))
            READERS[script](arguments)


@pytest.mark.parametrize("pattern", NOT_RUN)
def test_what_is_not_run_is_there(pattern: str, pages: Any) -> None:
    commands = [" ".join(words) for page in pages.values() for words in page.commands()]
    assert any(re.search(pattern, command) for command in commands)


def test_every_script_and_block_is_known(pages: Any) -> None:
    scripts = {f"scripts/{path.name}" for path in (ROOT / "scripts").glob("*.py")}
    without_examples = {"scripts/prepare_xmc.py", "scripts/xmc.py"}
    assert scripts - without_examples == READERS.keys() - {"train.py", "eval.py"}
    for page in pages.values():
        for block in page.blocks():
            assert block.file or block.language in ("bash", "console", "python"), page.name
        indented = re.findall(
            r"^    (?:python|deepspeed|torchrun|make) .*", page.text, re.MULTILINE
        )
        assert indented == [], page.name


def plan(words: Sequence[str], folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Plan the training that a command would do with as many processes as it would start."""
    script, arguments, world_size = of_launcher(words, folder)
    # where GPT-2's weights would come from is nothing to plan with
    arguments = [a for a in arguments if not a.startswith("initial_weights=")]
    if script == "train.py":
        with monkeypatch.context() as patched:
            patched.setenv("WORLD_SIZE", str(world_size))
            run_here(["python", "train.py", *arguments, "dry_run=true"], folder, patched)
        assert f"devices {world_size}," in " ".join(capsys.readouterr().out.split())


def run_here(words: Sequence[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run a Python script in this process, which has imported the heavy packages; its exit code."""
    with monkeypatch.context() as patched:
        patched.chdir(folder)
        patched.setattr(sys, "argv", list(words[1:]))
        try:
            runpy.run_path(words[1], run_name="__main__")
        except SystemExit as exit_:
            return int(exit_.code or 0)
    return 0


def run_apart(words: Sequence[str], folder: Path) -> None:
    """Run a command in a process of its own, which imports the package of `folder`."""
    programs = str(Path(sys.executable).parent)
    environment = {
        **os.environ,
        "PATH": programs + os.pathsep + os.environ["PATH"],
        "PYTHONPATH": str(folder),
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}\n{done.stderr}"


def smaller(words: Sequence[str]) -> list[str]:
    """Return the command with what makes it a matter of seconds."""
    if not is_ours(words) or {"--help", "dry_run=true"} & set(words):
        return list(words)
    command = " ".join(words)
    appended = [more for pattern, more in SMALLER.items() if re.search(pattern, command)]
    return [*words, *" ".join(appended).split()]


@pytest.fixture
def clone(name: str, pages: Any, project: Callable[[], Path], request: Any) -> Path:
    """Return a copy of the project with the runs and the exported folder that the page names."""
    folder = project()
    text = pages[name].text
    named = [
        path
        for path in ("runs/NAME", "runs/A", "runs/B", "runs/ONE", "runs/ANOTHER")
        if re.search(rf"{path}\b", text)
    ]
    if named:
        monkeypatch = request.getfixturevalue("monkeypatch")
        attention = {"runs/B": "softmax", "runs/ANOTHER": "softmax"}
        made: dict[str, str] = {}
        for path in named:
            kind = attention.get(path, "slay")
            if kind in made:
                shutil.copytree(folder / made[kind], folder / path)
                continue
            words = smaller(["python", "train.py", f"attention={kind}", f"run_directory={path}"])
            assert run_here(words, folder, monkeypatch) == 0
            made[kind] = path
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_page_does_what_it_says(
    name: str, pages: Any, clone: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    done = set()
    programs: list[str] = []
    for block in pages[name].blocks():
        if block.file is not None:
            (clone / block.file).parent.mkdir(parents=True, exist_ok=True)
            (clone / block.file).write_text(block.text, encoding="utf-8")
        elif block.language == "python":
            programs.append(block.text)
        elif block.language == "console":
            answers(block, clone, monkeypatch, capfd)
        else:
            for words in block.commands():
                if why_not(words):
                    if is_ours(words):
                        plan(words, clone, monkeypatch, capfd)
                    continue
                command = smaller(words)
                # the last value of an option counts: some are the same command now
                meaning = tuple({word.partition("=")[0]: word for word in command}.values())
                if meaning in done:
                    continue
                done.add(meaning)
                if words[0] == "python" and words[1].endswith(".py") and name not in APART:
                    code = run_here(command, clone, monkeypatch)
                    printed = capfd.readouterr()
                    assert code == 0, f"{' '.join(command)}\n{printed.out}\n{printed.err}"
                else:
                    run_apart(command, clone)
    if programs:
        run_apart([sys.executable, "-c", "\n".join(programs)], clone)


def answers(block: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    """Check that each command of a console block answers with the line below it."""
    lines = block.text.splitlines()
    told = [line for line in lines if not line.startswith("$ ")]
    assert len(told) == len(block.commands())
    for words, line in zip(block.commands(), told, strict=True):
        capfd.readouterr()
        assert run_here(words, folder, monkeypatch) == 2, words
        pattern = ".*".join(re.escape(part) for part in line.split("…"))
        assert re.fullmatch(pattern, capfd.readouterr().err.splitlines()[-1]), line
