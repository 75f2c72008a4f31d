"""Rows of text as Markdown, CSV and LaTeX, the same for every report."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

_LATEX = {
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    # would open an optional argument after the \\ of the row before
    "[": "{[}",
    "–": "--",
    "ö": r"\"o",
    **{
        sign: f"${command}$"
        for sign, command in {
            "<": "<",
            ">": ">",
            "−": "-",
            "±": r"\pm",
            "×": r"\times",
            "·": r"\cdot",
            "÷": r"\div",
            "≤": r"\leq",
            "≥": r"\geq",
            "≠": r"\neq",
            "≈": r"\approx",
            "→": r"\to",
            "∞": r"\infty",
            "√": r"\surd",
            "∈": r"\in",
            "‖": r"\|",
            "ε": r"\varepsilon",
            "δ": r"\delta",
            "ω": r"\omega",
            "φ": r"\varphi",
            "τ": r"\tau",
            "σ": r"\sigma",
            "θ": r"\theta",
            "π": r"\pi",
            "∫": r"\int",
            "Σ": r"\sum",
            "°": r"^\circ",
            "²": "^2",
            "³": "^3",
            "⟨": r"\langle",
            "⟩": r"\rangle",
            "ℓ": r"\ell",
        }.items()
    },
}
Cells = Sequence[str]


def markdown_table(columns: Cells, rows: Sequence[Cells], *, words: int = 1) -> list[str]:
    """Return the lines of a Markdown table; columns after the first `words` are numbers."""
    rule = ["---"] * words + ["---:"] * (len(columns) - words)
    return [_markdown_row(columns), f"| {' | '.join(rule)} |", *map(_markdown_row, rows)]


def _markdown_row(cells: Cells) -> str:
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def comma_separated(columns: Cells, rows: Sequence[Cells]) -> str:
    """Return the table as CSV."""
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n").writerows([columns, *rows])
    return stream.getvalue()


def latex_table(columns: Cells, rows: Sequence[Cells]) -> list[str]:
    """Return the lines of a tabular of cells in LaTeX's own language, for the package booktabs."""
    head, *body = [f"{' & '.join(row)} \\\\" for row in (columns, *rows)]
    start = rf"\begin{{tabular}}{{l{'r' * (len(columns) - 1)}}}"
    return [start, r"\toprule", head, r"\midrule", *body, r"\bottomrule", r"\end{tabular}"]


def latex_text(text: str) -> str:
    """Return plain text with the signs that LaTeX reads in its own way replaced."""
    return "".join(_LATEX.get(sign, sign) for sign in text)
