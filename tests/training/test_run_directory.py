"""Where runs live: new ones are unique, resumed ones are found, nothing is overwritten."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from slayformer.config import TrainConfig
from slayformer.data.prepare import prepare
from slayformer.data.tokenizer import BytesTokenizer
from slayformer.errors import CheckpointError, ConfigError, UserError
from slayformer.model.gpt2 import GPT2
from slayformer.training import run_directory
from slayformer.training.budget import Plan, make_plan
from slayformer.training.checkpoint import read_config
from slayformer.training.run_directory import (
    RunStart,
    start_run,
    with_absolute_paths,
    write_records,
)
from slayformer.training.run_lock import RunLock
from slayformer.training.saving import Snapshot, write_checkpoint


def start(config: TrainConfig) -> RunStart:
    data = prepare(config.data, config.tokenizer)
    return start_run(with_absolute_paths(config), plan_of(config), data, RunLock())


def plan_of(config: TrainConfig) -> Plan:
    return make_plan(config, 257, 1)


def add_checkpoint(run: Path, config: TrainConfig, update: int) -> Path:
    """Write a checkpoint (without optimizer state) as rank 0 does."""
    model = GPT2(config.model, config.attention, vocabulary_size=257, seed=0)
    tokenizer = BytesTokenizer()
    state = {"update": update, "samples": 8 * update, "world_size": 1}
    state["tokenizer"] = tokenizer.identity  # type: ignore[assignment]
    return write_checkpoint(run, Snapshot(state, model.state_dict(), {}, []), config, tokenizer)


def test_two_runs_in_one_second_get_two_directories(
    train_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_directory.time, "strftime", lambda form: "20300101-120000")
    config = train_config("attention=linear_elu")
    names = [start(config).directory for _ in range(3)]
    expected = ["linear_elu-20300101-120000" + end for end in ("", "-2", "-3")]
    assert names == [tmp_path / "runs" / name for name in expected]
    assert all(name.is_dir() for name in names)


def test_a_directory_with_a_run_is_not_used_again(train_config: Any, tmp_path: Path) -> None:
    config = train_config(f"run_directory={tmp_path / 'run'}")
    assert start(config) == RunStart(tmp_path / "run")
    write_records(tmp_path / "run", config, plan_of(config))
    with pytest.raises(ConfigError, match=r"run_directory=.*already holds a run.*resume=auto"):
        start(config)


def test_directories_that_cannot_be_made(train_config: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "inside"):
        with pytest.raises(ConfigError, match="run_directory=") as caught:
            start(train_config(f"run_directory={path}"))
        assert "\n" not in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_directory_without_permission(train_config: Any, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="name a folder you may write to"):
        start(train_config(f"run_directory={tmp_path / 'run'}"))


def test_auto_without_a_checkpoint_starts_anew_there(train_config: Any, tmp_path: Path) -> None:
    config = train_config(f"run_directory={tmp_path / 'run'}", "resume=auto")
    assert start(config) == RunStart(tmp_path / "run")
    write_records(tmp_path / "run", config, plan_of(config))
    assert start(config) == RunStart(tmp_path / "run")


def test_going_on_in_place_and_branching_off(train_config: Any, tmp_path: Path) -> None:
    run, new = tmp_path / "run", tmp_path / "new"
    config = train_config(f"run_directory={run}")
    first, newest = (add_checkpoint(run, config, update) for update in (2, 4))
    in_place = RunStart(run, newest, run)
    assert start(train_config(f"run_directory={run}", "resume=auto")) == in_place
    for resume in (run, newest):
        assert start(train_config(f"resume={resume}")) == in_place
    assert not new.exists()
    with pytest.raises(CheckpointError, match=r"update_0000002 is not the newest of its run"):
        start(train_config(f"resume={first}"))
    branched = start(train_config(f"resume={first}", f"run_directory={new}"))
    assert branched == RunStart(new, first, run)
    assert branched.is_branch
    assert not in_place.is_branch
    assert new.is_dir()
    # a damaged newest is passed over with a warning
    (newest / "model.safetensors").write_bytes(b"")
    fallen_back = start(train_config(f"run_directory={run}", "resume=auto"))
    assert (fallen_back.directory, fallen_back.checkpoint) == (run, first)
    assert not fallen_back.is_branch
    assert "update_0000004 is damaged" in fallen_back.warnings[0]
    # so is one that was deleted
    shutil.rmtree(newest)
    for asked in ([f"run_directory={run}", "resume=auto"], [f"resume={run}"], [f"resume={first}"]):
        assert start(train_config(*asked)).checkpoint == first


def test_a_checkpoint_on_its_own_needs_a_new_directory(train_config: Any, tmp_path: Path) -> None:
    folder = add_checkpoint(tmp_path / "run", train_config(), 4)
    copied = folder.rename(tmp_path / folder.name)
    with pytest.raises(CheckpointError, match="give run_directory=NEW_FOLDER"):
        start(train_config(f"resume={copied}"))
    new = tmp_path / "new"
    assert start(train_config(f"resume={copied}", f"run_directory={new}")) == RunStart(new, copied)


def test_a_damaged_or_other_checkpoint_is_refused_and_nothing_made(
    train_config: Any, tmp_path: Path
) -> None:
    folder = add_checkpoint(tmp_path / "run", train_config(), 4)
    new = f"run_directory={tmp_path / 'new'}"
    with pytest.raises(CheckpointError, match="saved with seed=0, which is not 7"):
        start(train_config(f"resume={folder}", new, "seed=7"))
    (folder / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="half-written"):
        start(train_config(f"resume={folder}", new))
    with pytest.raises(CheckpointError, match="there is no such folder"):
        start(train_config(f"resume={tmp_path / 'nowhere'}", new))
    assert not (tmp_path / "new").exists()


def test_paths_become_absolute(
    train_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = train_config(
        *("data.source.path=texts", "data.cache_directory=cache"),
        *("run_directory=run", "resume=old"),
    )
    absolute = with_absolute_paths(config)
    paths = (
        absolute.data.source.path,
        absolute.data.cache_directory,
        absolute.run_directory,
        absolute.resume,
    )
    assert paths == tuple(str(tmp_path / name) for name in ("texts", "cache", "run", "old"))
    # the name of a dataset is no path, `auto` neither
    named = train_config(
        *("data=wikitext2", "data.source.path=Salesforce/wikitext"),
        *("run_directory=run", "resume=auto"),
    )
    absolute = with_absolute_paths(named)
    assert absolute.resume == "auto"
    assert absolute.data.source.path == "Salesforce/wikitext"


def test_records_of_a_run(train_config: Any, tmp_path: Path) -> None:
    config = with_absolute_paths(train_config("attention=slay"))
    (tmp_path / "summary.json").write_text("of an earlier end")
    write_records(tmp_path, config, plan_of(config))
    assert read_config(tmp_path) == config
    assert json.loads((tmp_path / "plan.json").read_text())["updates"] == 4
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert environment["packages"]["torch"].startswith("2.")
    assert not (tmp_path / "summary.json").exists()


def test_a_record_is_written_whole_or_stays_as_it_was(
    train_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = train_config("attention=slay")
    write_records(tmp_path, config, plan_of(config))

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    for name in ("config.yaml", "plan.json", "environment.json"):
        before = (tmp_path / name).read_text()
        with pytest.raises(UserError, match=r"cannot be written: .*No space left"):
            write_records(tmp_path, train_config("seed=8"), plan_of(config))
        assert (tmp_path / name).read_text() == before
    assert not list(tmp_path.glob("*.tmp"))


def test_run_names_tell_mechanism_and_time(
    train_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = time.strftime("%Y%m%d")
    name = start(train_config("attention=softmax")).directory.name
    assert name.startswith((f"softmax-{before}-", f"softmax-{time.strftime('%Y%m%d')}-"))
