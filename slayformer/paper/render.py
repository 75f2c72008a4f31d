"""Tables as Markdown, CSV and LaTeX, and the page that shows everything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from slayformer import tables
from slayformer.paper.item import Claim, Item, Table
from slayformer.tables import latex_table, latex_text, markdown_table

_STYLE = """
body { font: 16px/1.45 sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; margin: .6rem 0; font-size: .9rem }
th, td { border-bottom: 1px solid #ccc; padding: .2rem .6rem; text-align: left }
td { vertical-align: top }
th { border-bottom: 2px solid #555 }
figure { margin: 1rem 0 } img { max-width: 100% } figcaption, .note { color: #333 }
.about { color: #555 } .failed { color: #a00; font-weight: bold } .wide { overflow-x: auto }
"""


@dataclass(frozen=True)
class Shown:
    """An item's tables, its pictures as (name, caption), its claims, and how it was made.

    `failure` tells why there is nothing of it, or is empty.
    """

    item: Item
    about: str
    tables: Sequence[Table] = ()
    pictures: Sequence[tuple[str, str]] = ()
    claims: Sequence[Claim] = ()
    failure: str = ""


def markdown(table: Table) -> str:
    """Return the table with its title and note as Markdown."""
    lines = markdown_table(table.columns, table.rows, words=len(table.columns))
    note = f"\n{table.note}\n" if table.note else ""
    return f"**{table.title}**\n\n" + "\n".join(lines) + "\n" + note


def comma_separated(table: Table) -> str:
    """Return the table as CSV."""
    return tables.comma_separated(table.columns, table.rows)


def latex(table: Table) -> str:
    """Return the table as a LaTeX table environment; it needs the package booktabs."""
    columns, *rows = [[*map(latex_text, row)] for row in (table.columns, *table.rows)]
    caption = latex_text(f"{table.title}. {table.note}".strip())
    label = table.name.replace("_", "-")
    around = [r"\begin{table}", r"\centering", rf"\caption{{{caption}}}", rf"\label{{tab:{label}}}"]
    return "\n".join([*around, *latex_table(columns, rows), r"\end{table}"]) + "\n"


def claims_table(claims: Sequence[Claim]) -> Table:
    """Return the claims with their verdicts."""
    rows = [[claim.text, claim.source, claim.measured, claim.verdict] for claim in claims]
    columns = ["claim", "source", "measured", "verdict"]
    return Table("claims", "What the paper claims and what was measured", columns, rows)


def page(shown: Sequence[Shown], about: str) -> str:
    """Return the HTML page that shows every table and picture, which lie in its own folder."""
    parts = ["<!doctype html>", '<html lang="en">', '<meta charset="utf-8">']
    parts += ["<title>The paper, computed</title>", f"<style>{_STYLE}</style>"]
    parts += ["<h1>The paper, computed</h1>", f'<p class="about">{escape(about)}</p>', "<ul>"]
    parts += [f'<li><a href="#{one.item.name}">{escape(_heading(one.item))}</a>' for one in shown]
    parts.append("</ul>")
    claims = [claim for one in shown for claim in one.claims]
    if claims:
        parts += ["<h2>Claims</h2>", _html_table(claims_table(claims))]
    for one in shown:
        parts.append(f'<h2 id="{one.item.name}">{escape(_heading(one.item))}</h2>')
        if one.item.published:
            parts.append(f"<p><b>Published:</b> {escape(one.item.published)}</p>")
        if one.failure:
            parts.append(f'<p class="failed">{escape(one.failure)}</p>')
        for table in one.tables:
            links = " ".join(f'<a href="{table.name}.{kind}">{kind}</a>' for kind in _KINDS)
            parts += [f"<h3>{escape(table.title)}</h3>", _html_table(table)]
            parts.append(f'<p class="note">{escape(table.note)} ({links})</p>')
        for name, caption in one.pictures:
            image = f'<a href="{name}.pdf"><img src="{name}.png" alt="{escape(name)}"></a>'
            parts.append(f"<figure>{image}<figcaption>{escape(caption)}</figcaption></figure>")
        parts.append(f'<p class="about">{escape(one.about)}</p>')
    return "\n".join([*parts, "</html>", ""])


_KINDS = ("md", "csv", "tex")


def _heading(item: Item) -> str:
    return f"{', '.join(item.sources)}: {item.title}" if item.sources else item.title


def _html_table(table: Table) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in table.columns)
    rows = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in table.rows)
    body = "".join(f"<tr>{row}</tr>\n" for row in rows)
    return f'<div class="wide"><table><tr>{head}</tr>\n{body}</table></div>'
