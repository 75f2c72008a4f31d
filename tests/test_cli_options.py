"""What is typed after a command: quotes, letters, groups, and the options a run goes on with."""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from slayformer.cli import (
    compose,
    multirun_arguments,
    own_options,
    quoted,
)
from slayformer.config import RampConfig
from slayformer.config_loading import load_config, to_plain
from slayformer.errors import ConfigError, UserError
from slayformer.presets import load_preset, preset_names
from slayformer.registry import attention_entry

CONFIGURATIONS = Path(__file__).parents[1] / "configs"
EXPERIMENTS = sorted(path.stem for path in (CONFIGURATIONS / "experiment").glob("*.yaml"))


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
