"""A user's mistake is one line and exit code 2, from composing to checking; flags of launchers."""

from __future__ import annotations

import dataclasses
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

import train
from slayformer import cli
from slayformer.cli import (
    compose,
    entry_point,
    multirun_arguments,
    own_options,
    quoted,
    strip_launcher_arguments,
)
from slayformer.config import RampConfig
from slayformer.config_loading import load_config, to_plain
from slayformer.errors import ConfigError, DataError, UserError, nearest
from slayformer.presets import load_preset, preset_names
from slayformer.registry import attention_entry

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
EXPERIMENTS = sorted(path.stem for path in (CONFIGURATIONS / "experiment").glob("*.yaml"))
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


@pytest.mark.parametrize(
    "text", ["Übung", "Grüße aus Köln", "書/文.txt", "./naïve-1", "Ω", "runs/α:β"]
)
def test_letters_beyond_ascii_need_no_quotes(text: str, tmp_path: Path) -> None:
    for option in (f"initial_weights={text}", f"initial_weights='{text}'"):
        assert compose("train", [option]).initial_weights == text
    assert multirun_arguments(["-m", f"run_directory={text}"]) == ([f"run_directory='{text}'"], [])
    run = tmp_path / text
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("{seed: 3, run_directory: null, resume: null}")
    going_on = own_options([f"run_directory={run}", "resume=auto"])
    assert going_on == {"seed": 3, "run_directory": str(run), "resume": "auto"}


@pytest.mark.parametrize(
    "text", ["a b=c", "Ü{bung", "(it's", "a{b\\", "$HOME=(`", "1,2", 'say "a=b"']
)
def test_the_quotes_that_are_told_work(text: str) -> None:
    with pytest.raises(UserError, match=r"text(?: like this)? is quoted: ") as told:
        compose("train", [f"initial_weights={text}", "dry_run=true"])
    typed = shlex.split(str(told.value).partition("is quoted: ")[2])
    assert compose("train", typed).initial_weights == text


def test_the_options_listed_are_those_that_can_be_set() -> None:
    for name in preset_names():
        given = load_preset(name)
        options = {item.name: getattr(given, item.name) for item in dataclasses.fields(given)}
        del options["mechanism"]
        if given.mechanism is None:
            del options["name"]
        if attention_entry(given.mechanism or name).attention.backends == ("auto", "torch"):
            del options["backend"]
        with pytest.raises(ConfigError) as told:
            load_preset(name, xyzzy=1)
        listed = ", ".join(sorted(options))
        hint = f"choose from {listed}" if options else f"{name} has no options"
        assert str(told.value) == f"attention.xyzzy=1: unknown key; {hint}"
        effective = options.keys() - given.without_effect().keys() - {"name"}
        assert load_preset(name, **{key: options[key] for key in effective}) == given
    # the same for what is typed, with a plus or without
    hint = r"^attention\.nodes(=5)?: unknown key; choose from backend, delta$"
    for typed in ("attention.nodes=5", "+attention.nodes=5"):
        with pytest.raises(UserError, match=hint):
            load_config(compose("train", ["attention=linear_elu", typed]))


def test_a_mechanism_without_options_says_so() -> None:
    with pytest.raises(UserError, match=r"^attention\.nodes: unknown key; softmax has no options$"):
        compose("train", ["attention=softmax", "attention.nodes=5"])


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


@pytest.mark.parametrize(
    "value", ["runs/a-b_c.1:2", "r b,c=d", "it's", "back\\slash", "end\\", "ü", "a(b)"]
)
def test_quoted_values_come_back_as_they_were(value: str) -> None:
    assert compose("train", [f"run_directory={quoted(value)}"]).run_directory == value


@pytest.mark.parametrize("pattern", ["^$", "^# ", r"^\d+\.", "Chapter (I|V)+", "a,b", "=", "null"])
def test_a_regular_expression_needs_no_quotes(pattern: str) -> None:
    for written in (pattern, quoted(pattern)):
        source = compose("train", ["data=text", f"data.source.document_start={written}"]).data
        assert source.source.document_start == (None if pattern == "null" else pattern)


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


def test_composing_leaves_arguments_and_environment_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["program", "seed=5"])
    before = dict(os.environ), list(sys.argv)
    assert compose("train").seed == 5
    assert compose("train", ["seed=6"]).seed == 6
    with pytest.raises(UserError):
        compose("train", ["seeed=6"])
    assert (dict(os.environ), list(sys.argv)) == before


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_composes(experiment: str) -> None:
    config = load_config(compose("train", [f"+experiment={experiment}"]))
    assert config.model.layers > 0


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


def test_an_experiment_needs_no_plus() -> None:
    composed = [compose("train", [f"{plus}experiment=cpu_race", "seed=3"]) for plus in ("", "+")]
    assert composed[0] == composed[1]
    assert composed[0].budget.updates == 750


def test_a_run_goes_on_with_its_own_options(tmp_path: Path) -> None:
    run = tmp_path / "a run's, folder"
    run.mkdir()
    place = f"run_directory={quoted(str(run))}"
    assert own_options([place, "resume=auto"]) is None
    started = load_config(compose("train", ["attention=slay_best", "seed=7", place]))
    file = run / "config.yaml"
    OmegaConf.save(OmegaConf.create(to_plain(started)), file)
    for arguments in (["resume=auto", place], ["--local_rank=0", place, "resume=auto"]):
        going_on = own_options(arguments)
        assert going_on is not None
        assert load_config(going_on) == dataclasses.replace(started, resume="auto")
    # the plan of the run itself
    planned = own_options([place, "resume=auto", "dry_run=true"])
    assert planned is not None
    assert load_config(planned) == dataclasses.replace(started, resume="auto", dry_run=True)
    # with changes: values by themselves, groups as a whole
    changes = ["budget.updates=9", "budget=updates", "engine=zero2", "batch.ramp=null"]
    going_on = own_options([place, "resume=auto", *changes])
    assert going_on is not None
    changed = load_config(going_on)
    assert changed.engine.zero_stage == 2
    budget = dataclasses.replace(started.budget, tokens=None, updates=9)
    assert changed == dataclasses.replace(
        started, resume="auto", budget=budget, engine=changed.engine
    )
    # what holds values of its own is one too: replaced, taken away, or part of it
    ramp = RampConfig(start_samples=8, increment_samples=8, updates=5)
    with_ramp = dataclasses.replace(started, batch=dataclasses.replace(started.batch, ramp=ramp))
    OmegaConf.save(OmegaConf.create(to_plain(with_ramp)), file)
    for change, after in (
        ("batch.ramp=null", None),
        ("batch.ramp={updates: 9}", dataclasses.replace(ramp, updates=9)),
        ("batch={ramp: {updates: 9}}", dataclasses.replace(ramp, updates=9)),
        ("batch.ramp.updates=9", dataclasses.replace(ramp, updates=9)),
    ):
        going_on = own_options([place, "resume=auto", change])
        assert going_on is not None
        batch = dataclasses.replace(with_ramp.batch, ramp=after)
        assert load_config(going_on).batch == batch
    # anything else is composed as ever
    anew = ("attention=slay_best", "experiment=cpu_race", "~seed", "no.such=1", "seeed=1")
    for arguments in ([place], [place, f"resume={run}"], ["(="]):
        assert own_options(arguments) is None
    for option in anew:
        assert own_options([place, "resume=auto", option]) is None
    file.write_text("seed: [")
    with pytest.raises(UserError, match=r"config\.yaml cannot be read"):
        own_options([place, "resume=auto"])


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
