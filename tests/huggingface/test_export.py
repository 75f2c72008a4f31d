"""scripts/export_hf.py: the exported folder is the checkpoint, for lm-evaluation-harness too."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from slayformer.errors import UserError
from slayformer.huggingface import SlayformerForCausalLM
from slayformer.huggingface.export import ExportConfig
from slayformer.huggingface.export import run as export_hf
from slayformer.training.checkpoint import load_model

DOCUMENT = Path(__file__).parents[2] / "docs" / "transformers.md"
SCRIPT = "scripts/export_hf.py"
SHAPE = ["model.layers=2", "model.heads=2", "model.width=16", "model.context_length=64"]
pytestmark = pytest.mark.slow


def train(run_command: Any, text_folder: Path, folder: Path, *arguments: str) -> Path:
    finished = run_command(
        [
            *arguments,
            "data=text",
            f"data.source.path={text_folder}",
            f"data.cache_directory={folder.parent / 'cache'}",
            "data.validation_fraction=0.3",
            *SHAPE,
            *("budget=updates", "budget.updates=2", "schedule.warmup_updates=1"),
            "validation.tokens=2000",
            *("batch.samples_per_update=4", "batch.micro_samples=2"),
            f"run_directory={folder}",
        ]
    )
    assert finished.code == 0, finished.stderr
    return folder


@pytest.fixture(scope="module")
def slay_run(tmp_path_factory: Any, run_command: Any, text_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "slay one"
    options = ["attention=slay_best", "attention.local_size=8", "model.short_convolution=3"]
    return train(run_command, text_folder, folder, "train.py", "tokenizer=gpt2", *options)


@pytest.fixture(scope="module")
def zero3_run(tmp_path_factory: Any, run_command: Any, text_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "softmax"
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    launcher = ["deepspeed", "--num_accelerators", "2", "--master_port", port, "--no_local_rank"]
    options = ["tokenizer=bpe", "tokenizer.vocabulary_size=300", "attention=softmax"]
    engine = ["engine=zero3", "engine.precision=fp32"]
    return train(run_command, text_folder, folder, *launcher, "train.py", *options, *engine)


def export(run_command: Any, cwd: Path, *arguments: str) -> Any:
    finished = run_command([SCRIPT, *arguments], cwd=cwd)
    assert finished.code == 0, finished.stderr
    return finished


def check_same(run: Path, model: Any, tokenizer: Any) -> None:
    """Check logits and ids against those of the run's checkpoint."""
    loaded = load_model(run)
    text = "The river carried two letters before the winter. " * 3
    ids = loaded.tokenizer.encode(text)[:64]
    assert tokenizer(text)["input_ids"][:64] == ids
    with torch.no_grad():
        expected = loaded.model.logits(loaded.model(torch.tensor([ids]))[0])
        logits = model(torch.tensor([ids])).logits
    assert logits.shape == expected.shape
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-6)


def test_exported_run_is_its_checkpoint(run_command: Any, slay_run: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    with (slay_run / "metrics.jsonl").open("a") as metrics:
        # killed while it wrote, later on
        metrics.write('{"kind": "vali')
    finished = export(run_command, tmp_path, f"checkpoint='{slay_run}'")
    folder = tmp_path / "exports" / "slay one"
    assert str(Path("exports/slay one/model.safetensors")) in finished.stdout
    model = SlayformerForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    check_same(slay_run, model, tokenizer)
    assert model.config.short_convolution == 3
    assert tokenizer.model_max_length == 64
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 50256
    assert {f.stat().st_mode & 0o077 for f in folder.iterdir()} == {
        (folder.parent.stat().st_mode & 0o066)
    }

    card = (folder / "README.md").read_text()
    summary = json.loads((slay_run / "summary.json").read_text())
    parameters = sum(p.numel() for p in model.parameters())
    for part in (
        f"{parameters:,} parameters",
        "is `slay_best`",
        "2 layers × 16, 2 heads of 8, context of 64 tokens",
        f"{summary['tokens']:,} tokens in 2 updates",
        f"{summary['validation_loss']:.4f} nats/token",
        "gpt2, 50,257 tokens",
    ):
        assert part in card
    # a local path stays private there, and the configuration trains the same model again
    assert str(slay_run.parent) not in card
    replay = ["--config-dir=exports/slay one", "--config-name=training", "--cfg", "job"]
    composed = run_command(["train.py", *replay], cwd=tmp_path)
    assert composed.code == 0, composed.stderr
    assert "local_size: 8" in composed.stdout
    assert "short_convolution: 3" in composed.stdout
    assert sorted(p.name for p in tmp_path.iterdir()) == ["exports"]
    # the command the card gives for it is the one that was run here
    assert "python train.py --config-dir='slay one' --config-name=training" in card


def test_stage_and_processes_do_not_matter(
    run_command: Any, zero3_run: Path, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer, GPT2LMHeadModel

    checkpoint = zero3_run / "checkpoints" / "update_0000002"
    export(run_command, tmp_path, f"checkpoint={checkpoint}")
    export(run_command, tmp_path, f"checkpoint={zero3_run}", "format=gpt2", "directory=g")
    ours = SlayformerForCausalLM.from_pretrained(tmp_path / "exports" / "softmax")
    theirs = GPT2LMHeadModel.from_pretrained(tmp_path / "g")
    for model, folder in ((ours, "exports/softmax"), (theirs, "g")):
        check_same(zero3_run, model, AutoTokenizer.from_pretrained(tmp_path / folder))
    assert "ZeRO stage 3, 2 processes" in (tmp_path / "g" / "README.md").read_text()


def test_mistakes_are_told(slay_run: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    run = str(slay_run)
    mistakes: list[tuple[dict[str, Any], str]] = [
        ({"checkpoint": None}, "checkpoint=null: give a run directory"),
        ({"checkpoint": "nowhere"}, "no checkpoint at nowhere"),
        ({"checkpoint": run, "directory": "full"}, "directory=full: is there already"),
        ({"checkpoint": run, "directory": "."}, "directory=.: name a new folder"),
        ({"checkpoint": run, "directory": "full/notes.txt/x"}, "notes.txt/x: cannot be written"),
        ({"checkpoint": run, "format": "gpt2"}, "attention=slay_best: GPT-2 has attention=softmax"),
    ]
    for options, message in mistakes:
        with pytest.raises(UserError, match=re.escape(message)):
            export_hf(ExportConfig(**options))
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["full", "notes.txt"]


def test_a_mistake_takes_one_line(run_command: Any, slay_run: Path, tmp_path: Path) -> None:
    finished = run_command([SCRIPT, f"checkpoint='{slay_run}'", "format=onnx"], cwd=tmp_path)
    assert (finished.code, finished.stdout) == (2, "")
    assert finished.stderr == "error: format=onnx: choose from gpt2, slayformer\n"


@torch.no_grad()
def test_lm_eval_scores_as_we_do(
    run_command: Any, slay_run: Path, text_folder: Path, tmp_path: Path
) -> None:
    pytest.importorskip("lm_eval", reason="pip install lm_eval")
    export(run_command, tmp_path, f"checkpoint='{slay_run}'", "directory=exports/NAME")
    documents = [path.read_text() for path in sorted(text_folder.iterdir())[:2]]
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    lines = "".join(json.dumps({"text": text}) + "\n" for text in documents)
    (tasks / "my_text.jsonl").write_text(lines)
    page = DOCUMENT.read_text(encoding="utf-8")
    (task,) = re.findall(r"```yaml tasks/my_text.yaml\n(.*?)```", page, re.DOTALL)
    (tasks / "my_text.yaml").write_text(task)
    (command,) = re.findall(
        r"^lm_eval (.* --tasks my_text .*)$", page.replace("\\\n", ""), re.MULTILINE
    )
    finished = run_command(
        ["-m", "lm_eval", *command.split(), "--output_path", "scores"],
        cwd=tmp_path,
        env={"HF_HOME": str(tmp_path / "home")},
    )
    assert finished.code == 0, finished.stderr
    (file,) = tmp_path.rglob("results_*.json")
    scored = json.loads(file.read_text())["results"]["my_text"]

    loaded = load_model(slay_run)
    nats = 0.0
    for text in documents:
        ids = [loaded.tokenizer.end_of_text, *loaded.tokenizer.encode(text)]
        for start in range(0, len(ids) - 1, 64):
            window = torch.tensor([ids[start : start + 65]])
            logits = loaded.model.logits(loaded.model(window[:, :-1])[0])[0]
            targets = window[0, 1:]
            nats += torch.nn.functional.cross_entropy(logits, targets, reduction="sum").item()
    size = sum(len(text.encode()) for text in documents)
    expected = nats / size / torch.log(torch.tensor(2.0)).item()
    assert scored["bits_per_byte,none"] == pytest.approx(expected, abs=1e-4)
