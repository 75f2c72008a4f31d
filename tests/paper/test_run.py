"""The frame: what is computed, what is kept, what is written, and what a failure leaves."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

from slayformer.errors import ConfigError, UserError
from slayformer.paper import run as frame
from slayformer.paper.figures import new_figure
from slayformer.paper.item import HOLDS, Claim, Data, Item, Picture, Request, Table
from slayformer.paper.items import ITEMS
from slayformer.paper.run import PaperConfig, choose_items, read_config, run

ROOT = Path(__file__).resolve().parents[2]


class Counted:
    """A computation that counts its calls and remembers its last request."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, request: Request) -> Data:
        self.calls += 1
        self.request = request
        request.progress(0.5)
        return {"values": np.arange(3), "size": request.size}


def draw(data: Data) -> list[Picture]:
    """Draw the values, which JSON has made a list of."""
    assert data["values"] == [0, 1, 2]
    figure = new_figure(2, 2)
    figure.subplots().plot(data["values"])
    return [Picture("toy_picture", "A line & a caption.", figure)]


def toy(compute: Any, **changes: Any) -> Item:
    """Return an item with a picture, a table and a claim."""
    item = Item(
        name="toy",
        title="a toy",
        sources=("Figure 77", "Table 78"),
        minutes=0.1,
        compute=compute,
        published="nothing",
        draw=draw,
        tables=lambda data: [Table("toy_table", "Toy", ["a", "b"], [["1", data["size"]]], "So.")],
        claims=lambda data: [Claim("one", "Table 78", str(data["values"]), HOLDS)],
    )
    return replace(item, **changes)


def config(folder: Path, **changes: Any) -> PaperConfig:
    """Return the command's configuration with `changes`."""
    return PaperConfig(items=None, size="quick", directory=str(folder), **changes)


def test_results_are_written_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, compute = tmp_path / "out", Counted()
    page = run(config(folder), [toy(compute)])
    assert page == folder / "index.html"
    names = {path.name for path in folder.iterdir() if path.is_file()}
    tables = {f"{name}.{kind}" for name in ("toy_table", "claims") for kind in ("md", "csv", "tex")}
    assert names == tables | {"toy_picture.png", "toy_picture.pdf", "index.html"}
    html = page.read_text(encoding="utf-8")
    assert "Figure 77, Table 78: a toy" in html
    assert 'src="toy_picture.png"' in html
    assert "A line &amp; a caption." in html
    assert "<td>quick</td>" in html
    assert "code has changed" not in html
    assert not (folder / "data" / "toy").exists()

    # kept, also when only another item is asked for again
    run(config(folder), [toy(compute)])
    assert compute.calls == 1
    run(config(folder, seeds=2), [toy(compute)])
    assert compute.calls == 2
    assert compute.request.seed_count(quick=5, full=9) == 2
    run(config(folder, seeds=2, redo=True), [toy(compute)])
    assert compute.calls == 3
    run(PaperConfig(items=None, size="full", directory=str(folder)), [toy(compute)])
    assert compute.calls == 4
    assert compute.request.seed_count(quick=5, full=9) == 9

    monkeypatch.setattr(frame, "code_digest", lambda: "another")
    page = run(PaperConfig(items=None, size="full", directory=str(folder)), [toy(compute)])
    assert compute.calls == 4
    assert "code has changed" in page.read_text(encoding="utf-8")


def test_a_part_keeps_the_others_on_the_page(tmp_path: Path) -> None:
    def claim(text: str) -> Any:
        return lambda data: [Claim(text, "Table 78", "", HOLDS)]

    first, second = Counted(), Counted()
    items = [
        toy(first, claims=claim("the first")),
        toy(second, name="other", sources=("Figure 7",), claims=claim("the second")),
        toy(Counted(), name="never", sources=("Figure 8",)),
    ]
    part = replace(config(tmp_path), items=["toy", "other"])
    run(part, items)
    page = run(replace(part, items=["other"], seeds=2), items)
    assert (first.calls, second.calls) == (1, 2)
    html, table = page.read_text(encoding="utf-8"), (tmp_path / "claims.md").read_text()
    for text in (html, table):
        assert 0 < text.index("the first") < text.index("the second")
    assert 'id="never"' not in html
    # one that cannot be shown any more is no failure of this run
    (tmp_path / "data" / "toy.json").write_text("{", encoding="utf-8")
    html = run(replace(part, items=["other"]), items).read_text(encoding="utf-8")
    assert "failed: JSONDecodeError" in html
    assert "the second" in html


def test_what_only_reads_results_reads_them_each_time(tmp_path: Path) -> None:
    compute = Counted()
    for results in (["mine"], ["mine"], ["mine", "theirs"]):
        run(config(tmp_path, results=results), [toy(compute, kept=False)])
        assert compute.request.results == tuple(results)
    assert compute.calls == 3


def test_a_failed_item_leaves_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(request: Request) -> Data:
        (request.directory / "half").write_text("kept", encoding="utf-8")
        raise ValueError("no such map")

    def lacking(request: Request) -> Data:
        raise UserError("no data set")

    items = [
        toy(broken, name="broken"),
        toy(lacking, name="lacking"),
        toy(Counted()),
    ]
    with pytest.raises(UserError, match="failed: broken, lacking; the others are in"):
        run(config(tmp_path), items)
    html = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert "failed: ValueError: no such map" in html
    assert "failed: no data set" in html
    assert "<td>quick</td>" in html
    # a trace for what is our fault only, and what it had done is there for the next run
    assert capsys.readouterr().err.count("Traceback") == 1
    assert (tmp_path / "data" / "broken" / "half").exists()
    assert not (tmp_path / "data" / "broken.json").exists()


def test_names_of_items() -> None:
    items = [toy(Counted()), toy(Counted(), name="other", sources=("Figure 7",))]
    assert choose_items(None, items) == items
    assert choose_items(["other", "figure_77"], items) == items
    assert [item.name for item in choose_items(["figure_7"], items)] == ["other"]
    with pytest.raises(ConfigError, match="items=oter: did you mean other"):
        choose_items(["oter"], items)
    everything = {"size": "quick", "seeds": None, "processes": None, "redo": False}
    one = {"items": "figure_7", "results": "comparisons/mine"}
    composed = OmegaConf.create({**everything, **one, "directory": "x"})
    assert read_config(composed).items == ["figure_7"]
    assert read_config(composed).results == ["comparisons/mine"]
    for key, value in (("size", "huge"), ("seeds", 0), ("items", "figure_99")):
        wrong = OmegaConf.create({**everything, "items": None, "directory": "x", key: value})
        with pytest.raises(ConfigError, match=key):
            read_config(wrong)


def test_every_part_of_the_paper_has_an_item() -> None:
    names = [item.name for item in ITEMS]
    sources = [source for item in ITEMS for source in item.sources]
    assert len(set(names)) == len(names)
    assert len(set(sources)) == len(sources)
    figures = {f"Figure {number}" for number in range(1, 22)}
    # Table 9 is the options of slay.yaml
    assert figures | {f"Table {number}" for number in range(1, 9)} <= set(sources)
    assert all(item.published for item in ITEMS)


def test_the_command(run_command: Any, tmp_path: Path) -> None:
    finished = run_command(["scripts/paper.py", "items=[figure_9]"], cwd=tmp_path)
    assert finished.code == 0, finished.stderr
    folder = tmp_path / "paper_results"
    assert (folder / "figure_09_quadrature_error.pdf").stat().st_size > 1000
    kept = json.loads((folder / "data" / "quadrature.json").read_text(encoding="utf-8"))
    assert kept["request"] == {"size": "quick", "seeds": None}


def test_the_guide_names_items_that_exist() -> None:
    text = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
    named = re.findall(r"items=\[([\w,]+)\]", text)
    assert named
    for names in named:
        choose_items(names.split(","))
    with_claims = {"polynomial_ablation", "theory", "reconstruction", "selectivity"}
    assert with_claims <= {name for names in named for name in names.split(",")}
