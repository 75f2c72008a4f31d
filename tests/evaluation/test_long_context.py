"""Needles in haystacks: the task by its definition, what is refused, and a run from end to end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from slayformer.attention.base import generator
from slayformer.cli import COMMANDS, compose
from slayformer.config import ModelConfig
from slayformer.config_commands import LongContextConfig
from slayformer.config_loading import load_config
from slayformer.errors import ConfigError
from slayformer.evaluation.long_context import draw_haystacks, measure, run, samples_of
from slayformer.evaluation.long_context_report import interval, markdown
from slayformer.model.gpt2 import GPT2
from slayformer.presets import load_preset
from slayformer.training.objective import IGNORE_INDEX


def config(*overrides: str) -> LongContextConfig:
    return load_config(compose("long_context", list(overrides), COMMANDS), LongContextConfig)


@pytest.mark.parametrize(
    ("length", "pairs", "rounds"), [(2, 1, 1), (8, 4, 1), (65, 4, 3), (1000, 16, 1)]
)
def test_every_pair_is_told_once_and_asked_once_a_round(
    length: int, pairs: int, rounds: int
) -> None:
    sizes = (
        "keys=16",
        "values=9",
        "fillers=5",
        "training_lengths_tokens=[32]",
        "lengths_tokens=[32]",
    )
    wanted = config(f"pairs={pairs}", *sizes)
    ids, targets = draw_haystacks(length, 7, wanted, generator(1), rounds=rounds)
    assert ids.shape == targets.shape == (7, length + 2 * pairs * rounds)
    depths = set()
    for row, target in zip(ids.tolist(), targets.tolist(), strict=True):
        places = [place for place in range(length) if row[place] < 16]
        told = {row[place]: row[place + 1] for place in places}
        assert len(told) == len(places) == pairs
        assert all(16 <= value < 25 for value in told.values())
        rest = set(range(length)) - {place + step for place in places for step in (0, 1)}
        assert all(25 <= row[place] < 30 for place in rest)
        asked = row[length::2]
        for start in range(0, pairs * rounds, pairs):
            assert sorted(asked[start : start + pairs]) == sorted(told)
        assert row[length + 1 :: 2] == target[length::2] == [told[key] for key in asked]
        assert set(target[:length] + target[length + 1 :: 2]) == {IGNORE_INDEX}
        depths.update(places)
    # anywhere, not only at the beginning
    assert max(depths) >= length // 2 - 1


def test_reading_in_segments_is_reading_at_once() -> None:
    # what is said after a haystack does not depend on how it was read, nor does its length end
    wanted = config("pairs=2", "samples=3", "segment_tokens=7", "model.width=16")
    other = config("pairs=2", "samples=3", "segment_tokens=1000", "model.width=16")
    shape = ModelConfig(layers=2, heads=2, width=16, context_length=8, short_convolution=4)
    found = set()
    for attention in ("softmax", "slay_best"):
        model = GPT2(shape, load_preset(attention), vocabulary_size=20, seed=1).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3)
        ids, targets = draw_haystacks(90, 3, wanted, generator(2**31 - 1))
        # by the model at once, where all positions are the first
        with torch.no_grad():
            states = model.init_states(3)
            hidden, _ = model(ids, position_ids_BT=torch.zeros_like(ids), states=states)
            said = model.logits(hidden).argmax(-1)
        right = int((said == targets).sum())
        for one in (wanted, other):
            row = measure(model, attention, 90, one)
            assert (row.found, row.asked) == (right, 6)
            assert row.state_bytes == model.state_bytes(90)
            assert row.read_ms_per_token > 0
            assert row.next_token_ms > 0
        found.add(row.state_bytes)
    assert len(found) == 2


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["pairs=5"], "pairs=5: .*at most keys=4"),
        (["lengths_tokens=[3]"], r"lengths_tokens=\[3\]: .* 2 pairs take 4 tokens"),
        (["training_lengths_tokens=[]"], r"training_lengths_tokens=\[\]: name at least one"),
        (["tokens_per_update=100"], "tokens_per_update=100: .* takes 144 tokens"),
        (["attention=[slay,slay]"], "attention=.*each once"),
        (["attention=[sley]"], "attention=sley: did you mean slay"),
        (["attention=[cosformer]"], "attention=cosformer: .* not beyond"),
        (["model.heads=3"], "model.heads=3: must divide"),
        (["schedule.warmup_updates=5000"], "schedule.warmup_updates=5000: longer"),
    ],
)
def test_what_cannot_work_is_refused(
    overrides: list[str], message: str, monkeypatch: Any, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        run(config(*overrides))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_run_finds_needles_in_longer_haystacks_than_it_trained_on(tmp_path: Path) -> None:
    options = [
        *("attention=[softmax]", "pairs=1", "keys=2", "values=2", "fillers=2"),
        *("training_lengths_tokens=[4,8]", "tokens_per_update=640", "updates=150"),
        *("samples=40", "read_tokens=1600", "schedule.warmup_updates=10"),
        *("model.layers=1", "model.width=32", f"directory={tmp_path}"),
    ]
    rows = run(config(*options, "lengths_tokens=[8,40]"))
    assert [row.length_tokens for row in rows] == [8, 40]
    # half of it would be chance; one in 10^7 by chance has 36 of 40
    assert all(row.found >= 36 and row.asked == 40 for row in rows)
    # a softmax remembers every key and value, 2 × 32 numbers of 4 bytes
    assert [row.state_bytes for row in rows] == [8 * 256, 40 * 256]
    record = json.loads((tmp_path / "table.json").read_text())
    assert [row["found"] for row in record["rows"]] == [row.found for row in rows]
    ends = [row["found_share_95_percent_interval"] for row in record["rows"]]
    assert ends == [[*interval(row.found, row.asked)] for row in rows]
    assert "| softmax | 40 |" in (tmp_path / "table.md").read_text()
    assert (tmp_path / "long_context.png").read_bytes().startswith(b"\x89PNG")
    assert len((tmp_path / "softmax.jsonl").read_text().splitlines()) == 150

    # a longer one joins: nothing is trained or measured again, and it has what fits read_tokens
    weights = (tmp_path / "softmax.safetensors").stat().st_mtime_ns
    again = run(config(*options, "lengths_tokens=[60,40]"))
    assert again[:2] == rows
    assert [(row.length_tokens, row.asked) for row in again[2:]] == [(60, 26)]
    assert (tmp_path / "softmax.safetensors").stat().st_mtime_ns == weights
    assert len((tmp_path / "softmax.jsonl").read_text().splitlines()) == 150
    with pytest.raises(ConfigError, match=r"pairs=2: .* was made with 1; choose another directory"):
        run(config(*options, "pairs=2"))


def test_long_haystacks_are_fewer_where_the_state_grows() -> None:
    sizes = config("samples=32", "read_tokens=131072", "constant_state_read_tokens=400000")
    shape = ModelConfig(layers=1, heads=1, width=8, context_length=8)
    for name, expected in (("softmax", [32, 16, 2, 1]), ("slay_best", [32, 32, 6, 2])):
        model = GPT2(shape, load_preset(name), vocabulary_size=20, seed=1)
        lengths = (512, 8192, 65536, 200_000)
        assert [samples_of(length, sizes, model) for length in lengths] == expected


def test_the_interval_is_wilsons() -> None:
    # 2 of 4: (p + z²/2n ± z √(p(1−p)/n + z²/4n²)) / (1 + z²/n) with z = 1.95996
    z = 1.959963984540054
    centre, scale = 0.5 + z**2 / 8, 1 + z**2 / 4
    half = z * (0.25 / 4 + z**2 / 64) ** 0.5
    assert interval(2, 4) == pytest.approx(((centre - half) / scale, (centre + half) / scale))
    assert interval(0, 4) == (0.0, pytest.approx(z**2 / (4 + z**2)))
    assert interval(64, 64) == (pytest.approx(64 / (64 + z**2)), 1.0)
    row = {
        **{"mechanism": "slay", "length_tokens": 8, "found": 2, "asked": 4, "state_bytes": 8},
        **{"read_ms_per_token": 1.0, "next_token_ms": 1.0},
    }
    assert "| slay | 8 | 50.0 | 15–85 | 4 |" in markdown([row], "about", 0.1)
