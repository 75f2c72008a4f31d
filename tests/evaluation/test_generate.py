"""scripts/generate.py: the text the model gives, and one line for what cannot work."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from slayformer.huggingface.export import ExportConfig
from slayformer.huggingface.export import run as export_hf
from slayformer.model.generation import generate
from slayformer.training.checkpoint import load_model

ROOT = Path(__file__).parents[2]
SCRIPT = "scripts/generate.py"
# what Hydra's grammar would take apart
PROMPT = "a, {b}=é: 'c' ${d}"


@pytest.mark.slow
def test_streams_what_generate_yields(tiny_run: Path, run_command: Any) -> None:
    options = [f"checkpoint={tiny_run}", f"prompt={PROMPT}", "temperature=1.5", "top_k=0", "seed=7"]
    finished = run_command([SCRIPT, *options, "tokens=9"])
    assert finished.code == 0, finished.stderr
    loaded = load_model(tiny_run)
    ids = generate(
        loaded.model,
        loaded.tokenizer.encode(PROMPT),
        max_new_tokens=9,
        temperature=1.5,
        seed=7,
        stop_token=loaded.tokenizer.end_of_text,
    )
    # universal newlines on both sides: bytes tokens may be carriage returns
    expected = (PROMPT + loaded.tokenizer.decode(list(ids))).replace("\r", "\n")
    assert finished.stdout == expected + "\n"
    told = (
        r"new tokens: 9, the first after \d+\.\d\d s \(prompt tokens: \d+\), "
        r"then [\d,]+ tokens/s on cpu"
    )
    assert re.search(told, finished.stderr)


def test_the_speed_leaves_out_the_first_token() -> None:
    speed = runpy.run_path(str(ROOT / SCRIPT))["speed"]
    times = [10.0, 14.0, 14.5, 15.0, 16.0]
    assert speed(times, 1200) == (
        "new tokens: 4, the first after 4.00 s (prompt tokens: 1,200), then 2 tokens/s"
    )
    assert speed(times[:2], 3) == "new tokens: 1, the first after 4.00 s (prompt tokens: 3)"
    assert speed(times[:1], 3) == "new tokens: 0"


@pytest.mark.slow
def test_without_a_prompt_a_document_begins(tiny_run: Path, run_command: Any) -> None:
    finished = run_command([SCRIPT, f"checkpoint={tiny_run}", "temperature=0", "tokens=5"])
    assert finished.code == 0, finished.stderr
    loaded = load_model(tiny_run)
    start = [loaded.tokenizer.end_of_text]
    ids = list(generate(loaded.model, start, max_new_tokens=5, temperature=0))
    assert finished.stdout == loaded.tokenizer.decode(ids) + "\n"


@pytest.mark.slow
def test_an_exported_folder_goes_on_as_its_checkpoint_does(
    tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    exported = export_hf(ExportConfig(checkpoint=str(tiny_run), directory=str(tmp_path / "out")))
    # as the hub would hand it out under a name
    asked: list[str] = []

    def download(name: str, **_: Any) -> str:
        asked.append(name)
        return str(exported)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    texts = []
    for place in (tiny_run, exported, "somebody/tiny"):
        capfd.readouterr()
        options = [f"checkpoint={place}", f"prompt={PROMPT}", "temperature=0", "tokens=8"]
        monkeypatch.setattr("sys.argv", [SCRIPT, *options])
        runpy.run_path(str(ROOT / SCRIPT))["main"]()
        texts.append(capfd.readouterr().out)
    assert texts[0] == texts[1] == texts[2]
    assert texts[0].startswith(PROMPT)
    assert asked == ["somebody/tiny"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "checkpoint=null: needs a run directory"),
        (["checkpoint=nowhere"], "nowhere"),
        (["checkpoint=x", "cuda_graph=yes"], "cuda_graph=yes: must be true or false"),
        (["checkpoints=x"], "checkpoints=x: unknown key; did you mean checkpoint?"),
        (["checkpoint=x", "tokens=many"], "tokens=many: must be a whole number"),
        (["checkpoint=x", "temperature=hot"], "temperature=hot: must be a number"),
        (["checkpoint=x", "prompt"], "prompt: options are written key=value"),
    ],
)
@pytest.mark.slow
def test_mistakes_take_one_line(run_command: Any, arguments: list[str], message: str) -> None:
    finished = run_command([SCRIPT, *arguments])
    assert finished.code == 2
    assert finished.stdout == ""
    assert finished.stderr.count("\n") == 1
    assert message in finished.stderr


@pytest.mark.slow
def test_a_prompt_that_fills_the_context_is_told(tiny_run: Path, run_command: Any) -> None:
    finished = run_command([SCRIPT, f"checkpoint={tiny_run}", f"prompt={'x' * 32}"])
    assert finished.code == 2
    assert "shorter than the model's context of 32 tokens" in finished.stderr


def test_help_tells_every_option(run_command: Any) -> None:
    finished = run_command([SCRIPT, "--help"])
    assert finished.code == 0
    for option in ("checkpoint", "prompt", "tokens", "temperature", "top_k", "seed", "cuda_graph"):
        assert f"  {option}=" in finished.stdout
