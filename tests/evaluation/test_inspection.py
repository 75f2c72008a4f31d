"""The command that shows how mechanisms attend: its table, its files, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread
from omegaconf import OmegaConf

from slayformer.errors import CheckpointError, ConfigError
from slayformer.evaluation.inspection import InspectConfig, read_config, run
from slayformer.presets import preset_names

SCRIPT = "scripts/inspect_attention.py"
NULL = {"attention": None, "checkpoint": None, "head_dim": None, "length": None}


def request(**changes: Any) -> InspectConfig:
    """Return the configuration of the command with `changes`."""
    values = {**NULL, "seeds": 20, "directory": None, **changes}
    return read_config(OmegaConf.create(values))


def check_picture(path: Path) -> None:
    """Assert that the picture can be read and is not blank."""
    picture = imread(path)
    assert picture.shape[0] > 700
    assert picture.shape[1] > 1200
    assert picture.min() < 0.2
    assert picture.max() == 1


def test_table_files_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "shown"
    options = {"attention": ["slay", "slay_nystrom"], "head_dim": [8, 4], "length": 20, "seeds": 2}
    assert run(request(**options, directory=str(folder))) == folder
    record = json.loads((folder / "table.json").read_text(encoding="utf-8"))
    found = [(row["mechanism"], row["head_dim"], row["samples"]) for row in record["rows"]]
    names = ["slay", "slay_nystrom", "uniform"]
    assert found == [(name, width, 2) for width in (8, 4) for name in names]
    first = record["rows"][0]
    assert first["features"] == 384
    assert first["state_bytes"] == 4 * 384 * 9
    assert len(first["entropy_by_position"]) == 20
    assert len(first["score_curve"]["mean"]) == len(record["cosines"])
    assert sum(first["normaliser_histogram"]) == pytest.approx(1)

    captured = capsys.readouterr()
    output = captured.out
    lines = output.splitlines()
    # on standard error how far it is, without a bar's control codes
    assert captured.err.startswith("measuring 1/12 ")
    assert captured.err.splitlines()[-1].startswith("measuring 12/12 ")
    assert captured.err.replace("\n", "").isprintable()
    assert max(map(len, lines[1:-3])) <= 80
    assert [line.split()[0] for line in lines if line.startswith("slay")] == [*names[:2]] * 2
    error = first["relative_error"]
    written = f"{error['mean']:.3f} ±{error['std']:.3f}"
    assert written in output
    markdown = (folder / "table.md").read_text(encoding="utf-8")
    assert f"| head width 8 | slay | {written} |" in markdown
    assert "| head width 4 | uniform † |" in markdown
    for name in ("table.md", "table.json", "attention.png"):
        assert str(folder / name) in lines
    check_picture(folder / "attention.png")


@pytest.mark.slow
def test_the_command(tmp_path: Path, run_command: Any) -> None:
    arguments = ["attention=all", "head_dim=32", "length=9", "seeds=1", "directory=shown"]
    finished = run_command([SCRIPT, *arguments], cwd=tmp_path)
    assert finished.code == 0, finished.stderr
    told = finished.stderr.splitlines()
    assert [line.startswith("measuring ") for line in told] == [True] * len(told)
    assert re.search(r"^measuring (\d+)/\1 ", told[-1])
    lines = finished.stdout.splitlines()
    assert max(map(len, lines[1:])) <= 80
    shown = [line.split()[0] for line in lines if line]
    assert [name for name in shown if name in preset_names()] == preset_names()
    for name in ("table.md", "table.json", "attention.png"):
        assert f"shown/{name}" in lines
    check_picture(tmp_path / "shown" / "attention.png")
    # nothing else is left behind
    assert [path.name for path in tmp_path.iterdir()] == ["shown"]

    refused = run_command([SCRIPT, "attention=[slay,sley]", "directory=other"], cwd=tmp_path)
    assert refused.code == 2
    assert refused.stderr.startswith("error: attention=sley: did you mean slay?")
    assert len(refused.stderr.splitlines()) == 1
    assert refused.stdout == ""
    assert not (tmp_path / "other").exists()


def test_a_checkpoint(tmp_path: Path, tiny_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run(request(checkpoint=str(tiny_run), seeds=3, directory=str(tmp_path / "shown")))
    record = json.loads((folder / "table.json").read_text(encoding="utf-8"))
    assert [(row["mechanism"], row["layer"]) for row in record["rows"]] == [
        *(("slay", 0), ("uniform", 0)),
    ]
    assert record["rows"][0]["samples"] == 3
    # two heads of width 8, the context of 32 tokens
    assert record["rows"][0]["head_dim"] == 8
    assert len(record["rows"][0]["entropy_by_position"]) == 32
    output = capsys.readouterr().out
    assert "layer 1" in output
    assert "3 windows of 32 validation tokens" in output
    check_picture(folder / "attention.png")
    with pytest.raises(ConfigError, match="length=33: the model was made for at most 32 tokens"):
        run(request(checkpoint=str(tiny_run), length=33))


def test_defaults_and_lists() -> None:
    default = request()
    assert (default.attention, default.head_dim, default.length) == (["slay"], [64, 32], 256)
    assert request(attention="all").attention == preset_names()
    one = request(attention="softmax", head_dim=16)
    assert (one.attention, one.head_dim) == (["softmax"], [16])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention": []}, "attention=.*name at least one"),
        ({"attention": ["slay", "slay"]}, "attention=.*each once"),
        ({"head_dim": 1}, "head_dim=1: must be 2 or greater"),
        ({"head_dim": "wide"}, "head_dim"),
        ({"length": 0}, "length=0: must be greater than 0"),
        ({"seeds": 0}, "seeds=0: must be greater than 0"),
        ({"checkpoint": "x", "attention": "slay"}, "attention=.*a checkpoint has its own"),
        ({"checkpoint": "x", "head_dim": 8}, "head_dim=.*a checkpoint has its own"),
        ({"hed_dim": 8}, "hed_dim=8: unknown key; did you mean head_dim"),
    ],
)
def test_what_cannot_work_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        request(**changes)


def test_folders_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        run(request(checkpoint=str(tmp_path / "nowhere")))
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match=r"directory=.*cannot be written"):
        run(request(directory=str(tmp_path / "file")))
    assert (tmp_path / "file").read_text() == "mine"
