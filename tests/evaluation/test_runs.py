"""Runs in folders: what is found, how they are told apart, and which may not be compared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slayformer.cli import COMMANDS, compose
from slayformer.config_commands import ReportConfig
from slayformer.config_loading import load_config
from slayformer.errors import UserError
from slayformer.evaluation.fairness import check_fair, find_differences
from slayformer.evaluation.report import make_report
from slayformer.evaluation.report_command import split_arguments
from slayformer.evaluation.report_table import latex, markdown
from slayformer.evaluation.runs import Run, find_runs, named_apart

SUMMARY = {
    **{"validation_loss": 3.0, "unigram_loss": 4.25, "tokens": 4000, "updates": 4},
    **{"bits_per_byte": 1.5, "tokens_per_second": 10.0, "peak_memory_bytes": 0, "parameters": 9},
}
CONFIG = {
    **{"attention.name": "slay", "attention.epsilon": 0.1, "model.width": 64, "seed": 1},
    **{"optimizer.learning_rate": 0.01, "engine.precision": "fp32", "logging.every_updates": 1},
}


def make_run(name: str = "a", mechanism: str = "slay", seed: int = 1, **config: Any) -> Run:
    changed = {key.replace("__", "."): value for key, value in config.items()}
    return Run(
        Path(name), mechanism, seed, SUMMARY, {"updates": 4}, [], "a" * 64, {**CONFIG, **changed}
    )


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tokenizer_identity": "b" * 64}, "tokenizer differ .bbbbbbbbbbbb and aaaaaaaaaaaa"),
        ({"plan": {"updates": 5}}, "plan.updates differ .5 and 4"),
        ({"summary": SUMMARY | {"unigram_loss": 4.26}}, "unigram_loss differ .4.26 and 4.25"),
        ({"summary": SUMMARY | {"tokens": 3000}}, "training tokens differ .3000 and 4000"),
        (
            {"metrics": [{"kind": "validation", "scored_tokens": 5}]},
            "scored validation tokens differ .5 and None",
        ),
        ({"config": CONFIG | {"model.width": 32}}, "model.width differ .32 and 64"),
        ({"config": CONFIG | {"optimizer.learning_rate": 0.1}}, "learning_rate differ .0.1 and"),
        ({"config": CONFIG | {"engine.precision": "bf16"}}, "precision differ .bf16 and fp32"),
        (
            {"config": CONFIG | {"initial_weights": "sha256 ab12"}},
            "initial_weights differ .sha256 ab12 and None",
        ),
    ],
)
def test_unequal_runs_are_refused_or_marked(change: dict, named: str) -> None:
    first, other = make_run("a", "softmax"), replace(make_run("b"), **change)
    with pytest.raises(UserError, match=f"b and a cannot be compared: their .*{named}.*allow_diff"):
        make_report([first, other])
    report = make_report([first, other], allow_differences=True)
    assert {row.mechanism.split(",")[0]: row.unfair for row in report.rows} == {
        **{"softmax": False, "slay": True},
    }
    (told,) = report.unequal
    assert "in b" in told
    text = markdown(report, [])
    assert "Not a fair comparison" in text
    assert f"- **{told}**" in text
    assert "| slay ≠ |" in text
    assert "Checked equal" not in text
    assert latex(report).count("\\textcolor{red}") > 5


def test_what_shapes_no_result_may_differ() -> None:
    others = [
        make_run("b", seed=2, seed_=3, logging__every_updates=9, run_directory="elsewhere"),
        make_run("c", "linear_elu", attention__epsilon=0.7, data__cache_directory="x"),
        # an option that the version of the first run did not have
        make_run("d", "softmax", model__dropout=0.1, optimizer__z_loss=0.0),
        replace(make_run("e"), plan={"updates": 4, "context_parallel": 1}),
    ]
    assert find_differences([make_run("a"), *others]) == []
    check_fair([make_run("a"), *others])


def test_runs_of_one_mechanism_are_told_apart_by_their_options() -> None:
    runs = [
        make_run("a"),
        make_run("b", seed=2),
        make_run("c", attention__epsilon=0.5, logging__every_updates=7),
        make_run("d", "softmax", attention__epsilon=0.9),
    ]
    assert [run.mechanism for run in named_apart(runs)] == [
        *("slay, epsilon=0.1", "slay, epsilon=0.1", "slay, epsilon=0.5", "softmax"),
    ]
    assert [run.mechanism for run in named_apart(runs[:2])] == ["slay", "slay"]
    with pytest.raises(UserError, match=r"a and e are the same run twice .slay, seed 1"):
        named_apart([make_run("a"), make_run("e")])


def test_folders_without_runs_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path, tmp_path / "empty", tmp_path / "missing"):
        with pytest.raises(UserError, match=f"{folder}: no run here"):
            find_runs([folder])
    # begun, not finished
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "plan.json").write_text("{}")
    found = find_runs([tmp_path, tmp_path / "begun"])
    assert (found.runs, found.recalls, found.unfinished) == ([], [], ["begun"])


def test_folders_are_told_from_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lr=0.1").mkdir()
    folders, options = split_arguments(
        ["runs/a", "lr=0.1", "baseline=slay", "--cfg=job", "allow_differences=true"]
    )
    assert folders == [Path("runs/a"), Path("lr=0.1")]
    assert options == ["baseline=slay", "--cfg=job", "allow_differences=true"]
    _, options = split_arguments(["runs/a", "baseline=slay, nodes=2"])
    composed = compose("report", options, folder=COMMANDS)
    assert load_config(composed, ReportConfig).baseline == "slay, nodes=2"
