"""Tables and curves from synthetic runs: values computed by hand."""

from __future__ import annotations

import csv
import io
import json
import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slayformer.errors import ConfigError, UserError
from slayformer.evaluation.report import make_report, make_rows
from slayformer.evaluation.report_figure import losses, positions_apart
from slayformer.evaluation.report_files import write_report
from slayformer.evaluation.report_table import latex, markdown, print_report
from slayformer.evaluation.runs import Recall, Run, is_finished
from slayformer.tables import latex_text

MIB = 2**20


def synthetic_run(
    mechanism: str,
    seed: int,
    loss: float,
    *,
    tokens_per_second: float = 1000.0,
    memory_mib: int = 100,
) -> Run:
    summary = {
        "mechanism": mechanism,
        "seed": seed,
        "updates": 4,
        "tokens": 4000,
        "parameters": 12345,
        "validation_loss": loss,
        "perplexity": math.inf if loss > 700 else math.exp(loss),
        "bits_per_byte": loss / 2,
        "unigram_loss": 4.25,
        "tokens_per_second": tokens_per_second,
        "peak_memory_bytes": memory_mib * MIB,
        "seconds": 4.0,
        "finished": True,
    }
    metrics = [
        {"kind": "train", "update": u, "tokens": 1000 * u, "loss": loss + 4 / u + 0.05 * seed}
        for u in (1, 2, 3, 4)
    ] + [
        {
            "kind": "validation",
            "update": u,
            "tokens": 1000 * u,
            "loss": loss + (4 - u) / 2,
            "scored_tokens": 640,
        }
        for u in (2, 4)
    ]
    plan = {"updates": 4, "tokens": 4000}
    return Run(Path(f"{mechanism}-seed{seed}"), mechanism, seed, summary, plan, metrics, "a" * 64)


def three_mechanisms() -> list[Run]:
    return [
        synthetic_run("softmax", 1, 3.5),
        synthetic_run("softmax", 2, 3.1, tokens_per_second=3000.0, memory_mib=140),
        synthetic_run("slay", 1, 3.0),
        synthetic_run("slay", 2, 3.2),
        synthetic_run("slay", 3, 3.1),
        synthetic_run("linear_elu", 1, 3.8),
    ]


def test_rows_are_hand_computed_means() -> None:
    slay, softmax, elu = make_rows(three_mechanisms())
    assert (slay.mechanism, softmax.mechanism, elu.mechanism) == ("slay", "softmax", "linear_elu")
    # sample standard deviation: sqrt((0.1^2 + 0.1^2) / 2) and sqrt(2 * 0.2^2 / 1)
    assert slay.loss == pytest.approx(3.1)
    assert slay.loss_std == pytest.approx(0.1)
    assert softmax.loss == pytest.approx(3.3)
    assert softmax.loss_std == pytest.approx(0.2828427124746)
    assert elu.loss_std is None
    assert softmax.perplexity == pytest.approx(27.1126389207)
    assert softmax.bits_per_byte == pytest.approx(1.65)
    assert softmax.tokens_per_second == pytest.approx(2000.0)
    assert softmax.peak_memory_mib == 140
    assert [slay.seeds, softmax.seeds, elu.seeds] == [[1, 2, 3], [1, 2], [1]]


def test_a_diverged_mechanism_comes_last() -> None:
    runs = [synthetic_run("slay", 1, math.nan), *three_mechanisms()[:2]]
    assert [row.mechanism for row in make_rows(runs)] == ["softmax", "slay"]


@pytest.mark.parametrize("last", [math.nan, math.inf, 1e6])
def test_a_seed_that_diverged_is_reported_in_every_file(tmp_path: Path, last: float) -> None:
    stretch = {"first": 0, "last": 0, "tokens": 4}
    runs = [
        replace(run, summary={**run.summary, "loss_by_position": [{**stretch, "loss": loss}]})
        for run in [*three_mechanisms()[:3], synthetic_run("slay", 2, last)]
        for loss in [run.summary["validation_loss"]]
    ]
    report = make_report(runs)
    write_report(tmp_path, report)
    print_report(report)
    slay = report.rows[-1]
    assert slay.mechanism == "slay"
    std = (last - 3.0) / 2**0.5 if math.isfinite(last) else math.nan
    assert slay.loss_std == pytest.approx(std, nan_ok=True)
    # NaN and infinities are no JSON
    text = (tmp_path / "comparison.json").read_text(encoding="utf-8")
    record = json.loads(text, parse_constant=lambda name: pytest.fail(name))
    assert record["rows"][-1]["loss"] == (slay.loss if math.isfinite(last) else None)
    assert (tmp_path / "losses.png").stat().st_size > 500


def test_report_files_hold_the_table(tmp_path: Path) -> None:
    report = make_report(three_mechanisms(), notes=["Did not finish: yat seed 2."])
    rows = report.rows
    files = write_report(tmp_path, report)
    assert sorted(path.name for path in files) == sorted(path.name for path in tmp_path.iterdir())
    assert {path.suffix for path in files} == {
        ".md",
        ".csv",
        ".tex",
        ".json",
        ".html",
        ".png",
        ".svg",
    }
    lines = (tmp_path / "comparison.md").read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if "|" in line]
    assert cells[0][:2] == ["mechanism", "validation loss (nats/token)"]
    assert cells[0][2] == "difference to softmax [95 % interval]"
    # over seeds 1 and 2: −0.5 and +0.1, so −0.2 ± t(0.975, 1) * 0.3
    assert cells[2][:3] == ["slay", "3.1000 ± 0.1000", "−0.2000 [−4.0119, +3.6119]"]
    assert cells[3][:3] == ["softmax", "3.3000 ± 0.2828", "–"]
    # with seed 1 of softmax, 3.5
    expected = ["linear_elu", "3.8000 (1 seed)", "+0.3000"]
    expected += ["44.70", "1.9000", "1,000", "100", "12,345"]
    expected += ["–"] * 3
    assert cells[4] == expected
    text = "\n".join(lines)
    assert "over seeds: slay 1, 2, 3; softmax 1, 2; linear_elu 1." in text
    assert "Unigram floor: 4.2500 nats/token" in text
    assert "640 validation tokens" in text
    assert "Did not finish: yat seed 2." in text
    assert "softmax (slay): paired by seed, with the 95 % confidence interval over seeds." in text
    assert "softmax (linear_elu): one seed and no losses of two documents" in text

    with (tmp_path / "comparison.csv").open(encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    assert [line["mechanism"] for line in table] == ["slay", "softmax", "linear_elu"]
    assert float(table[1]["loss_std"]) == pytest.approx(0.2828427124746)
    assert table[2]["loss_std"] == ""
    assert table[0]["seeds"] == "1 2 3"
    assert (table[0]["difference_seeds"], table[1]["difference_seeds"]) == ("1 2", "")
    assert float(table[0]["difference_half_width"]) == pytest.approx(0.3 * 12.7062047362)
    assert (table[2]["difference_half_width"], table[0]["baseline"]) == ("", "softmax")

    record = json.loads((tmp_path / "comparison.json").read_text(encoding="utf-8"))
    assert [row["loss"] for row in record["rows"]] == [row.loss for row in rows]
    assert len(record["runs"]) == 6


def test_positions_and_recall_are_means_over_seeds(tmp_path: Path) -> None:
    def placed(run: Run, near: float, far: float, guarded: float | None = None) -> Run:
        stretches = [
            {"first": 0, "last": 0, "tokens": 4, "loss": near},
            {"first": 1, "last": 1, "tokens": 4, "loss": far},
        ]
        more = {"loss_by_position": stretches, "control": run.mechanism == "softmax"}
        metrics = run.metrics
        if guarded is not None:
            metrics = [{**record, "guarded_share": guarded} for record in metrics]
        return replace(run, summary={**run.summary, **more}, metrics=metrics)

    def recall(mechanism: str, seed: int, few: float, many: float) -> Recall:
        model = {"layers": 2, "width": 64, "short_convolution": 4}
        accuracy = {"4": few, "64": many}
        summary = {
            **{"mechanism": mechanism, "seed": seed, "accuracy": accuracy, "updates": 9},
            **{"chance": 1 / 64, "config": {"model": model}},
        }
        return Recall(Path(f"recall{seed}"), mechanism, seed, summary, {})

    runs = [
        placed(synthetic_run("slay", 1, 3.0), 5.0, 3.0, guarded=0.25),
        placed(synthetic_run("slay", 2, 3.2), 6.0, 2.0, guarded=0.5),
        placed(synthetic_run("softmax", 1, 3.5), 4.0, 3.5),
    ]
    recalls = [recall("slay", 1, 0.5, 0.1), recall("slay", 2, 1.0, 0.2)]
    report = make_report(runs, recalls)
    files = write_report(tmp_path, report)
    slay, softmax = report.rows
    assert [stretch["loss"] for stretch in slay.loss_by_position] == [5.5, 2.5]
    # less the means 4.75 and 3
    assert positions_apart(report.placed) == (["0", "1"], [[0.75, -0.5], [-0.75, 0.5]])
    assert "[[0, 0.75], [1, -0.5]]" in (tmp_path / "comparison.html").read_text(encoding="utf-8")
    assert (slay.recall, softmax.recall) == ({"4": 0.75, "64": pytest.approx(0.15)}, {})
    assert (slay.guarded_share, softmax.guarded_share) == (0.375, None)
    assert (slay.label, softmax.label) == ("slay", "softmax (control)")
    text = (tmp_path / "comparison.md").read_text(encoding="utf-8")
    assert "| slay | 5.500 | 2.500 |" in text
    assert "| slay | 75.0 | 15.0 |" in text
    assert "9 updates, seeds 1, 2; chance 1.6 %" in text
    for kind in (".png", ".svg"):
        assert [path.stem for path in files if path.suffix == kind] == [
            *("losses", "curves", "positions", "recall"),
        ]
    assert all(path.stat().st_size > 500 for path in files)


def test_positions_of_unequal_contexts_stand_in_columns_of_their_own() -> None:
    def placed(mechanism: str, last: int) -> Run:
        run = synthetic_run(mechanism, 1, 3.0)
        stretches = [
            {"first": 0, "last": 31, "tokens": 4, "loss": 4.0},
            {"first": 32, "last": last, "tokens": 4, "loss": 3.0},
        ]
        summary = {**run.summary, "loss_by_position": stretches}
        return replace(run, summary=summary, plan={**run.plan, "context_length": last + 1})

    runs = [placed("slay", 47), placed("softmax", 63)]
    report = make_report(runs, allow_differences=True)
    assert positions_apart(report.placed) == (["0–31"], [[0.0], [0.0]])
    text = markdown(report, [])
    assert "| mechanism | 0–31 | 32–47 | 32–63 |" in text
    assert "| slay | 4.000 | 3.000 | – |" in text
    assert "| softmax | 4.000 | – | 3.000 |" in text


def test_a_report_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "comparison.md").mkdir()
    with pytest.raises(UserError, match=r"comparison\.md: the report cannot be written: Is a dir"):
        write_report(tmp_path, make_report(three_mechanisms()))


def test_training_curves_average_neighbours() -> None:
    metrics = [
        {"kind": "train", "update": u, "tokens": 10 * u, "loss": float(u)} for u in range(1, 302)
    ]
    run = replace(synthetic_run("slay", 1, 3.0), metrics=metrics)
    curve = run.curve("train")
    # 301 updates in groups of three; the last has one
    assert len(curve) == 101
    assert curve[0] == (30, 2.0)
    assert curve[-1] == (3010, 301.0)


def test_final_losses_stand_at_their_means_with_their_spread() -> None:
    rows = make_rows([*three_mechanisms(), synthetic_run("uniform", 1, math.nan)])
    rows[-2] = replace(rows[-2], control=True)
    (axes,) = losses(three_mechanisms(), rows).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        *("slay", "softmax", "linear_elu (control)"),
    ]
    bars: list[Any] = list(axes.containers)
    slay, *_, elu = bars
    assert [bar.lines[0].get_xdata()[0] for bar in bars] == [
        *map(pytest.approx, (3.1, 3.3, 3.8)),
    ]
    (spread,) = slay.lines[2][0].get_segments()
    assert spread[:, 0] == pytest.approx([3.0, 3.2])
    # hollow
    assert elu.lines[0].get_markerfacecolor() == "white"
    assert slay.lines[0].get_markerfacecolor() != "white"


def test_long_names_stay_in_the_picture() -> None:
    long = (
        "slay, data.source.path=" + "/a/folder/of/folders" * 6 + ", tokenizer.vocabulary_size=null"
    )
    rows = [replace(row, mechanism=long) for row in make_rows(three_mechanisms())[:2]]
    figure = losses([replace(run, mechanism=long) for run in three_mechanisms()], rows)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure.savefig(io.BytesIO())
    first, second = (label.get_window_extent() for label in figure.axes[0].get_yticklabels())
    assert min(first.x0, second.x0) >= 0
    # the second below the first
    assert second.y1 < first.y0


def test_curves_show_every_mechanism(tmp_path: Path) -> None:
    import matplotlib.image

    runs = three_mechanisms()
    write_report(tmp_path, make_report(runs))
    few = matplotlib.image.imread(tmp_path / "curves.png")
    assert few.shape[0] > 500
    assert few.shape[1] > 1000
    colours = {tuple(pixel) for pixel in (few[::2, ::2, :3].reshape(-1, 3) * 255).astype(int)}
    # blue, vermilion and green of the three mean lines
    assert {(0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00), (0x00, 0x9E, 0x73)} <= colours


def test_speeds_of_different_machines_are_not_compared() -> None:
    fast, slow = {"device": "a", "threads": 8}, {"device": "a", "threads": 2}
    runs = [replace(run, environment=fast) for run in three_mechanisms()]
    told = "of different machines or numbers of threads"
    assert told not in " ".join(make_report(runs).statements)
    runs[0] = replace(runs[0], environment=slow)
    assert told in " ".join(make_report(runs).statements)


def test_baseline_is_softmax_or_the_one_named() -> None:
    runs = three_mechanisms()
    assert make_report(runs).baseline == "softmax"
    assert make_report(runs[2:]).baseline is None
    rows = {row.mechanism: row for row in make_report(runs, baseline="slay").rows}
    assert rows["slay"].difference is None
    difference = rows["softmax"].difference
    assert difference is not None
    assert (difference.mean, difference.seeds) == (pytest.approx(0.2), [1, 2])
    with pytest.raises(ConfigError, match="baseline=sley: did you mean slay"):
        make_report(runs, baseline="sley")


def test_latex_compiles_whatever_the_names() -> None:
    assert latex_text("a_b 5 % [x] #1 {y} ~ ^ \\ & $ ± −") == (
        "a\\_b 5 \\% {[}x] \\#1 \\{y\\} \\textasciitilde{} \\textasciicircum{} "
        "\\textbackslash{} \\& \\$ $\\pm$ $-$"
    )
    text = latex(make_report(three_mechanisms()))
    for rule in ("\\toprule", "\\midrule", "\\bottomrule"):
        assert text.count(rule) == 1
    (row,) = [line for line in text.splitlines() if line.startswith("linear\\_elu & ")]
    # as many cells as columns
    columns = text.split("\\begin{tabular}{")[1].split("}")[0]
    assert row.count(" & ") == len(columns) - 1 == 7
    assert all(ord(sign) < 128 for sign in text)


GPT2_SMALL = {
    **{"model.layers": 12, "model.heads": 12, "model.width": 768, "model.context_length": 1024},
    **{"model.mlp_ratio": 4, "model.dropout": 0.1, "model.short_convolution": 0},
    **{"tokenizer.name": "gpt2", "data.source.path": "HuggingFaceFW/fineweb"},
    "data.validation_source.name": "wikitext-2-raw-v1",
}


@pytest.mark.parametrize(
    ("change", "tokens", "shown"),
    [
        ({}, 2_488_795_136, True),
        ({}, 1_000_000_000, False),
        ({"model.width": 128}, 2_488_795_136, False),
        ({"model.mlp_ratio": 2}, 2_488_795_136, False),
        ({"model.dropout": 0.0}, 2_488_795_136, False),
        ({"model.short_convolution": 4}, 2_488_795_136, False),
        ({"data.validation_source.name": None}, 2_488_795_136, False),
        # held out of the training source: there is no other
        ({"data.validation_source": None}, 2_488_795_136, False),
    ],
)
def test_published_losses_stand_beside_the_same_setting_alone(
    change: dict, tokens: int, shown: bool
) -> None:
    inside = tuple(f"{key}." for key in change)
    config = {k: v for k, v in GPT2_SMALL.items() if not k.startswith(inside or "-")} | change
    runs = [
        replace(run, config=config, summary={**run.summary, "tokens": tokens})
        for run in three_mechanisms()
    ]
    report = make_report(runs)
    # Table 5 of the paper
    published = {"slay": 4.6760, "softmax": 4.6417, "linear_elu": 5.0884} if shown else {}
    assert {
        row.mechanism: row.published_loss for row in report.rows if row.published_loss
    } == published
    # of other options nothing is published
    runs[2:5] = [
        replace(run, config={**run.config, "attention.local": "window"}) for run in runs[2:5]
    ]
    published.pop("slay", None)
    assert {
        row.mechanism: row.published_loss for row in make_report(runs).rows if row.published_loss
    } == published
    text = markdown(report, [])
    assert ("Table 5" in text, "| published loss (nats/token) |" in text) == (shown, shown)


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"finished": false}', "{}"])
def test_broken_summaries_are_unfinished(tmp_path: Path, content: str) -> None:
    (tmp_path / "summary.json").write_text(content)
    assert not is_finished(tmp_path)
    assert not is_finished(tmp_path / "missing")
