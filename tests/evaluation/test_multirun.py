"""`train.py -m`: which runs it means, what it refuses, and that it goes on where it stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slayformer.cli import multirun_arguments
from slayformer.errors import UserError
from slayformer.evaluation.multirun import combinations, run

SMALL = [
    *("tokenizer=bytes", "data=text", "data.validation_fraction=0.3", "logging.sample_tokens=0"),
    *("model.layers=1", "model.heads=2", "model.width=8", "model.context_length=16"),
    *("budget=updates", "budget.updates=25", "validation.tokens=7000"),
]


def test_flags_are_told_from_overrides() -> None:
    assert multirun_arguments(["attention=slay"]) is None
    arguments = ["--config-dir", "mine", "-m", "--local_rank=0", "attention=slay,softmax"]
    assert multirun_arguments(arguments) == (["attention=slay,softmax"], ["--config-dir", "mine"])
    assert multirun_arguments(["seed=1", "--multirun"]) == (["seed=1"], [])


def test_every_combination_has_a_folder_of_its_own() -> None:
    directory, jobs = combinations(
        [
            *("attention=slay,softmax", "seed=range(1,3)", "model.width=32"),
            *("logging.sample_prompt='a, b'", "run_directory='my runs'", "~data"),
        ]
    )
    same = ["model.width=32", "logging.sample_prompt='a, b'", "~data"]
    assert directory == Path("my runs").absolute()
    assert jobs == {
        f"{name}-seed{seed}": [f"attention={name}", f"seed={seed}", *same]
        for name in ("slay", "softmax")
        for seed in (1, 2)
    }
    # values that look the same in a name of a file
    _, jobs = combinations(["logging.sample_prompt='a b','a?b'", "+experiment=cpu_race"])
    assert [*jobs] == ["sample_prompt_a_b_", "sample_prompt_a_b__"]
    assert [job[0] for job in jobs.values()] == [
        *("logging.sample_prompt='a b'", "logging.sample_prompt='a?b'"),
    ]
    directory, jobs = combinations(["seed=3"])
    assert (directory.parent.name, jobs) == ("multirun", {"run": ["seed=3"]})
    # given twice, the last counts
    _, jobs = combinations(["seed=1,2", "attention=slay,softmax", "seed=3"])
    assert jobs == {name: ["seed=3", f"attention={name}"] for name in ("slay", "softmax")}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run_directory=a,b", "run_directory=a,b: one folder for all runs"),
        ("run_directory=null", "run_directory=null: one folder"),
        ("resume=auto", "resume=auto: .*call it again"),
        ("dry_run=true", "dry_run=true: .*without -m"),
        ("attention=glob(slay*)", r"attention=glob\(slay\*\): name the values"),
        ("seed=[1", "seed=.1: not understood"),
        ("attention=slay,sley", "did you mean slay"),
        ("model.heads=2,7", "model.heads=7"),
    ],
)
def test_what_cannot_work_is_refused_before_any_run(
    override: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        run([*SMALL, "data.source.path=documents", override], [])
    assert not any(tmp_path.iterdir())


def test_a_launcher_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="without a launcher"):
        run(["seed=1,2"], [])


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match=r"run_directory=.*file: the folder cannot be made: File"):
        run([*SMALL, "data.source.path=documents", f"run_directory={tmp_path}/file", "seed=1"], [])


@pytest.mark.slow
def test_a_failed_run_is_told_and_the_next_call_makes_it(
    run_command: Any, text_folder: Path, tmp_path: Path
) -> None:
    home = tmp_path / "several"
    home.mkdir()
    (home / "softmax").write_text("in the way")
    data = [f"data.source.path={text_folder}", f"data.cache_directory={tmp_path / 'cache'}"]
    settings = [*SMALL, *data, f"run_directory={home}"]
    command = ["train.py", "-m", "attention=uniform,softmax", *settings]

    finished = run_command(command, cwd=tmp_path)
    assert finished.code == 1, finished.stdout + finished.stderr
    assert "did not finish: softmax" in finished.stdout
    assert json.loads((home / "uniform" / "summary.json").read_text())["mechanism"] == "uniform"

    (home / "softmax").unlink()
    before = (home / "uniform" / "summary.json").stat().st_mtime_ns
    # in another order, with what says nothing of the training
    again = ["-m", "attention=softmax,uniform", "logging.every_updates=2"]
    finished = run_command(["train.py", *again, *settings], cwd=tmp_path)
    assert finished.code == 0, finished.stdout + finished.stderr
    assert "uniform: finished before, not run again" in finished.stdout
    assert (home / "uniform" / "summary.json").stat().st_mtime_ns == before
    assert f"python scripts/report.py {home}" in finished.stdout

    for other, told in (
        ("optimizer.learning_rate=0.5", "optimizer.learning_rate=0.5: the run in"),
        # folders have the names of what varies, and this does not
        ("seed=2", "seed=2: the run in"),
        ("engine.deepspeed={prescale_gradients: true}", "made with null"),
    ):
        finished = run_command([*command, other], cwd=tmp_path)
        assert finished.code == 2
        assert told in finished.stderr

    # the folder as one comparison, and its runs by name
    for folders in ([f"{home}"], [f"{home}/softmax", f"{home}/uniform"]):
        finished = run_command(["scripts/report.py", *folders, "baseline=uniform"], tmp_path)
        assert finished.code == 0, finished.stderr
    (report,) = (tmp_path / "reports").iterdir()
    for where in (home, report):
        assert {"comparison.html", "comparison.tex", "curves.svg"} <= {
            p.name for p in where.iterdir()
        }
        record = json.loads((where / "comparison.json").read_text())
        (softmax,) = [row for row in record["rows"] if row["mechanism"] == "softmax"]
        assert (record["baseline"], softmax["difference"]["covers"]) == ("uniform", "documents")
