"""Tables and pictures as files."""

from __future__ import annotations

from pathlib import Path

from slayformer.paper.item import Picture, Table
from slayformer.paper.render import comma_separated, latex, markdown

WRITERS = {"md": markdown, "csv": comma_separated, "tex": latex}


def write_table(directory: Path, table: Table) -> None:
    """Write `table` as Markdown, CSV and LaTeX."""
    for suffix, write in WRITERS.items():
        (directory / f"{table.name}.{suffix}").write_text(write(table), encoding="utf-8")


def write_picture(directory: Path, picture: Picture) -> None:
    """Write `picture` as PNG and PDF."""
    for suffix in ("png", "pdf"):
        picture.figure.savefig(directory / f"{picture.name}.{suffix}")
