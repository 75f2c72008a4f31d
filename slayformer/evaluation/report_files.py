"""The files of a report: tables, pictures and the page, beside one another in a folder."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from slayformer.errors import UserError
from slayformer.evaluation.report import Report
from slayformer.evaluation.report_figure import draw_pictures
from slayformer.evaluation.report_page import page
from slayformer.evaluation.report_table import latex, markdown, write_csv
from slayformer.finite import strict_json


def write_report(directory: Path, report: Report) -> list[Path]:
    """Write tables, pictures and the page to `directory`; return their paths.

    comparison.md, .csv, .tex, .json and .html, and each picture as .png and .svg. Raises UserError
    where they cannot be written.
    """
    try:
        return _write(directory, report)
    except OSError as error:
        raise UserError(
            f"{error.filename}: the report cannot be written: {error.strerror}"
        ) from error


def _write(directory: Path, report: Report) -> list[Path]:
    pictures = draw_pictures(directory, report)
    texts = {
        "md": markdown(report, [path for path in pictures if path.suffix == ".png"]),
        "tex": latex(report),
        "html": page(report),
        "json": json.dumps(strict_json(_record(report)), indent=2),
    }
    files = [directory / f"comparison.{kind}" for kind in texts]
    for path, text in zip(files, texts.values(), strict=True):
        path.write_text(text, encoding="utf-8")
    table = directory / "comparison.csv"
    write_csv(table, report)
    return [*files, table, *pictures]


def _record(report: Report) -> dict[str, Any]:
    """Return all numbers of the report."""
    return {
        "rows": [asdict(row) for row in report.rows],
        "unigram_loss": report.unigram_loss,
        "baseline": report.baseline,
        "statements": report.statements,
        "unequal": report.unequal,
        "plan": report.runs[0].plan,
        "tokenizer_identity": report.runs[0].tokenizer_identity,
        "runs": [{"folder": run.folder.name, **run.summary} for run in report.runs],
        "recalls": [recall.summary for recall in report.recalls],
    }
