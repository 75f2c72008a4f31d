"""Table 5 and Figure 3: what a comparison's results say beside the published order."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from slayformer.errors import UserError
from slayformer.evaluation.runs import Run
from slayformer.paper import language_models
from slayformer.paper.item import Request
from slayformer.paper.language_models import claims, draw, tables
from slayformer.paper.order import (
    OPEN,
    REVERSED,
    SAME,
    compare_order,
    losses,
    rank_correlation,
)
from slayformer.paper.published import TABLE_5
from slayformer.paper.results_file import KEPT, read_results, results_of

LOSSES = {
    # as published softmax is before slay before linear_elu before performer
    "softmax": (3.00, 3.02),
    "slay": (2.90, 2.91),
    "linear_elu": (3.50, 3.52),
    "performer": (3.00, 4.10),
    "slay_best": (2.50, 2.50),
}


def run_of(mechanism: str, seed: int, loss: float, **config: Any) -> Run:
    summary = {
        **{"validation_loss": loss, "bits_per_byte": loss / 2, "parameters": 9, "tokens": 4000},
        **{"unigram_loss": 5.0},
    }
    records = [
        {"kind": "validation", "update": u, "tokens": 1000 * u, "loss": loss + 4 - u}
        | {"scored_tokens": 77}
        for u in (2, 4)
    ]
    records.append({"kind": "train", "update": 4, "tokens": 4000, "loss": 9.0})
    settings = {
        **{"attention.name": mechanism, "model.layers": 2, "model.width": 8, "model.heads": 2},
        **{"model.context_length": 16, "data.source.kind": "sotu", "run_directory": "elsewhere"},
    }
    environment = {"device": "cpu", "threads": 1, "platform": "my machine"}
    return Run(
        *(Path(f"{mechanism}{seed}"), mechanism, seed, summary, {"updates": 4}, records, "a" * 64),
        {**settings, **config},
        environment,
    )


def made(**changed: tuple[float, ...]) -> dict[str, Any]:
    runs = [
        run_of(mechanism, seed, loss)
        for mechanism, values in {**LOSSES, **changed}.items()
        for seed, loss in enumerate(values)
    ]
    return dict(json.loads(json.dumps(results_of("mine", runs))))


def test_a_file_holds_what_runs_have_in_common_and_their_curves(tmp_path: Path) -> None:
    results = made()
    assert results["unequal"] == []
    assert results["setting"]["model.width"] == 8
    # nothing of the machine's folders or name
    assert "home" not in json.dumps(results)
    assert "platform" not in json.dumps(results)
    first = results["runs"][0]
    assert (first["mechanism"], first["seed"], first["loss"]) == ("linear_elu", 0, 3.5)
    assert first["curve"] == [[2000, 5.5], [4000, 3.5]]
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(results))
    assert read_results(path) == results
    odd = results_of(
        "odd", [run_of("slay", 1, 3.0), run_of("softmax", 1, 3.0, **{"model.width": 9})]
    )
    assert odd["unequal"] == ["model.width differs: 9 in softmax1, 8 in slay1"]
    for change, message in (
        ({"format": "another"}, "is not of the format 'slayformer language models 1'"),
        ({"runs": [{"seed": 1}]}, "lacks mechanism"),
        ({"runs": 3}, "not a results file"),
    ):
        path.write_text(json.dumps({**results, **change}))
        with pytest.raises(UserError, match=f"mine.json: {message}"):
            read_results(path)
    with pytest.raises(UserError, match=r"none\.json: cannot be read"):
        read_results(tmp_path / "none.json")


def test_the_order_by_hand() -> None:
    found = losses(made())
    assert [*found] == ["slay_best", "slay", "softmax", "linear_elu", "performer"]
    pairs = {(p["first"], p["second"]): p for p in compare_order(found)}
    assert len(pairs) == 6
    reversed_pair = pairs["softmax", "slay"]
    # −.10 and −.11: mean −.105, and 12.706 standard errors of .005 (one degree of freedom)
    assert reversed_pair["difference"] == pytest.approx(-0.105)
    assert reversed_pair["half_width"] == pytest.approx(12.7062 * 0.005, rel=1e-4)
    assert reversed_pair["published"] == pytest.approx(0.0343)
    assert reversed_pair["order"] == REVERSED
    assert pairs["softmax", "linear_elu"]["order"] == pairs["slay", "linear_elu"]["order"] == SAME
    assert pairs["linear_elu", "performer"]["order"] == OPEN
    # five of six pairs by their means as published
    assert rank_correlation([*pairs.values()]) == pytest.approx((5 - 1) / 6)
    assert math.isnan(rank_correlation([]))
    (alone,) = compare_order({"slay": {1: 3.0}, "softmax": {1: 2.0, 2: 9.0}})
    assert (alone["difference"], alone["half_width"], alone["order"]) == (1.0, None, OPEN)
    assert compare_order({"slay": {1: 3.0}, "softmax": {2: 2.0}}) == []
    # a diverged mechanism comes last and decides nothing
    found = losses(made(softmax=(math.nan, 3.0)))
    assert [*found][-1] == "softmax"
    assert {p["order"] for p in compare_order(found) if "softmax" in p.values()} == {OPEN}


def test_tables_claims_and_curves() -> None:
    data = {"results": [made()]}
    losses_table, pairs_table = tables(data)
    assert losses_table.rows[0][:3] == ["slay_best", "2.5000 ± 0.0000 (2 seeds)", "12.18"]
    assert losses_table.rows[1][4:] == ["4.6760", "107.35"]
    assert "Kendall's τ with the published order +0.67" in losses_table.note
    assert "2 of 6 pairs are in the same order" in losses_table.note
    assert pairs_table.rows[0] == ["softmax", "slay", "0.034", "-0.105 ± 0.064", REVERSED]
    order, near, ahead, along = claims(data)
    # two pairs as published, and one the other way round contradicts an order
    assert order.verdict == "does not hold"
    assert (
        "2 of 6 pairs are in this order, and 1 the other way round: slay before" in order.measured
    )
    open_pairs = claims({"results": [made(slay=(3.00, 3.03))]})[0]
    assert (open_pairs.verdict, "0 the other way" in open_pairs.measured) == (
        *("holds at 2 of 6 pairs", True),
    )
    one = {name: values[:1] for name, values in LOSSES.items()}
    assert [claim.verdict for claim in claims({"results": [made(**one)]})][:3] == [
        *("does not hold", "holds (one seed)", "not settled: one seed"),
    ]
    assert near.verdict == "holds"
    assert ahead.verdict == "holds at linear_elu"
    # slay is .105 from softmax, the others .5 and .54
    assert along.verdict == "holds"
    farther = {"results": [made(slay=(3.60, 3.61))]}
    assert [claim.verdict for claim in claims(farther)][1:] == ["does not hold"] * 3
    (picture,) = draw(data)
    left, right = picture.figure.axes
    assert [line.get_label() for line in left.lines] == [*losses(data["results"][0])]
    assert list(left.lines[1].get_ydata()) == pytest.approx([4.905, 2.905])
    assert {line.get_label() for line in right.lines} == {*LOSSES} - {"slay_best"}
    assert list(right.lines[0].get_ydata()) == pytest.approx([-0.105, -0.105])
    (empty,) = tables({"results": []})
    assert len(empty.rows) == len(TABLE_5)
    assert "experiment=table5_cpu" in empty.note


def test_a_seed_that_diverged_is_shown() -> None:
    for last in (math.nan, math.inf, 1e6):
        data = {"results": [made(slay=(2.90, last))]}
        (row,) = [row for row in tables(data)[0].rows if row[0] == "slay"]
        assert row[1].endswith("(2 seeds)")
        assert row[2] == ("nan" if math.isnan(last) else "inf")
        assert draw(data)
        # what diverged holds nothing
        assert [claim.verdict for claim in claims(data)][1:] == ["does not hold"] * 3


def test_kept_results_are_shown_and_others_if_asked_for(tmp_path: Path) -> None:
    request = Request("quick", None, 1, tmp_path)
    (kept,) = language_models.compute(request)["results"]
    found = losses(kept)
    assert {*found} == {*TABLE_5, "slay_best"}
    assert all(len(by_seed) == 3 for by_seed in found.values())
    assert kept["unequal"] == []
    assert read_results(tmp_path / "table5_cpu.json") == read_results(KEPT / "table5_cpu.json")
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(made()))
    asked = Request("quick", None, 1, tmp_path, results=(str(path),))
    assert language_models.compute(asked)["results"] == [made()]
