"""The report as one HTML page that needs nothing else: no network, no file beside it."""

from __future__ import annotations

import json
import math
from importlib import resources
from typing import Any

from slayformer.config_differences import differing_keys
from slayformer.config_loading import dotted
from slayformer.evaluation.report import Report, Row
from slayformer.evaluation.report_figure import mean_curve, positions_apart
from slayformer.evaluation.report_table import NOTHING, columns, detail_tables
from slayformer.evaluation.runs import NAMED, Run
from slayformer.finite import strict_json

# of the picture of an interval, in its own units
INTERVAL_WIDTH, INTERVAL_MARGIN = 120, 6


def page(report: Report) -> str:
    """Return the HTML of `report`, styles and scripts included."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    assets = resources.files(__package__) / "assets"

    def asset(name: str) -> str:
        return (assets / name).read_text(encoding="utf-8")

    mechanisms = [row.mechanism for row in report.rows]
    shown = columns(report)
    difference_column = next(
        (n for n, name in enumerate([*shown][1:]) if name.startswith("difference to ")), None
    )
    low, high = _interval_range(report)
    # no name or path may end the element that the data is in
    data = json.dumps(strict_json(_data(report))).replace("<", "\\u003c")
    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    details = detail_tables(report)
    return environment.from_string(asset("page.html.j2")).render(
        title=f"Comparison of {len(mechanisms)} mechanisms",
        style=Markup(asset("page.css")),
        script=Markup(asset("page.js")),
        data=Markup(data),
        facts=_facts(report),
        unequal=report.unequal,
        names=[*shown],
        rows=[
            {
                "mechanism": row.mechanism,
                "series": number,
                "control": row.control,
                "baseline": row.mechanism == report.baseline,
                "unfair": row.unfair,
                "cells": [column(row) for column in [*shown.values()][1:]],
                "interval": _interval(row, low, high),
            }
            for number, row in enumerate(report.rows)
        ],
        difference_column=difference_column,
        zero=None if low == high else _place(0, low, high),
        statements=report.statements,
        details=[(f"detail{n}", *detail) for n, detail in enumerate(details)],
        mechanisms=mechanisms,
        **_settings(report),
        run_names=["run", "mechanism", "seed", "validation loss (nats/token)", "training (s)"],
        run_lines=[_run_line(run) for run in report.runs],
        environments=_environments(report),
    )


def _facts(report: Report) -> list[str]:
    summary, plan = report.runs[0].summary, report.runs[0].plan
    facts = [f"{len(report.runs)} runs"]
    if not report.differences:
        facts += [
            f"{summary['tokens']:,} training tokens",
            f"{summary['updates']:,} updates",
            *([f"context {plan['context_length']:,}"] if "context_length" in plan else []),
        ]
    return [*facts, f"unigram floor {report.unigram_loss:.4f} nats/token"]


def _data(report: Report) -> dict[str, Any]:
    """Return what the pictures are drawn from."""
    charts = [
        {
            "id": kind,
            "title": title,
            "xlabel": "training tokens",
            "ylabel": "loss (nats/token)",
            "at": "tokens",
            "digits": 4,
            "zoom": True,
            "reference": {
                "label": f"unigram floor {report.unigram_loss:.4f}",
                "y": report.unigram_loss,
            },
            "series": [_curve_series(report, n, kind) for n in range(len(report.rows))],
        }
        for kind, title in (("train", "Training loss"), ("validation", "Validation loss"))
    ]
    if report.placed:
        charts.append(_position_chart(report))
    if report.recalling:
        charts.append(_recall_chart(report))
    return {"mechanisms": [row.label for row in report.rows], "charts": charts}


def _curve_series(report: Report, number: int, kind: str) -> dict[str, Any]:
    mechanism = report.rows[number].mechanism
    seeds = [run.curve(kind) for run in report.runs if run.mechanism == mechanism]
    seeds = [curve for curve in seeds if curve]
    return {"series": number, "mean": mean_curve(seeds), "seeds": seeds}


def _position_chart(report: Report) -> dict[str, Any]:
    labels, apart = positions_apart(report.placed)
    return {
        "id": "positions",
        "title": "Loss by position, less the mean of all",
        "xlabel": "position in the context",
        "ylabel": "loss − mean of all (nats/token)",
        "at": "position",
        "digits": 4,
        "labels": labels,
        "reference": {"label": "mean of all", "y": 0},
        "series": [
            {
                "series": report.rows.index(row),
                "mean": list(enumerate(losses)),
                "seeds": [],
            }
            for row, losses in zip(report.placed, apart, strict=True)
        ],
    }


def _recall_chart(report: Report) -> dict[str, Any]:
    pairs = sorted({int(pair) for row in report.recalling for pair in row.recall})
    chance = 100 * report.recalls[0].summary["chance"]
    return {
        "id": "recall",
        "title": "Associative recall",
        "xlabel": "key-value pairs in the context",
        "ylabel": "recalled (%)",
        "at": "pairs:",
        "digits": 1,
        "labels": [str(pair) for pair in pairs],
        "reference": {"label": f"chance {chance:.1f} %", "y": chance},
        "series": [
            {
                "series": report.rows.index(row),
                "mean": [(pairs.index(int(p)), 100 * share) for p, share in row.recall.items()],
                "seeds": [],
            }
            for row in report.recalling
        ],
    }


def _interval_range(report: Report) -> tuple[float, float]:
    """Return the lowest and highest end of all intervals and of no difference."""
    ends = [0.0]
    for row in report.rows:
        if row.difference is not None and row.difference.half_width is not None:
            ends += [row.difference.mean + sign * row.difference.half_width for sign in (-1, 1)]
    ends = [end for end in ends if math.isfinite(end)]
    return min(ends), max(ends)


def _place(value: float, low: float, high: float) -> float:
    width = INTERVAL_WIDTH - 2 * INTERVAL_MARGIN
    return round(INTERVAL_MARGIN + width * (value - low) / (high - low), 2)


def _interval(row: Row, low: float, high: float) -> dict[str, Any] | None:
    """Return where the interval of `row` is drawn, and on which side of no difference it is."""
    found = row.difference
    if found is None or found.half_width is None or low == high or not math.isfinite(found.mean):
        return None
    ends = found.mean - found.half_width, found.mean + found.half_width
    return {
        "low": _place(ends[0], low, high),
        "mean": _place(found.mean, low, high),
        "high": _place(ends[1], low, high),
        "kind": "better" if ends[1] < 0 else "worse" if ends[0] > 0 else "unsure",
    }


def _settings(report: Report) -> dict[str, Any]:
    """Return the settings that differ, the mechanisms' options, and the settings all runs share."""
    configs = [run.config for run in report.runs]
    by_mechanism = [
        [run.config for run in report.runs if run.mechanism == row.mechanism] for row in report.rows
    ]
    unfair = {difference.what for difference in report.differences}

    def lines(keys: list[str], prefix: str = "") -> list[dict[str, Any]]:
        return [
            {
                "key": key.removeprefix(prefix),
                "unfair": key in unfair,
                "cells": [_values(mine, key) for mine in by_mechanism],
            }
            for key in keys
        ]

    differing = [k for k in differing_keys(configs) if not k.startswith(("attention.", *NAMED))]
    keys = list(dict.fromkeys(key for config in configs for key in config))
    options = [k for k in keys if k.startswith("attention.") and k != "attention.name"]
    own = {"seed", "run_directory", "resume", "dry_run", *differing}
    shared = [k for k in keys if k not in own and not k.startswith("attention.")]
    settings = lines(differing)
    # what is no setting of the configuration, the plan or the tokens, is told all the same
    for difference in report.differences:
        if difference.what not in differing:
            values = [
                _joined({_text(o) for r, o in _told(report, difference.what) if r == row.mechanism})
                for row in report.rows
            ]
            line = {"key": difference.what, "unfair": True, "cells": values}
            settings += [] if line in settings else [line]
    return {
        "settings": settings,
        "options": lines(options, "attention."),
        "shared": [(key, _values(configs, key)) for key in shared],
    }


def _told(report: Report, what: str) -> list[tuple[str, Any]]:
    """Return (mechanism, value of `what`) of the runs it is known of."""
    return [
        pair
        for d in report.differences
        if d.what == what
        for pair in ((d.run.mechanism, d.ours), (d.first.mechanism, d.theirs))
    ]


def _values(configs: list[dict[str, Any]], key: str) -> str:
    return _joined({_text(config[key]) for config in configs if key in config})


def _joined(values: set[str]) -> str:
    return " / ".join(sorted(values)) or NOTHING


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _run_line(run: Run) -> list[str]:
    summary = run.summary
    return [
        run.folder.name,
        run.mechanism,
        str(run.seed),
        f"{summary['validation_loss']:.4f}",
        f"{summary['seconds']:,.0f}",
    ]


def _environments(report: Report) -> dict[str, Any] | None:
    """Return the different environments of the runs: a line a key, a column an environment."""
    columns: dict[str, list[str]] = {}
    for run in report.runs:
        if run.environment:
            processes = {"processes": run.plan.get("world_size")}
            key = json.dumps({**dotted(run.environment), **processes})
            columns.setdefault(key, []).append(run.folder.name)
    if not columns:
        return None
    different = [json.loads(key) for key in columns]
    keys = dict.fromkeys(key for one in different for key in one)
    lines = [(key, [_text(one.get(key, NOTHING)) for one in different]) for key in keys]
    return {"lines": lines, "runs": [", ".join(names) for names in columns.values()]}
