"""A user's mistake is one line and exit code 2, from composing to checking; flags of launchers."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import train
from slayformer import cli
from slayformer.cli import (
    compose,
    entry_point,
    strip_launcher_arguments,
)
from slayformer.errors import DataError, UserError, nearest

# each with a mistake and the key it should have been
SCRIPTS = {
    "train.py": ("modl.layers=3", "model.layers"),
    "eval.py": ("checkpiont=3", "checkpoint"),
    "scripts/compare.py": ("modl.layers=3", "model.layers"),
    "scripts/report.py": ("baselin=slay", "baseline"),
    "scripts/prepare_data.py": ("modl.layers=3", "model.layers"),
    "scripts/recall.py": ("modl.layers=3", "model.layers"),
    "scripts/inspect_attention.py": ("head_dimm=3", "head_dim"),
    "scripts/export_hf.py": ("checkpiont=3", "checkpoint"),
    "scripts/bench_attention.py": ("head_dimm=3", "head_dim"),
    "scripts/bench_train.py": ("lenghts=3", "lengths"),
    "scripts/long_context.py": ("pair=3", "pairs"),
}
CONFIGURATIONS = Path(__file__).parents[1] / "configs"
OPTIONS = sorted(path.stem for path in (CONFIGURATIONS / "attention").glob("*.yaml"))
MECHANISMS = ["linear_elu", "slay", "softmax", "yat_spherical"]


# what is typed after `python train.py`, and what the line must say
MISTAKES = [
    # a mechanism, an option of a group, an experiment that does not exist
    ("attention=sley", ["attention=sley", "did you mean slay?", *OPTIONS]),
    ("attention.mechanism=sley", ["attention=sley", "did you mean slay?", *MECHANISMS]),
    ("model=gpt2_smal", ["model=gpt2_smal", "gpt2_mini", "did you mean gpt2_small?"]),
    ("+experiment=nope", ["experiment=nope", "gpt2_small_chinchilla"]),
    ("model=null", ["model=null"]),
    ("--config-name=nope", ["nope"]),
    # what reads like a reference to another option, escaped or not
    ("logging.sample_prompt=${x}", ["logging.sample_prompt=${", "'x' not found"]),
    (r"logging.sample_prompt=\${x}", ["logging.sample_prompt=${x}", "without ${"]),
    # a key that does not exist, at any depth, added with a plus too
    ("modl.layers=3", ["modl.layers", "unknown key", "did you mean model.layers?"]),
    ("layers=3", ["layers: unknown key", "did you mean model.layers?"]),
    ("model.layrs=3", ["model.layrs: unknown key", "did you mean layers?"]),
    ("optimizer.lr=1", ["optimizer.lr: unknown key", "did you mean learning_rate?"]),
    ("attention.nods=3", ["attention.nods: unknown key", "did you mean nodes?"]),
    ("batch.ramp.start_samples=8", ["batch.ramp has no fields", "batch.ramp={start_samples"]),
    ("+model.foo=1", ["model.foo=1: unknown key", "layers"]),
    ("+seed=1", ["+seed=1: already there; write seed=1"]),
    ("+modle=1", ["modle=1: unknown key", "did you mean model?"]),
    ("+attention.foo=1", ["attention.foo=1: unknown key", "nodes"]),
    ("xyzzy/abc=1", ["xyzzy/abc: unknown key", "--help"]),
    # a key of another option of the group
    ("data.source.path=x", ["data.source.path: unknown key", "it comes with data=", "data=text"]),
    (
        "data.source={path: x}",
        ["data.source.path: unknown key", "it comes with data=", "data=text"],
    ),
    # a value of the wrong type, and one that is missing
    ("model.layers=abc", ["model.layers=abc: must be a whole number"]),
    ("model.layers=null", ["model.layers=null: must be a whole number"]),
    ("model.layers=[1,2]", ["model.layers=[1, 2]: must be a whole number"]),
    ("attention.nodes=few", ["attention.nodes=few: must be a whole number"]),
    ("budget.tokens=1e6", ["budget.tokens=1000000.0: must be a whole number or null: 1000000"]),
    ("optimizer.learning_rate=2e-3x", ["optimizer.learning_rate=2e-3x: must be a number"]),
    ("dry_run=maybe", ["dry_run=maybe: must be true or false"]),
    ("batch.ramp=3", ["batch.ramp=3: must be the fields {start_samples", "or null"]),
    ("batch.ramp={start_samples:8,updates:9}", ["batch.ramp.increment_samples=NUMBER"]),
    ("data=text", ["data.source.path=FOLDER_OR_FILE"]),
    ("data=huggingface", ["data.source.path=DATASET_OR_FOLDER"]),
    ("~model.layers", ["must be given: model.layers=NUMBER"]),
    ("~attention", ["attention=null", "attention=slay"]),
    ("seed=${nope}", ["seed", "'nope' not found"]),
    # a value out of range, alone or beside another
    ("model.layers=-1", ["model.layers=-1: must be greater than 0"]),
    ("model.dropout=1.5", ["model.dropout=1.5: must be", "less than 1"]),
    ("optimizer.learning_rate=inf", ["optimizer.learning_rate=inf: must be a finite number"]),
    ("attention.epsilon=0", ["attention.epsilon=0.0: must be greater than 0"]),
    ("model.heads=7", ["model.heads=7", "model.width=128", "[4, 8]"]),
    ("schedule.decay=lin", ["schedule.decay=lin: did you mean linear?", "cosine"]),
    ("budget.updates=20", ["use", "budget=updates budget.updates=20"]),
    ("budget.tokens=null", ["use", "budget=tokens budget.tokens=NUMBER"]),
    ("budget=updates", ["use", "budget=updates budget.updates=NUMBER"]),
    (
        "batch.samples_per_device=4",
        ["batch.samples_per_update=null batch.samples_per_device=4"],
    ),
    # an override or a flag that cannot be read
    ("model.layers=[1", ["model.layers=[1: not understood; this is written key=[A,B]"]),
    ("attention=[slay,…]", ["attention=[slay,…]: not understood; this is written key=[A,B]"]),
    ("batch={ramp: nu", ["nu: not understood; this is written key={A: 1, B: 2}"]),
    ("run_directory=a b=c", ["text like this is quoted: \"run_directory='a b=c'\""]),
    ("attention", ["attention: not understood", "key=value"]),
    ("=3", ["=3"]),
    ("seed=1,2", ["seed=1,2: one value", "seed=[A,B]", "train.py -m", "\"seed='1,2'\""]),
    ("--seed=1", ["--seed=1", "key=value"]),
    ("--cfg", ["--cfg", "expected one argument"]),
    ("attention.name=nope", ["attention.name=nope", "label of slay"]),
    ("seed=9223372036854775807", ["seed=9223372036854775807", "below 2**31"]),
    ("run_directory=", ["run_directory=''", "null for a new one"]),
    ("--multirun", ["dry_run=true", "without -m"]),
]


def one_line(stderr: str) -> str:
    """Return the only line of `stderr`, an error."""
    lines = stderr.splitlines()
    assert len(lines) == 1, stderr
    assert lines[0].startswith("error: ")
    return lines[0]


@pytest.mark.parametrize(("argument", "told"), MISTAKES)
def test_mistake_is_one_line_that_tells_what_works(
    argument: str,
    told: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # should it be accepted after all, no training starts
    monkeypatch.setattr(sys, "argv", ["train.py", "dry_run=true", argument])
    with pytest.raises(SystemExit) as exit_:
        entry_point(train.main)
    printed = capsys.readouterr()
    assert exit_.value.code == 2
    assert printed.out == ""
    line = one_line(printed.err)
    assert [part for part in told if part not in line] == [], line


@pytest.mark.parametrize("script", SCRIPTS)
def test_command_tells_a_mistake_in_one_line(script: str, run_command: Any, tmp_path: Path) -> None:
    wrong, right = SCRIPTS[script]
    finished = run_command([script, wrong], cwd=tmp_path)
    assert finished.code == 2
    assert f"did you mean {right}?" in one_line(finished.stderr)
    assert finished.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_only_training_makes_several_runs(run_command: Any) -> None:
    finished = run_command(["eval.py", "-m", "batch_samples=1,2"])
    assert finished.code == 2
    assert "--multirun: only train.py has it" in one_line(finished.stderr)


def test_command_refuses_an_unknown_flag_in_one_line(run_command: Any) -> None:
    finished = run_command(["eval.py", "--checkpoint", "runs/a"])
    assert finished.code == 2
    assert "--checkpoint" in one_line(finished.stderr)


def test_a_reader_may_stop_early() -> None:
    reading, writing = os.pipe()
    # nobody reads: every write fails, as after `head` has ended
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "train.py", "--help"],
        cwd=CONFIGURATIONS.parent,
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_what_a_terminal_cannot_show_ends_no_command(encoding: str) -> None:
    # a quotation mark, what is no letter, and a byte of a file name that is not UTF-8
    say = r"from rich.console import Console; Console().print('“\ufffd\udcff', soft_wrap=True)"
    program = f"from slayformer.cli import entry_point\nentry_point(lambda: exec({say!r}))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONIOENCODING": encoding},
        capture_output=True,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    shown = r"“\ufffd\udcff".encode(encoding, "backslashreplace")
    assert done.stdout.replace("\ufffd".encode(), rb"\ufffd").strip() == shown


def test_full_error_shows_the_traceback(run_command: Any) -> None:
    finished = run_command(["train.py", "model.layrs=3"], env={"HYDRA_FULL_ERROR": "1"})
    assert finished.code == 1
    assert "Traceback" in finished.stderr
    assert "ConfigCompositionException" in finished.stderr


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_lists_keys_and_imports_nothing_heavy(script: str, run_command: Any) -> None:
    finished = run_command(["-X", "importtime", script, "--help"])
    assert finished.code == 0
    keys = {"eval.py": "checkpoint", "scripts/export_hf.py": "checkpoint"}
    key = {**keys, "scripts/report.py": "baseline"}.get(script, "attention")
    assert key in finished.stdout
    # a line of -X importtime ends in "| " and the module, indented by depth
    imported = {line.rpartition("|")[2].strip() for line in finished.stderr.splitlines()}
    assert "omegaconf" in imported
    heavy = {"torch", "deepspeed", "transformers", "datasets", "wandb", "matplotlib"}
    assert imported & heavy == set()


def test_help_names_every_mechanism(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--help"])
    with pytest.raises(SystemExit) as exit_:
        entry_point(train.main)
    assert exit_.value.code == 0
    listed = capsys.readouterr().out
    assert set(MECHANISMS) <= set(OPTIONS)
    assert f"attention: {', '.join(OPTIONS)}" in listed


@pytest.mark.parametrize(
    "launched",
    [["--local_rank=1"], ["--local-rank=1"], ["--local_rank", "1"], ["--local-rank", "1"]],
)
def test_launcher_arguments_are_dropped(launched: list[str]) -> None:
    assert strip_launcher_arguments([*launched, "attention=softmax"]) == ["attention=softmax"]
    assert strip_launcher_arguments(["seed=1", *launched]) == ["seed=1"]
    assert compose("train", [*launched, "seed=7"]).seed == 7


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--no_local_rank"]])
def test_launched_command_tells_a_mistake_once(flags: list[str], run_command: Any) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    launcher = ["deepspeed", "--num_accelerators", "2", "--master_port", port, *flags]
    finished = run_command([*launcher, "train.py", "modl.layers=3"])
    assert finished.code != 0
    printed = (finished.stdout + finished.stderr).splitlines()
    errors = [line for line in printed if "unknown key" in line]
    assert errors == ["error: modl.layers: unknown key; did you mean model.layers?"]


def test_what_one_rank_alone_finds_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def mistake() -> None:
        raise UserError("no GPU left")

    monkeypatch.setattr(cli, "OTHER_RANKS_WAIT_S", 0)
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(SystemExit) as exit_:
        entry_point(mistake)
    assert exit_.value.code == 2
    assert capsys.readouterr().err == "error: rank 3: no GPU left\n"


def test_only_user_errors_become_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def mistake() -> None:
        raise DataError("shard_00000.bin is damaged:\n  make it again")

    def fault() -> None:
        raise ValueError("ours")

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as exit_:
        entry_point(mistake)
    assert exit_.value.code == 2
    assert capsys.readouterr().err == "error: shard_00000.bin is damaged: make it again\n"
    with pytest.raises(ValueError, match="ours"):
        entry_point(fault)
    with pytest.raises(SystemExit) as exit_:
        entry_point(interrupt)
    assert exit_.value.code == 130


def test_nearest_knows_initials_and_spelling() -> None:
    names = ["learning_rate", "beta1", "weight_decay"]
    assert nearest("wd", names).startswith(
        "did you mean weight_decay? (choose from beta1, learning_"
    )
    assert nearest("beta_1", names).startswith("did you mean beta1?")
    assert nearest("zzz", names) == "choose from beta1, learning_rate, weight_decay"


@pytest.mark.parametrize(("last", "shut_down"), [("", True), ("raise ValueError", False)])
def test_process_groups_are_shut_down_at_the_exit_unless_the_command_failed(
    last: str, shut_down: bool
) -> None:
    program = f"""
import atexit
import torch.distributed as dist
atexit.register(lambda: print("shut down:", not dist.is_initialized()))
from slayformer.cli import entry_point
from slayformer.training import distributed

def main():
    distributed.initialize()
    {last or "pass"}

entry_point(main) if {bool(last)} else main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == f"shut down: {shut_down}\n", done.stderr
