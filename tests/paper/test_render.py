"""Tables in their three forms."""

from __future__ import annotations

import csv
import io

from slayformer.paper.item import Table
from slayformer.paper.render import comma_separated, latex, markdown
from slayformer.tables import latex_text

TABLE = Table(
    "table_2_x", "Errors in %", ["map", "ℓ2 | x"], [["a_b", "0.5 ± 0.1"], ["c, d", "1"]], "So."
)


def test_markdown() -> None:
    expected = "**Errors in %**\n\n| map | ℓ2 \\| x |\n| --- | --- |\n"
    expected += "| a_b | 0.5 ± 0.1 |\n| c, d | 1 |\n\nSo.\n"
    assert markdown(TABLE) == expected


def test_csv_is_read_back() -> None:
    rows = list(csv.reader(io.StringIO(comma_separated(TABLE))))
    assert rows == [list(TABLE.columns), *map(list, TABLE.rows)]


def test_latex() -> None:
    text = latex(TABLE)
    assert r"\caption{Errors in \%. So.}" in text
    assert r"\label{tab:table-2-x}" in text
    assert r"\begin{tabular}{lr}" in text
    assert r"a\_b & 0.5 $\pm$ 0.1 \\" in text
    # one pass: what a replacement holds is not replaced again
    assert latex_text(r"\{$^") == r"\textbackslash{}\{\$\textasciicircum{}"
    assert latex_text("0 ≤ ‖k‖² ≤ 1/ε") == r"0 $\leq$ $\|$k$\|$$^2$ $\leq$ 1/$\varepsilon$"
