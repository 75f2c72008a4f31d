"""The benchmark of attention measures every cell, says what it left out, and keeps what it found.

No time is compared with another: only what must be so on any machine.
"""

from __future__ import annotations

import csv
import json
import multiprocessing
import re
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.image import imread
from omegaconf import OmegaConf

from slayformer.benchmark import decode, memory
from slayformer.benchmark.attention import measure, measure_scaling
from slayformer.benchmark.clock import CLOCKS, Clock, Samples, time_rounds
from slayformer.benchmark.command import run
from slayformer.benchmark.contestants import PEERS, Runner, Shape, Unavailable, make_runner
from slayformer.benchmark.coverage import covers
from slayformer.benchmark.figure import draw_scaling
from slayformer.benchmark.memory import LeftOut, Trial, try_call
from slayformer.benchmark.options import DEFAULTS, PASSES, BenchAttentionConfig, read_config
from slayformer.benchmark.report import markdown, write_report
from slayformer.benchmark.results import Cell, Result, crossover
from slayformer.errors import ConfigError
from slayformer.presets import make_attention, preset_names

CPU = torch.device("cpu")
MIB = 2**20
TINY: dict[str, Any] = {"heads": 2, "head_dim": 8, "rounds": 2, "threads": 1, "device": "cpu"}
NAMES = ["torch_sdpa", "naive_softmax", "flash_attn", "slay", "softmax"]


def request(**changes: Any) -> BenchAttentionConfig:
    """Return the configuration of a command with `changes`."""
    return read_config(OmegaConf.create({**TINY, **changes}))


def by_key(cells: list[Cell]) -> dict[tuple[str, str, int], Cell]:
    """Return the cells by pass, contestant and length, each of them once."""
    found = {(cell.pass_name, cell.contestant, cell.length): cell for cell in cells}
    assert len(found) == len(cells)
    return found


@pytest.fixture(scope="module")
def measured() -> Result:
    """Return what a run of all passes finds."""
    return measure(request(mechanisms=NAMES[3:], peers=NAMES[:3], lengths=24, contexts=[5, 12]))


def test_every_cell_is_there_and_positive(measured: Result) -> None:
    cells = by_key(measured.cells)
    timed = {(p, n, 24) for p in PASSES[:2] for n in NAMES}
    decoded = {("decode", n, context) for n in (NAMES[0], *NAMES[3:]) for context in (5, 12)}
    assert set(cells) == timed | decoded
    for (pass_name, name, length), cell in cells.items():
        if name == "flash_attn":
            assert cell.left_out == "flash-attn computes on CUDA GPUs only"
            assert cell.milliseconds is None
            continue
        assert cell.left_out is None
        assert cell.rounds == 2
        assert 0 < cell.lower_milliseconds <= cell.milliseconds <= cell.upper_milliseconds  # type: ignore[operator]
        tokens = 1 if pass_name == "decode" else length
        assert cell.tokens_per_second == pytest.approx(1000 * tokens / cell.milliseconds)  # type: ignore[operator]
        assert cell.ratio is not None
        assert cell.ratio > 0
        if name == "torch_sdpa":
            assert cell.ratio == 1
    assert measured.engines == {"slay": measured.engines["slay"], "softmax": "pairs"}
    assert measured.machine["threads"] == 1
    assert measured.machine["packages"]["torch"] == torch.__version__


def test_decoding_is_right_and_its_state_is_counted(measured: Result) -> None:
    cells = by_key(measured.cells)
    for name in (NAMES[0], *NAMES[3:]):
        for context in (5, 12):
            error = cells["decode", name, context].error
            assert error is not None
            assert error <= 1e-5
    slay = make_attention("slay", num_heads=2, head_dim=8, max_sequence_length=40)
    sizes = [cells["decode", "slay", context].memory_bytes for context in (5, 12)]
    assert sizes[0] == sizes[1]
    # beside features × (E + 1) it holds where it is: a few whole numbers
    assert 0 <= sizes[0] - slay.state_bytes(12) < 100  # type: ignore[operator]
    # keys and values
    assert cells["decode", "torch_sdpa", 12].memory_bytes == 2 * 12 * 2 * 8 * 4


def test_record_comes_back_and_is_drawn_again(
    measured: Result, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert Result.from_plain(json.loads(json.dumps(measured.plain()))) == measured
    written = write_report(tmp_path, measured)
    text = {path.name: path.read_bytes() for path in written}
    assert [*text] == [f"bench_attention.{kind}" for kind in ("json", "csv", "md", "png")]
    with written[1].open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(measured.cells)
    markdown = written[2].read_text(encoding="utf-8")
    for name in NAMES:
        assert f"| {name} |" in markdown
    assert "flash-attn computes on CUDA GPUs only" in markdown
    assert "| forward | flash_attn | 24 |" in markdown
    picture = imread(written[3])
    assert picture.min() < 0.2
    assert picture.max() == 1

    again = tmp_path / "again"
    run(request(redraw=str(tmp_path), directory=str(again)))
    output = capsys.readouterr().out
    assert "naive_softmax" in output
    for name in ("bench_attention.json", "bench_attention.csv", "bench_attention.md"):
        assert (again / name).read_bytes() == text[name]
        assert str(again / name) in output.splitlines()
    (tmp_path / "bench_attention.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"redraw=.*is not a record"):
        run(request(redraw=str(tmp_path)))
    with pytest.raises(ConfigError, match=r"redraw=.*cannot be read"):
        run(request(redraw=str(tmp_path / "nowhere")))


def test_the_command_tells_a_log_how_far_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = {"mechanisms": ["softmax"], "peers": [], "passes": ["forward"], "lengths": [8]}
    run(request(**one, directory=str(tmp_path / "timed")))
    told = capsys.readouterr().err
    assert re.search(r"^forward, 8 tokens: softmax 0/3 ", told)
    assert re.search(r" 3/3 ", told.splitlines()[-1])
    assert told.replace("\n", "").isprintable()


def test_memory_is_that_of_the_scores() -> None:
    shape = Shape(1, 2, 8, 1024, torch.float32, CPU)
    scores = 2 * 1024 * 1024 * 4

    def tried(name: str, limit: int) -> Trial:
        return try_call(
            name,
            shape,
            backward=False,
            limit_bytes=limit,
            limit_seconds=60,
            threads=1,
            clock=Clock(CPU, "cpu"),
        )

    naive, fused = tried("naive_softmax", 200 * MIB), tried("torch_sdpa", 200 * MIB)
    assert 2 * scores - MIB < naive.bytes < 5 * scores
    assert fused.bytes < scores / 2
    assert naive.seconds > 0
    with pytest.raises(LeftOut, match="more than 12 MiB"):
        tried("naive_softmax", 12 * MIB)


def test_limits_leave_out_and_say_so() -> None:
    options = {"mechanisms": ["slay"], "peers": ["torch_sdpa"], "passes": ["forward"]}
    result = measure(request(**options, lengths=[8, 16], longest_call_s=1e-9))
    for cell in result.cells:
        assert cell.left_out is not None
        assert cell.left_out.endswith("s a call, longer than 1e-09 s")
        assert cell.left_out_since == (8 if cell.length == 16 else None)
    # a line for each contestant, both lengths in it
    assert len(re.findall(r"^\| forward \| .* \| 8, 16 \| ", markdown(result), re.M)) == 2
    result = measure(request(**options, lengths=[8], contexts=[4], time_budget_s=1e-9))
    assert {cell.left_out for cell in result.cells} == {"the time budget was used up"}


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, seconds: Callable[[int], float]) -> Clock:
    """Let every contestant take `seconds` of the returned clock for a length, or raise."""
    now = [0.0]
    monkeypatch.setitem(CLOCKS, "pretended", lambda: now[0])
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 5)
    monkeypatch.setattr(memory, "peak_memory_bytes", lambda device: 12)

    def attend(q: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        now[0] += seconds(q.shape[2])
        return q

    for module in (memory, decode):
        monkeypatch.setattr(module, "make_runner", lambda name, shape: Runner(attend))
    monkeypatch.setattr(decode, "scaled_dot_product_attention", attend)
    return Clock(CPU, "pretended")


def test_what_a_length_compiles_first_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[int] = set()

    def seconds(length: int) -> float:
        first = length not in seen
        seen.add(length)
        return 100.0 if first and length > 1 else 1.0

    clock = pretend_gpu(monkeypatch, seconds)
    shape = Shape(1, 2, 8, 1024, torch.float32, CPU)
    assert memory._try_here("slay", shape, False, 10.0, clock) == Trial(7, 1.0)
    cells = decode.measure_decode(
        ["torch_sdpa"], shape, contexts=[5, 12], rounds=1, clock=clock, longest_seconds=10
    )
    assert [cell.left_out for cell in cells] == [None, None]


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (TypeError("takes 2 arguments\nbut 3 were given"), "it fails: takes 2 arguments"),
        (ConfigError("attention.backend", "triton", "use torch"), "it fails: attention.backend="),
        (ValueError(), "it fails: ValueError"),
        (Unavailable("not here"), "not here"),
    ],
    ids=lambda given: type(given).__name__,
)
def test_a_call_that_fails_is_left_out_with_the_reason(
    error: Exception, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(length: int) -> float:
        raise error

    clock = pretend_gpu(monkeypatch, fail)
    shape = Shape(1, 2, 8, 16, torch.float32, CPU)
    with pytest.raises((LeftOut, Unavailable), match=f"^{told}"):
        memory._try_here("slay", shape, False, 10.0, clock)
    ours, theirs = multiprocessing.Pipe()
    memory._child(theirs, "slay", shape, False, MIB, 10.0, torch.get_num_threads(), clock)
    assert str(ours.recv()).startswith(told)
    cells = decode.measure_decode(
        ["torch_sdpa"], shape, contexts=[5, 12], rounds=1, clock=clock, longest_seconds=10
    )
    assert all(cell.left_out is not None and cell.left_out.startswith(told) for cell in cells)


def test_figures_of_others(tmp_path: Path) -> None:
    result = measure_scaling(["slay", "torch_sdpa"], [8, 16], **TINY)
    assert [(c.contestant, c.length) for c in result.cells] == [
        *(("torch_sdpa", 8), ("torch_sdpa", 16), ("slay", 8), ("slay", 16)),
    ]
    draw_scaling(tmp_path / "scaling.png", result.cells, title="time")
    assert imread(tmp_path / "scaling.png").min() < 0.2


@pytest.mark.parametrize("name", ["naive_softmax", "naive_yat_spherical"])
def test_naive_forms_are_the_mechanisms(name: str) -> None:
    shape = Shape(2, 2, 8, 33, torch.float64, CPU)
    q, k, v = shape.draw()
    mechanism = make_runner(name.removeprefix("naive_"), shape)
    torch.testing.assert_close(
        make_runner(name, shape).attend(q, k, v), mechanism.attend(q, k, v), rtol=1e-9, atol=1e-12
    )


def test_installed_peers_attend_causally() -> None:
    shape = Shape(1, 2, 8, 20, torch.float32, CPU)
    q, k, v = shape.draw()
    for name in ("performer_pytorch", "fast_transformers"):
        try:
            runner = make_runner(name, shape)
        except Unavailable:
            assert find_spec(name) is None
            continue
        y = runner.attend(q, k, v)
        assert y.shape == v.shape
        changed = v.clone()
        changed[:, :, 15:] += 1
        again = runner.attend(q, k, changed)
        torch.testing.assert_close(again[:, :, :15], y[:, :, :15])
        # weights sum to one, up to what they add to the normaliser
        ones = torch.ones_like(v)
        torch.testing.assert_close(runner.attend(q, k, ones), ones, rtol=0, atol=0.02)


def test_statistics() -> None:
    samples = Samples([4.0, 1.0, 2.0, 3.0, 10.0])
    assert samples.median == 3
    assert samples.quartiles == (2, 4)
    assert Samples([5.0]).quartiles == (5, 5)
    # round by round: 2, 0.5, 1
    assert Samples([2.0, 1.0, 3.0]).ratio(Samples([1.0, 2.0, 3.0])) == 1

    def cells(*ratios: float | None) -> dict[int, Cell]:
        return {2**i: Cell("slay", "forward", 2**i, ratio=r) for i, r in enumerate(ratios)}

    assert crossover(cells(2, 1.1, 0.9, 0.5)) == 4
    assert crossover(cells(0.9, 1.1, 0.9, None)) == 4
    assert crossover(cells(0.9, 1.1)) is None
    assert crossover(cells(0.9, 0.8)) == 1
    assert crossover(cells(None)) is None


def test_rounds_take_turns() -> None:
    order: list[str] = []

    def call(name: str) -> Any:
        return lambda: order.append(name)

    found = time_rounds({n: call(n) for n in "ab"}, rounds=3, clock=Clock(CPU))
    assert {name: len(sample.seconds) for name, sample in found.items()} == {"a": 3, "b": 3}
    turns = [name for name, before in zip(order, ["", *order], strict=False) if name != before]
    # once to warm up, then three rounds
    assert turns == ["a", "b"] * 4
    late = Clock(CPU, deadline=0.0)
    assert time_rounds({"a": call("a")}, rounds=3, clock=late) == {}


def test_coverage_names_what_an_engine_does_not_do() -> None:
    shape = Shape(1, 2, 8, 9, torch.float32, CPU, "torch")
    assert covers("slay", shape) == (True, "")
    assert covers("softmax", replace(shape, backend="cpu")) == (False, "over explicit pairs")


def test_defaults() -> None:
    config = request()
    assert config.mechanisms == preset_names()
    assert config.peers == [*PEERS]
    assert config.lengths == DEFAULTS["lengths"]() == [2**p for p in range(7, 18)]
    assert config.passes == [*PASSES]
    quick = request(quick=True, lengths=64)
    assert quick.lengths == [64]
    assert len(quick.mechanisms or []) < 8
    assert request(mechanisms="all", passes="decode").passes == ["decode"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mechanisms": ["sley"]}, "mechanisms=sley: did you mean slay"),
        ({"mechanisms": ["slay", "slay"]}, "mechanisms=.*each once"),
        ({"mechanisms": [], "peers": []}, "mechanisms=.*name at least one"),
        ({"peers": "torch_spda"}, "peers=torch_spda: did you mean torch_sdpa"),
        ({"passes": "backward"}, "passes=backward: "),
        ({"lengths": [0]}, "lengths=0: must be greater than 0"),
        ({"lengths": []}, "lengths=.*name at least one"),
        ({"dtype": "fp8"}, "dtype=fp8"),
        ({"backend": "cuda"}, "backend=cuda: .*torch"),
        ({"rounds": 0}, "rounds=0: must be greater than 0"),
        ({"hed_dim": 8}, "hed_dim=8: unknown key; did you mean head_dim"),
    ],
)
def test_what_cannot_work_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        request(**changes)
