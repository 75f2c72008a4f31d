"""The benchmark of whole updates: every cell, its parts, both loops, what it refuses."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.image import imread

from slayformer.benchmark.command import run_updates
from slayformer.benchmark.update_options import BenchTrainConfig, split_arguments
from slayformer.benchmark.update_plan import check, plan
from slayformer.benchmark.update_results import UpdateResult
from slayformer.benchmark.updates import PlainLoop, measure_updates
from slayformer.benchmark.updates_report import write_updates
from slayformer.errors import ConfigError, UserError
from slayformer.model.gpt2 import GPT2, Block
from slayformer.training import distributed
from slayformer.training.engine import TrainingEngine
from slayformer.training.objective import LanguageModelObjective

TINY = ["tokenizer=bytes", "model=gpt2_mini", "model.layers=1", "model.width=32", "model.heads=2"]


def request(**changes: Any) -> BenchTrainConfig:
    """Return the options of a tiny run with `changes`."""
    tiny = {"attention": ["softmax", "slay_best"], "loops": ["plain"], "tokens": 32, "rounds": 2}
    return BenchTrainConfig(**{**tiny, "lengths": [8, 16], **changes})


def test_every_cell_its_parts_and_its_record(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    result = measure_updates(request(threads=1), TINY)
    torch.set_num_threads(threads)
    cells = {(c.length, c.mechanism, c.loop): c for c in result.cells}
    names = ("softmax", "slay_best")
    assert set(cells) == {(length, name, "plain") for length in (8, 16) for name in names}
    for cell in result.cells:
        assert cell.left_out is None
        assert cell.rounds == 2
        assert cell.tokens_per_second == pytest.approx(1000 * 32 / cell.milliseconds)  # type: ignore[operator]
        parts = [cell.data_milliseconds, cell.forward_backward_milliseconds]
        parts.append(cell.optimizer_milliseconds)
        assert all(part is not None and part > 0 for part in parts)
        # a CPU's peak is not known
        assert cell.mfu is None
        assert cell.overhead == 1
        assert cell.ratio is not None
        assert cell.ratio > 0
    # slay_best learns something, and both have the vocabulary of 257 without padding
    assert cells[8, "slay_best", "plain"].parameters > cells[8, "softmax", "plain"].parameters  # type: ignore[operator]
    block = 2 * 2 * 32 + 32 * 96 + 96 + 32 * 32 + 32 + 2 * 4 * 32 * 32 + 5 * 32
    assert cells[8, "softmax", "plain"].parameters == (257 + 8) * 32 + block + 2 * 32

    assert UpdateResult.from_plain(json.loads(json.dumps(result.plain()))) == result
    files = write_updates(tmp_path, result)
    with files[1].open(encoding="utf-8") as file:
        assert len(list(csv.DictReader(file))) == 4
    text = files[2].read_text(encoding="utf-8")
    assert text.count("| slay_best | plain |") == 2
    assert imread(files[3]).min() < 0.2
    kept = files[2].read_bytes()
    again = run_updates(request(redraw=str(tmp_path), directory=str(tmp_path / "again")), [])
    assert (again / "bench_train.md").read_bytes() == kept
    with pytest.raises(ConfigError, match=r"redraw=.*cannot be read"):
        run_updates(request(redraw=str(tmp_path / "nowhere")), [])


@pytest.mark.parametrize("loop", [PlainLoop, TrainingEngine])
def test_the_model_is_as_the_engine_options_say_in_every_loop(
    loop: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slayformer.training.engine.check_compiler", lambda device: None)
    compiled: list[Block] = []
    monkeypatch.setattr(Block, "compile", lambda block, **_: compiled.append(block))
    options = [*TINY, "engine.activation_checkpointing=block", "engine.compile=true"]
    (one,) = plan(request(loops=["zero0"], attention=["slay"], lengths=[8]), options).values()
    distributed.initialize()
    model = GPT2(one.model, one.attention, vocabulary_size=257, seed=0)
    made = loop(LanguageModelObjective(model, "fp32"), one)
    (block,) = model.blocks
    assert compiled == [block]
    passes: list[Any] = []
    block.mlp_norm.register_forward_hook(  # type: ignore[union-attr]
        lambda *_: passes.append(1)
    )
    made.backward(made.forward(_Batch(torch.zeros(2, 8, dtype=torch.long))).sum(), last=True)
    made.close()
    # once more in the backward pass
    assert len(passes) == 2


def test_both_loops_make_the_same_update() -> None:
    config = plan(request(loops=["zero1"], attention=["slay_best"], lengths=[8]), TINY)
    (one,) = config.values()
    draws = torch.Generator().manual_seed(0)
    ids = torch.randint(257, (4, 8), generator=draws)
    distributed.initialize()
    norms, weights = [], []
    for kind in (PlainLoop, TrainingEngine):
        model = GPT2(one.model, one.attention, vocabulary_size=257, seed=0)
        loop = kind(LanguageModelObjective(model, "fp32"), one)
        for _ in range(2):
            batch = _Batch(ids)
            loop.backward(loop.forward(batch).sum() / ids.numel(), last=True)  # type: ignore[arg-type]
            norms.append(loop.step(1e-2))
        weights.append([p.detach().clone() for p in model.parameters()])
        loop.close()
    assert norms[:2] == pytest.approx(norms[2:], rel=1e-5)
    for plain, engine in zip(*weights, strict=True):
        torch.testing.assert_close(plain, engine, rtol=1e-4, atol=1e-5)


class _Batch:
    """Ids that are their own targets."""

    document_ids_BT = position_ids_BT = None

    def __init__(self, ids: torch.Tensor) -> None:
        self.ids_BT = self.targets_BT = ids


def test_a_time_budget_leaves_out_and_says_so() -> None:
    result = measure_updates(request(time_budget_s=1e-9), TINY)
    assert {cell.left_out for cell in result.cells} == {"the time budget was used up"}
    assert len(result.cells) == 4


def test_arguments_are_shared_out() -> None:
    given = ["lengths=[8]", "model.layers=1", "--help", "attention=[slay]", "attention.nodes=2"]
    own, others = split_arguments(given)
    assert own == ["lengths=[8]", "--help", "attention=[slay]"]
    assert others == ["model.layers=1", "attention.nodes=2"]


@pytest.mark.parametrize(
    ("changes", "overrides", "message"),
    [
        ({"lengths": [64]}, [], "lengths=64: must be above 0 and at most tokens=32"),
        ({"loops": ["zero"]}, [], "loops=zero: did you mean zero"),
        ({"attention": []}, [], "attention=.*name at least one"),
        ({"attention": ["sley"]}, TINY, "attention=sley: did you mean slay"),
        ({}, ["engine.zero_stage=2"], r"engine.zero_stage=2: loops="),
        ({}, ["model.context_length=2"], r"model.context_length=2: the command goes over"),
        ({}, [*TINY, "engine.deepspeed={a: 1}"], "loops=plain: has no DeepSpeed"),
        ({}, ["budget.tokens=2"], "budget.tokens=2: does not change what an update takes"),
    ],
)
def test_what_cannot_work_is_refused(
    changes: dict[str, Any], overrides: list[str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        plan(check(request(**changes)), overrides)
