"""The HTML page: complete in itself, and in a real browser its tables sort and its curves tell."""

from __future__ import annotations

import html.parser
import json
import math
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slayformer.evaluation.document_losses import DocumentLosses
from slayformer.evaluation.report import Report, make_report
from slayformer.evaluation.report_page import page
from slayformer.evaluation.runs import Run

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
# what a mechanism may be called by someone who means harm to the page
HOSTILE = "</script><b>&amp;"


def make_run(mechanism: str, seed: int, loss: float, *, width: int = 64, python: str = "1") -> Run:
    """Return a run that validated at 1,000 and 2,000 tokens and ended at `loss`."""
    stretches = [{"first": t, "last": t, "tokens": 4, "loss": loss - t / 10} for t in (0, 1)]
    summary = {
        **{"mechanism": mechanism, "seed": seed, "updates": 20, "tokens": 2000},
        **{"parameters": 1234 * width, "validation_loss": loss, "bits_per_byte": loss / 2},
        **{"unigram_loss": 4.25, "tokens_per_second": 900.0 + 100 * seed, "seconds": 4.0},
        **{"peak_memory_bytes": 2**27, "control": mechanism == "uniform"},
        "loss_by_position": stretches,
    }
    metrics: list[dict[str, Any]] = [
        {"kind": "train", "update": u, "tokens": 100 * u, "loss": loss + 1 / u}
        for u in range(1, 21)
    ]
    for u in (10, 20):
        record = {"kind": "validation", "update": u, "tokens": 100 * u, "scored_tokens": 640}
        metrics.append({**record, "loss": loss + (20 - u) / 10})
    # three documents, the loss the same in each but for a hundredth
    tokens_D = np.array([10, 20, 30])
    documents = DocumentLosses(tokens_D * (loss + np.array([0.01, -0.02, 0.01]) * seed), tokens_D)
    return Run(
        Path(f"{mechanism}-seed{seed}"),
        mechanism,
        seed,
        summary,
        {"updates": 20, "world_size": 1},
        metrics,
        "a" * 64,
        {"model.width": width, "attention.option": 0.1 * len(mechanism)},
        {"python": python, "packages": {"torch": "2"}},
        documents,
    )


def fair_report() -> Report:
    runs = [
        *(make_run("softmax", seed, 3.5 + seed / 100) for seed in (1, 2)),
        *(make_run("slay", seed, 3.2 - seed / 100, python="2") for seed in (1, 2)),
        make_run("uniform", 1, 12.5),
        make_run(HOSTILE, 1, math.nan),
    ]
    return make_report(runs)


class Addresses(html.parser.HTMLParser):
    """Collects what a page would load, and checks that its elements close."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found += [str(v) for key, v in attributes if key in ("src", "href", "srcset")]
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """Take an element that closes itself as no open one."""

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_page_is_complete_in_itself() -> None:
    text = page(fair_report())
    parser = Addresses()
    parser.feed(text)
    assert parser.open == []
    # the empty icon, which spares a browser to ask for one
    assert parser.found == ["data:,"]
    style = text[text.index("<style>") : text.index("</style>")]
    assert not re.search(r"url\(|@import", style)
    assert text.count("https://") == 0
    assert text.count("<script") == 2
    assert HOSTILE not in text
    (data,) = re.findall(r'id="data">(.*?)</script>', text, re.DOTALL)
    # NaN is no JSON
    parsed = json.loads(data, parse_constant=lambda name: pytest.fail(name))
    assert parsed["mechanisms"] == ["slay", "softmax", "uniform (control)", HOSTILE]
    (validation,) = [chart for chart in parsed["charts"] if chart["id"] == "validation"]
    # the mean of 3.19 and 3.18, one unit above it half way
    assert validation["series"][0]["mean"] == [
        [1000, pytest.approx(4.185)],
        [2000, pytest.approx(3.185)],
    ]
    assert validation["series"][3]["mean"] == [[1000, None], [2000, None]]


def browser_executable() -> str | None:
    found = [shutil.which(name) for name in BROWSERS]
    return os.environ.get("CHROMIUM") or next((path for path in found if path), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Return a headless browser; skips where none is installed."""
    playwright = pytest.importorskip("playwright.sync_api")
    executable = browser_executable()
    if executable is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed")
    with playwright.sync_playwright() as started:
        # a sandbox of its own is refused to root
        chromium = started.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def open_page(browser: Any, tmp_path: Path) -> Iterator[Any]:
    """Return `open(report, **context)`: the page without network; errors in it fail the test."""
    troubles: list[str] = []
    contexts = []

    def open_(report: Report, **options: Any) -> Any:
        (tmp_path / "comparison.html").write_text(page(report), encoding="utf-8")
        contexts.append(browser.new_context(offline=True, **options))
        opened = contexts[-1].new_page()
        opened.on("console", lambda message: troubles.append(message.text))
        opened.on("pageerror", lambda error: troubles.append(str(error)))
        asked = []
        opened.on("request", lambda request: asked.append(request.url))
        opened.goto((tmp_path / "comparison.html").as_uri())
        opened.wait_for_selector("#validation svg.chart path.mean")
        assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
        return opened

    yield open_
    for context in contexts:
        context.close()
    assert troubles == []


@pytest.mark.slow
def test_tables_sort_and_curves_tell_their_values(open_page: Any) -> None:
    opened = open_page(fair_report(), viewport={"width": 1280, "height": 900})

    def names() -> list[str]:
        # a badge stands behind the name
        return [text.split()[0] for text in opened.locator("#results tbody th").all_inner_texts()]

    assert names() == ["slay", "softmax", "uniform", HOSTILE]
    assert opened.locator("#results tr[data-baseline] th").inner_text().split()[0] == "softmax"
    # numerically: 12.5 is more than 3.5, and NaN is at the end both ways
    heading = opened.locator("#results thead th", has_text="validation loss")
    heading.locator("button").click()
    assert heading.get_attribute("aria-sort") == "ascending"
    assert names() == ["slay", "softmax", "uniform", HOSTILE]
    heading.locator("button").click()
    assert heading.get_attribute("aria-sort") == "descending"
    assert names() == ["uniform", "softmax", "slay", HOSTILE]
    first = opened.locator("#results thead th").first
    first.locator("button").click()
    assert heading.get_attribute("aria-sort") is None
    assert names() == sorted(["slay", "softmax", "uniform", HOSTILE])

    # at the right end of the curves: the last validation
    chart, tooltip = opened.locator("#validation svg.chart"), opened.locator("#validation .tooltip")
    assert tooltip.is_hidden()
    chart.hover(position={"x": chart.bounding_box()["width"] - 20, "y": 100})
    assert tooltip.inner_text().split() == [
        *("2", "k", "tokens", "uniform", "(control)", "12.5000"),
        *("softmax", "3.5150", "slay", "3.1850"),
    ]
    # by the keyboard, and without a mechanism that is switched off
    opened.locator("#legend button", has_text="uniform").click()
    chart.focus()
    opened.keyboard.press("ArrowRight")
    assert tooltip.inner_text().split() == [
        *("1", "k", "tokens", "softmax", "4.5150", "slay", "4.1850"),
    ]
    opened.keyboard.press("Escape")
    assert tooltip.is_hidden()
    # the legend names three, one is off, and the diverged one has no curve
    assert opened.locator("#positions svg.chart path.mean").count() == 2
    assert opened.locator("#environment thead th").count() == 3
    assert opened.locator("#runs tbody tr").count() == 6
    assert opened.locator(".unequal").count() == 0


@pytest.mark.slow
def test_unequal_runs_are_red_in_the_dark_and_on_a_telephone(open_page: Any) -> None:
    runs = [make_run("softmax", 1, 3.5), make_run("slay", 1, 3.2, width=32)]
    report = make_report(runs, allow_differences=True)
    paper = {}
    for scheme in ("light", "dark"):
        opened = open_page(report, color_scheme=scheme, viewport={"width": 380, "height": 800})
        colour = "element => getComputedStyle(element).color"
        red = opened.locator("tr.unfair td").first.evaluate(colour)
        level = [int(part) for part in re.findall(r"\d+", red)[:3]]
        assert level[0] > level[1] + 60
        assert level[0] > level[2] + 60
        alert = opened.locator(".unequal")
        assert "model.width differs: 32 in slay-seed1, 64 in softmax-seed1" in alert.inner_text()
        (line,) = opened.locator("#settings tr.unfair").all_inner_texts()
        assert line.split() == ["model.width", "32", "64"]
        # what is wider than the screen scrolls within itself
        assert opened.evaluate("document.documentElement.scrollWidth") <= 380
        paper[scheme] = opened.evaluate("getComputedStyle(document.body).backgroundColor")
    assert paper["light"] != paper["dark"]
