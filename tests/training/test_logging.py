"""What a run tells, and that its record survives interruptions and a broken wandb."""

from __future__ import annotations

import io
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from slayformer.errors import ConfigError
from slayformer.training import trackers
from slayformer.training.budget import make_plan
from slayformer.training.logging import RunLog, read_metrics, read_records
from slayformer.training.trackers import check_trackers


def record(update: int) -> dict[str, Any]:
    return {
        "update": update,
        "tokens": 128 * update,
        "loss": 5.0 - update / 10,
        "learning_rate": 0.001,
        "gradient_norm": 1.0,
        "tokens_per_second": 1000.0,
        "samples": 8 * update,
        "milliseconds": 128.0,
    }


def open_log(
    directory: Path,
    config: Any,
    *,
    earlier: list[str] | None = None,
    wandb_id: str | None = None,
    console: Console | None = None,
) -> RunLog:
    return RunLog(
        directory,
        make_plan(config, 257, 1),
        config.logging,
        earlier=earlier or [],
        settings={},
        wandb_id=wandb_id,
        console=console or Console(file=io.StringIO()),
    )


def test_metrics_go_on_after_the_checkpoint(train_config: Any, tmp_path: Path) -> None:
    config, path = train_config(), tmp_path / "metrics.jsonl"
    with open_log(tmp_path, config) as log:
        for update in (1, 2, 3):
            log.train(record(update), warm_tokens_per_second=1000.0)
    # killed while it wrote
    path.write_text(path.read_text() + '{"kind": "train", "upd')
    earlier = read_metrics(path, up_to_update=2, last_update=4)
    with open_log(tmp_path, config, earlier=earlier) as log:
        log.train(record(3), warm_tokens_per_second=1000.0)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["update"] for line in lines] == [1, 2, 3]
    assert lines[0] == {"kind": "train", **record(1)}


def test_a_loss_that_is_not_finite_is_null_for_every_reader_of_json(
    train_config: Any, tmp_path: Path
) -> None:
    def refuse(constant: str) -> None:
        raise ValueError(constant)

    path = tmp_path / "metrics.jsonl"
    with open_log(tmp_path, train_config()) as log:
        for update, loss in enumerate((math.nan, math.inf), start=1):
            told = record(update) | {"loss": loss, "gradient_norm": None}
            log.train(told, warm_tokens_per_second=1000.0)
    for line in path.read_text().splitlines():
        assert json.loads(line, parse_constant=refuse)["loss"] is None
    assert all(math.isnan(found["loss"]) for _, found in read_records(path))
    # as earlier versions wrote it
    path.write_text('{"kind": "train", "update": 1, "loss": NaN}\n')
    (line,) = read_metrics(path, up_to_update=1, last_update=2)
    assert json.loads(line, parse_constant=refuse)["loss"] is None


def test_what_is_no_record_is_skipped(tmp_path: Path) -> None:
    good = json.dumps({"kind": "validation", "update": 4, "loss": 3.0})
    path = tmp_path / "metrics.jsonl"
    for torn in ('{"kind": "vali', '{"kind": "train"}', "7", "[]", "null", ""):
        path.write_text(f"{torn}\n{good}\n{torn}")
        assert read_records(path) == [(good, json.loads(good))]
        assert read_metrics(path, up_to_update=4, last_update=9) == [good]
    # cut off within a character
    path.write_bytes(f"{good}\n".encode() + '{"kind": "ü'.encode()[:-1])
    assert read_records(path) == [(good, json.loads(good))]


def test_a_run_without_metrics_has_none_to_go_on_from(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "metrics.jsonl", up_to_update=5, last_update=5) == []


def test_the_validation_that_is_done_again_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [
        json.dumps({"kind": kind, "update": update})
        for update in (2, 4)
        for kind in ("train", "validation")
    ]
    path.write_text("\n".join(lines))
    assert read_metrics(path, up_to_update=4, last_update=4) == lines[:3]
    assert read_metrics(path, up_to_update=4, last_update=6) == lines


def test_plain_lines_without_a_terminal(train_config: Any, tmp_path: Path) -> None:
    config = train_config("logging.every_updates=2", "budget.updates=5")
    console = Console(file=io.StringIO(), width=200)
    with open_log(tmp_path, config, console=console) as log:
        for update in range(1, 6):
            log.train(record(update), warm_tokens_per_second=64.0 if update > 1 else None)
    printed = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    # the first, every second, the last
    assert [line.split()[1] for line in printed] == ["1/5", "2/5", "4/5", "5/5"]
    assert "left" not in printed[0]
    # 384 tokens left at 64 tokens/s
    assert printed[1] == (
        "update 2/5  loss 4.8000 nats/token  1,000 tokens/s  learning rate 1.00e-03  left 0:00:06"
    )


def test_a_broken_wandb_is_a_warning(
    train_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wandb.py").write_text("raise OSError('cannot write to the cache')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    console = Console(file=io.StringIO(), width=200)
    with open_log(tmp_path, train_config("logging.wandb=offline"), console=console) as log:
        log.train(record(1), warm_tokens_per_second=1.0)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert printed.count("warning: wandb failed (cannot write to the cache)") == 1
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1


@pytest.mark.slow
def test_wandb_that_cannot_write_lets_training_go_on(
    train_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("WANDB_SILENT", "true")
    # no folder can be made beneath a file, whoever asks
    (tmp_path / "wandb").write_text("")
    console = Console(file=io.StringIO(), width=200)
    with open_log(tmp_path, train_config("logging.wandb=offline"), console=console) as log:
        log.train(record(1), warm_tokens_per_second=1.0)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert printed.count("warning: wandb failed") == 1
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1


def test_tensorboard_has_every_number_once_over_a_resume(train_config: Any, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config, path = train_config("logging.tensorboard=true"), tmp_path / "metrics.jsonl"
    with open_log(tmp_path, config) as log:
        for update in (1, 2, 3):
            log.train(record(update), warm_tokens_per_second=1000.0)
    earlier = read_metrics(path, up_to_update=2, last_update=4)
    with open_log(tmp_path, config, earlier=earlier) as log:
        for update in (3, 4):
            log.train({**record(update), "loss": 1.0}, warm_tokens_per_second=1000.0)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    told = {event.step: event.value for event in events.Scalars("train/loss")}
    assert told == pytest.approx({1: 4.9, 2: 4.8, 3: 1.0, 4: 1.0})
    assert {f"train/{key}" for key in record(1)} - {"train/update"} <= set(events.Tags()["scalars"])


def test_tensorboard_that_fails_is_a_warning(
    train_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    console = Console(file=io.StringIO(), width=200)
    with open_log(tmp_path, train_config("logging.tensorboard=true"), console=console) as log:
        log.train(record(1), warm_tokens_per_second=1.0)
    assert console.file.getvalue().count("warning: tensorboard failed") == 1  # type: ignore[attr-defined]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1


def test_tensorboard_without_its_package_is_one_clear_error(
    train_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    check_trackers(train_config().logging)
    told = r"^logging.tensorboard=true: the package is missing: pip install tensorboard$"
    with pytest.raises(ConfigError, match=told):
        check_trackers(train_config("logging.tensorboard=true").logging)


@pytest.mark.slow
def test_wandb_offline_keeps_one_run_over_a_resume(
    train_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("WANDB_SILENT", "true")
    config = train_config("logging.wandb=offline")
    with open_log(tmp_path, config) as log:
        log.train(record(1), warm_tokens_per_second=1.0)
        identity = log.wandb_id
    assert identity
    with open_log(tmp_path, config, wandb_id=identity) as log:
        log.train(record(2), warm_tokens_per_second=1.0)
        assert log.wandb_id == identity
    written = list((tmp_path / "wandb").glob("offline-run-*"))
    assert written
    assert all(folder.name.endswith(identity) for folder in written)
