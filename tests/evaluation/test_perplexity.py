"""eval.py against the validation that training did, and against a plain loop over the text."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from slayformer.config import EvalConfig
from slayformer.errors import UserError
from slayformer.evaluation.perplexity import WholeText, run
from slayformer.training.checkpoint import find_checkpoint, load_model
from slayformer.training.objective import IGNORE_INDEX

END_OF_TEXT = 256


@pytest.mark.parametrize("tokens", [2, 5, 6, 7, 11, 12, 16, 17])
def test_every_token_but_the_first_is_a_target_once(tokens: int) -> None:
    ids = np.arange(100, 100 + tokens, dtype=np.uint32)
    loader = WholeText(ids, context_length=5, end_of_text=END_OF_TEXT, isolate_documents=False)
    assert loader.windows == math.ceil((tokens - 1) / 5)
    # any order, any batch
    order = list(range(loader.windows))[::-1]
    batch = loader.batch(order)
    scored = batch.targets_BT != IGNORE_INDEX
    assert sorted(batch.targets_BT[scored].tolist()) == ids[1:].tolist()
    assert torch.equal(batch.targets_BT[scored], batch.ids_BT[scored] + 1)


def test_isolated_documents_stay_isolated() -> None:
    ids = np.array([1, 2, END_OF_TEXT, 3, 4, END_OF_TEXT], dtype=np.uint32)
    loader = WholeText(ids, context_length=8, end_of_text=END_OF_TEXT, isolate_documents=True)
    batch = loader.batch([0])
    assert batch.document_ids_BT is not None
    assert batch.position_ids_BT is not None
    assert batch.document_ids_BT[0, :5].tolist() == [0, 0, 0, 1, 1]
    assert batch.position_ids_BT[0, :5].tolist() == [0, 1, 2, 0, 1]


def evaluate(**options: Any) -> dict[str, Any]:
    return run(EvalConfig(**options))


@pytest.mark.slow
def test_repeats_the_validation_loss_of_training(tiny_run: Path, tmp_path: Path) -> None:
    summary = json.loads((tiny_run / "summary.json").read_text())
    lines = (tiny_run / "metrics.jsonl").read_text().splitlines()
    last = [line for line in map(json.loads, lines) if line["kind"] == "validation"][-1]
    written = tmp_path / "new" / "numbers.json"
    result = evaluate(checkpoint=str(tiny_run), batch_samples=3, json=str(written))
    for key in ("perplexity", "bits_per_byte"):
        assert result[key] == pytest.approx(summary[key], rel=1e-6)
    assert result["loss"] == pytest.approx(summary["validation_loss"], abs=1e-6)
    assert result["loss"] == pytest.approx(last["loss"], abs=1e-6)
    assert result["scored_tokens"] == last["scored_tokens"]
    assert json.loads(written.read_text()) == result


@pytest.mark.slow
@pytest.mark.parametrize(("context_length", "tokens"), [(None, None), (7, 1001)])
def test_a_folder_of_text_against_a_plain_loop(
    tiny_run: Path, text_folder: Path, context_length: int | None, tokens: int | None
) -> None:
    ids: list[int] = []
    for path in sorted(text_folder.iterdir()):
        ids += [*path.read_bytes(), END_OF_TEXT]
    if tokens is not None:
        ids = ids[: tokens + 1]
    model = load_model(find_checkpoint(tiny_run)).model
    length = context_length or model.context_length
    nats = []
    with torch.no_grad():
        for start in range(0, len(ids) - 1, length):
            inputs, targets = ids[start : start + length], ids[start + 1 : start + length + 1]
            hidden, _ = model(torch.tensor([inputs[: len(targets)]]))
            logits = (hidden[0].double() @ model.token_embedding.weight.double().T)[:, :257]
            nats += F.cross_entropy(logits, torch.tensor(targets), reduction="none").tolist()
    assert len(nats) == len(ids) - 1
    text_bytes = sum(i != END_OF_TEXT for i in ids[1:])

    result = evaluate(
        checkpoint=str(tiny_run),
        data=str(text_folder),
        context_length=context_length,
        tokens=tokens,
    )
    assert result["scored_tokens"] == len(ids) - 1
    assert result["bytes"] == text_bytes
    assert result["documents"] == ids[:-1].count(END_OF_TEXT) + 1
    assert result["loss"] == pytest.approx(sum(nats) / len(nats), abs=1e-6)
    assert result["perplexity"] == pytest.approx(math.exp(sum(nats) / len(nats)), rel=1e-6)
    assert result["bits_per_byte"] == pytest.approx(sum(nats) / math.log(2) / text_bytes, rel=1e-6)


@pytest.mark.slow
def test_a_single_file_is_one_document(tiny_run: Path, tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    path.write_text("Ünïcode", encoding="utf-8")
    result = evaluate(checkpoint=str(tiny_run), data=str(path))
    # nine bytes: the first is not scored, the end-of-text is
    assert (result["scored_tokens"], result["bytes"], result["documents"]) == (9, 8, 1)


@pytest.mark.slow
def test_what_cannot_be_scored_is_told(tiny_run: Path, tmp_path: Path) -> None:
    checkpoint = str(tiny_run)
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "folder").mkdir()
    cases: list[tuple[dict[str, Any], str]] = [
        ({"checkpoint": None}, "checkpoint=null: .*eval.py checkpoint="),
        ({"checkpoint": str(tmp_path / "no")}, "no"),
        ({"checkpoint": checkpoint, "context_length": 33}, "context_length=33: .* 32 tokens"),
        ({"checkpoint": checkpoint, "data": str(tmp_path / "no")}, "no such file or folder"),
        ({"checkpoint": checkpoint, "data": str(tmp_path / "folder")}, "holds no"),
        ({"checkpoint": checkpoint, "data": str(tmp_path / "empty.txt")}, "no text"),
        (
            {"checkpoint": checkpoint, "json": str(tmp_path / "empty.txt" / "x.json")},
            r"json=.*cannot be written",
        ),
    ]
    for options, message in cases:
        with pytest.raises(UserError, match=message):
            evaluate(**options)


@pytest.mark.slow
def test_the_command_line(
    tiny_run: Path, text_folder: Path, tmp_path: Path, run_command: Any
) -> None:
    nothing = run_command(["eval.py"])
    assert nothing.code == 2
    assert nothing.stderr.count("\n") == 1
    assert "checkpoint=" in nothing.stderr
    launched = run_command(
        ["eval.py", f"checkpoint={tiny_run}"], env={"WORLD_SIZE": "2", "RANK": "0"}
    )
    assert launched.code == 2
    assert "without a launcher" in launched.stderr
    written = tmp_path / "numbers.json"
    scored = run_command(
        ["eval.py", f"checkpoint={tiny_run}", f"data={text_folder}", "tokens=99", f"json={written}"]
    )
    assert scored.code == 0, scored.stderr
    assert "99 tokens" in scored.stdout
    assert json.loads(written.read_text())["data"] == str(text_folder)
    alone = (
        "import sys; from slayformer.config import EvalConfig; "
        "from slayformer.evaluation.perplexity import run; "
        f"run(EvalConfig(checkpoint={str(tiny_run)!r})); "
        "assert 'deepspeed' not in sys.modules"
    )
    assert run_command(["-c", alone]).code == 0
