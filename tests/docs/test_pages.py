"""README and docs are true: their commands are run, or declared here with the reason why not.

A bash block is run as it is printed, in order, in a copy of the project; what SMALLER appends makes
it a matter of seconds. A console block also shows what is answered, `…` standing for anything.
Python blocks are run as one program, and a block that names a file is written there.
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

ROOT = Path(__file__).resolve().parents[2]
NAMES = sorted(["README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))])

# what is appended to the commands of our scripts in which a pattern is found
TRAINING = (
    "budget.tokens=1024 batch.samples_per_update=2 validation.tokens=1024 schedule.warmup_updates=1"
)
SMALLER = {
    r"\btrain\.py|compare\.py": TRAINING,
    r"train\.py -m": "seed=1",
    r"compare\.py": "seeds=[1] threads=1",
    r"compare\.py attention=\[softmax,": "attention=[softmax,slay]",
    r"experiment=table5_cpu": "budget.tokens=null budget.updates=2 attention=[softmax,slay]",
    r"eval\.py": "tokens=600",
    r"generate\.py": "tokens=5",
    r"long_context\.py": "updates=2 schedule.warmup_updates=1 lengths_tokens=[64] samples=1",
    r"inspect_attention\.py": "attention=[slay] seeds=1 length=32 head_dim=[16]",
    r"bench_attention\.py": "mechanisms=[slay] peers=[torch_sdpa] lengths=[64] contexts=[64]"
    " heads=2 rounds=1",
    r"bench_train\.py": "quick=true attention=[slay] lengths=[64] tokens=64 rounds=1",
    r"paper\.py(?!.* results=)": "items=[figure_9] size=quick",
    r"paper\.py.* results=": "results=slayformer/paper/results/table5_cpu.json",
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


@pytest.mark.parametrize("pattern", NOT_RUN)
def test_what_is_not_run_is_there(pattern: str, pages: Any) -> None:
    commands = [command.line for page in pages.values() for command in page.commands()]
    assert any(re.search(pattern, command) for command in commands)


def plan(command: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Plan the training that a command would do with as many processes as it would start."""
    script, arguments, world_size = command.launched(folder)
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


def smaller(command: Any) -> list[str]:
    """Return the words of a command with what makes it a matter of seconds."""
    if not command.is_ours or {"--help", "dry_run=true"} & set(command):
        return list(command)
    appended = [more for pattern, more in SMALLER.items() if re.search(pattern, command.line)]
    return [*command, *" ".join(appended).split()]


@pytest.fixture
def clone(
    name: str, pages: Any, project: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> Path:
    """Return a copy of the project with the runs that the page names and does not make."""
    folder = project()
    made: dict[str, Path] = {}
    for path in sorted(set(re.findall(r"runs/[A-Z]+\b", pages[name].text))):
        mechanism = "softmax" if path in ("runs/B", "runs/ANOTHER") else "slay"
        if mechanism in made:
            shutil.copytree(made[mechanism], folder / path)
        else:
            options = [f"attention={mechanism}", f"run_directory={path}", *TRAINING.split()]
            assert run_here(["python", "train.py", *options], folder, monkeypatch) == 0
            made[mechanism] = folder / path
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
            for printed in block.commands():
                if any(re.search(pattern, printed.line) for pattern in NOT_RUN):
                    if printed.is_ours:
                        plan(printed, clone, monkeypatch, capfd)
                    continue
                words = smaller(printed)
                # the last value of an option counts: some are the same command now
                meaning = tuple({word.partition("=")[0]: word for word in words}.values())
                if meaning in done:
                    continue
                done.add(meaning)
                if words[0] == "python" and words[1].endswith(".py") and name not in APART:
                    code = run_here(words, clone, monkeypatch)
                    said = capfd.readouterr()
                    assert code == 0, f"{' '.join(words)}\n{said.out}\n{said.err}"
                else:
                    run_apart(words, clone)
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
