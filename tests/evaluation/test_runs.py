"""Runs in folders: what is found, how they are told apart, and which may not be compared."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slayformer.cli import COMMANDS, compose
from slayformer.config_commands import ReportConfig
from slayformer.config_loading import load_config
from slayformer.errors import ConfigError, UserError
from slayformer.evaluation.fairness import find_differences
from slayformer.evaluation.report import make_report
from slayformer.evaluation.report_command import split_arguments
from slayformer.evaluation.report_table import latex, markdown, write_csv
from slayformer.evaluation.runs import Found, Recall, Run, find_runs, named_apart

SUMMARY = {
    **{"validation_loss": 3.0, "unigram_loss": 4.25, "tokens": 4000, "updates": 4},
    **{"bits_per_byte": 1.5, "tokens_per_second": 10.0, "peak_memory_bytes": 0, "parameters": 9},
}
CONFIG = {
    **{"attention.name": "slay", "attention.epsilon": 1e-3, "model.width": 64, "seed": 1},
    **{"optimizer.learning_rate": 0.01, "engine.precision": "fp32", "logging.every_updates": 1},
}


def make_run(name: str = "a", mechanism: str = "slay", seed: int = 1, **config: Any) -> Run:
    changed = {key.replace("__", "."): value for key, value in config.items()}
    config = {**CONFIG, "attention.name": mechanism, **changed}
    return Run(Path(name), mechanism, seed, SUMMARY, {"updates": 4}, [], "a" * 64, config)


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
            {"config": CONFIG | {"engine.deepspeed.prescale_gradients": True}},
            "engine.deepspeed.prescale_gradients differ .True and None",
        ),
        (
            {
                "summary": SUMMARY
                | {"changed_settings": ["optimizer.beta1 0.9 -> 0.5 after update 2"]}
            },
            "changed on the way differ .optimizer.beta1 0.9 -> 0.5 after update 2 and none",
        ),
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


def test_text_is_told_apart_by_its_identity() -> None:
    first, other = (replace(make_run(name), data_identity="c" * 64) for name in "ab")
    # the last digit of a sum that another machine adds up in another order
    digit = SUMMARY | {"unigram_loss": 4.25 + 1e-15}
    assert digit["unigram_loss"] != SUMMARY["unigram_loss"]
    assert find_differences([first, replace(other, summary=digit)]) == []
    # of a version that did not keep it
    assert find_differences([make_run("c"), replace(other, summary=digit)]) == []
    # the same tokens in another order
    moved = replace(other, data_identity="d" * 64)
    assert [str(one) for one in find_differences([first, moved])] == [
        "text (digest of its description) differs: dddddddddddd in b, cccccccccccc in a"
    ]


def test_runs_have_learned_at_the_same_rates() -> None:
    """A run made longer decays twice, though its plan is that of one that was long at once."""

    def course(name: str, rates: list[float], tokens: int = 100) -> Run:
        records: list[dict[str, Any]] = [
            {"kind": "train", "update": n, "learning_rate": rate, "tokens": n * tokens}
            for n, rate in enumerate(rates, 1)
        ]
        return replace(make_run(name), metrics=records)

    straight = course("a", [0.01, 0.0075, 0.005, 0.0025])
    assert find_differences([straight, course("b", [0.01, 0.0075 + 1e-17, 0.005, 0.0025])]) == []
    # what cancels on one machine may not on another
    ends = [course(name, [0.01, last]) for name, last in (("a", 0.0), ("b", 1e-20))]
    assert find_differences(ends) == []
    # cut off after a kill, or of a version that wrote fewer
    assert find_differences([straight, course("b", [0.01, 0.0075])]) == []
    (found,) = find_differences([straight, course("b", [0.01, 0.0, 0.005, 0.0025])])
    assert str(found) == "learning_rate of update 2 differs: 0.0 in b, 0.0075 in a"
    (found,) = find_differences([straight, course("b", [0.01], tokens=50)])
    assert str(found) == "tokens of update 1 differs: 50 in b, 100 in a"


def test_one_text_in_several_places_makes_one_row() -> None:
    def trained(place: str, seed: int, identity: str | None) -> Run:
        run = make_run(f"{place}{seed}", seed=seed, data__source__path=place, data__parts=seed)
        return replace(run, data_identity=identity)

    same = [trained("/mnt/ann/text", 1, "c" * 64), trained("/data/text", 2, "c" * 64)]
    assert [run.mechanism for run in named_apart(same)] == ["slay", "slay"]
    unknown = [trained("x", 1, None), trained("y", 1, "c" * 64)]
    assert [run.mechanism for run in named_apart(unknown)] == [
        "slay, data.source.path=x",
        "slay, data.source.path=y",
    ]


def test_null_is_told_from_settings() -> None:
    ramp: dict[str, Any] = {"batch__ramp__updates": 5}
    runs = [make_run("a", batch__ramp=None), make_run("b", **ramp)]
    assert [run.mechanism for run in named_apart(runs)] == ["slay", "slay, batch.ramp.updates=5"]


def test_what_shapes_no_result_may_differ() -> None:
    others = [
        make_run("b", seed=2, seed_=3, logging__every_updates=9, run_directory="elsewhere"),
        make_run("c", "linear_elu", attention__epsilon=0.7, data__cache_directory="x"),
        # an option that the version of the first run did not have
        make_run("d", "softmax", model__dropout=0.1, optimizer__z_loss=0.0),
        replace(make_run("e"), plan={"updates": 4, "context_parallel": 1}),
    ]
    assert find_differences([make_run("a"), *others]) == []


def test_runs_of_one_mechanism_are_told_apart_by_their_options() -> None:
    runs = [
        make_run("a"),
        make_run("b", seed=2),
        make_run("c", attention__epsilon=0.5, logging__every_updates=7),
        make_run("d", "softmax", attention__epsilon=0.9),
    ]
    assert [run.mechanism for run in named_apart(runs)] == [
        *("slay, epsilon=0.001", "slay, epsilon=0.001", "slay, epsilon=0.5", "softmax"),
    ]
    assert [run.mechanism for run in named_apart(runs[:2])] == ["slay", "slay"]
    with pytest.raises(UserError, match=r"a and e are the same run twice .slay, seed 1"):
        named_apart([make_run("a"), make_run("e")])


def test_options_that_are_not_those_of_the_file_stand_in_the_row(tmp_path: Path) -> None:
    window: dict[str, Any] = {"attention__local": "window", "attention__local_size": 64}
    runs = [
        make_run("a", seed=1, **window),
        make_run("b", seed=2, **window),
        # of a version with another option and of one that chose another way to compute
        make_run("c", "softmax", attention__gone=3, attention__backend="torch"),
        make_run("d", "my_own", attention__epsilon=0.5),
    ]
    name = "slay, local=window"
    report = make_report(runs, baseline="slay")
    assert {row.mechanism for row in report.rows} == {name, "softmax", "my_own"}
    # its only row
    assert report.baseline == name
    write_csv(tmp_path / "table.csv", report)
    for text in (markdown(report, []), latex(report), (tmp_path / "table.csv").read_text()):
        assert text.replace("\\_", "_").count(name) >= 2
    with pytest.raises(ConfigError, match=r"baseline=slay: .*slay, epsilon=0.001, local=window"):
        make_report([*runs, make_run("e", attention__epsilon=0.5)], baseline="slay")


def recall_run(
    name: str = "r", mechanism: str = "slay", seed: int = 1, found: float = 0.5, **config: Any
) -> Recall:
    """Return a recall run that found the share `found` of 4 pairs and half of it of 8."""
    changed = {key.replace("__", "."): value for key, value in config.items()}
    settings = {"attention.name": mechanism, "updates": 9, "pairs": [4, 8], **changed}
    model = {"layers": 2, "width": 64, "short_convolution": 4}
    summary = {
        **{"mechanism": mechanism, "seed": seed, "updates": 9, "chance": 1 / 64},
        **{"accuracy": {"4": found, "8": found / 2}, "config": {"model": model}},
    }
    return Recall(Path(name), mechanism, seed, summary, settings)


def test_recalls_of_several_kinds_are_no_one_table() -> None:
    runs = [make_run("a"), make_run("b", "softmax")]
    for change, told in (
        ({"updates": 10}, r"their updates differ \(10 and 9\)"),
        ({"pairs": [4]}, r"their pairs differ"),
        ({"model__width": 9}, ""),
    ):
        others = [recall_run(), recall_run("s", "softmax", **change)]
        if not told:
            # of a version without it
            assert len(make_report(runs, others).recalling) == 2
            continue
        with pytest.raises(UserError, match=f"s and r are no recall of one kind: {told}"):
            make_report(runs, others, allow_differences=True)
    with pytest.raises(UserError, match=r"r and again are the same run twice .slay, seed 1"):
        make_report(runs, [recall_run(), recall_run("again")])


def test_recall_stands_in_the_row_of_its_options() -> None:
    window: dict[str, Any] = {"attention__local": "window"}
    few: dict[str, Any] = {"attention__nodes": 2}
    recalls = [
        recall_run("r1", found=0.5, attention__local="none"),
        recall_run("r2", found=1.0, **window),
        recall_run("r3", "softmax", found=0.25),
        recall_run("r4", found=0.75, attention__local="none", **few),
    ]
    runs = [
        make_run("a", attention__local="none", attention__nodes=3),
        make_run("b", attention__nodes=3, **window),
        make_run("c", "softmax", optimizer__learning_rate=0.02),
        make_run("d", "softmax", optimizer__learning_rate=0.03),
    ]
    report = make_report(runs, recalls, allow_differences=True)
    assert {row.mechanism: row.recall.get("4") for row in report.rows} == {
        **{"slay, local=none": 0.5, "slay, local=window": 1.0},
        **{f"softmax, optimizer.learning_rate={rate}": 0.25 for rate in (0.02, 0.03)},
    }
    told = "Recall runs of slay, local=none, nodes=2 belong to no row: none has their options."
    assert told in report.statements
    assert "belong to no row" not in " ".join(make_report(runs[:1], recalls[:1]).statements)


def test_several_revisions_of_code_are_told() -> None:
    old, new = ({"git_revision": c * 40, "packages": {"torch": t}} for c, t in ("a2", "b3"))
    runs = [make_run("a"), make_run("b", "softmax"), make_run("c", "linear_elu")]

    def told(*environments: dict) -> str:
        pairs = zip(runs, environments, strict=True)
        made = [replace(run, environment=environment) for run, environment in pairs]
        return " ".join(make_report(made).statements)

    assert "revisions" not in told(old, old, {})
    assert "versions of torch" not in told(old, old, {})
    both = told(old, new, new)
    assert "Runs are of 2 revisions of the code (aaaaaaaaaaaa, bbbbbbbbbbbb)" in both
    assert "and of 2 versions of torch (2, 3)" in both


def test_folders_without_runs_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for folder, told in (
        (tmp_path, "no run here"),
        (tmp_path / "empty", "no run here"),
        (tmp_path / "missing", "there is no such folder"),
    ):
        with pytest.raises(UserError, match=f"{folder}: {told}"):
            find_runs([folder])
    assert find_runs([tmp_path / "empty"], required=False) == Found([], [], [])
    # begun, not finished
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "plan.json").write_text("{}")
    found = find_runs([tmp_path, tmp_path / "begun"])
    assert (found.runs, found.recalls, found.unfinished) == ([], [], ["begun"])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(("config.yaml", "a: [1"), ("config.yaml", "[1]"), ("plan.json", "[]")),
        *(("plan.json", "{"), ("summary.json", '{"finished": true}')),
    ],
)
def test_a_damaged_run_is_told_in_a_sentence(
    name: str, content: str, tiny_run: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run)
    (run / name).write_text(content)
    with pytest.raises(UserError, match=f"^{run}: unreadable run: [^\n]+$"):
        find_runs([run])


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
