"""eval.py against the validation that training did, and against a plain loop over the text."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from slayformer.config_commands import EvalConfig, EvalSourceConfig
from slayformer.errors import UserError
from slayformer.evaluation.perplexity import run
from slayformer.training.checkpoint import find_checkpoint, load_model

END_OF_TEXT = 256


def evaluate(**options: Any) -> dict[str, Any]:
    (result,) = run(EvalConfig(**options))
    return result


@pytest.mark.slow
def test_repeats_the_validation_loss_of_training(tiny_run: Path, tmp_path: Path) -> None:
    summary = json.loads((tiny_run / "summary.json").read_text())
    lines = (tiny_run / "metrics.jsonl").read_text().splitlines()
    last = [line for line in map(json.loads, lines) if line["kind"] == "validation"][-1]
    written = tmp_path / "new" / "numbers.json"
    result = evaluate(checkpoint=str(tiny_run), batch_samples=3, json=str(written))
    assert result["token_perplexity"] == pytest.approx(summary["perplexity"], rel=1e-6)
    assert result["bits_per_byte"] == pytest.approx(summary["bits_per_byte"], rel=1e-6)
    assert result["loss"] == pytest.approx(summary["validation_loss"], abs=1e-6)
    assert result["loss"] == pytest.approx(last["loss"], abs=1e-6)
    assert result["scored_tokens"] == last["scored_tokens"]
    assert json.loads(written.read_text()) == result
    # other windows score the same tokens
    for other in ({"context_length": 7}, {"stride": 5}):
        assert evaluate(checkpoint=str(tiny_run), **other)["scored_tokens"] == last["scored_tokens"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("context_length", "tokens", "stride"), [(None, None, None), (7, 3001, None), (9, 2500, 4)]
)
def test_a_folder_of_text_against_a_plain_loop(
    tiny_run: Path,
    text_folder: Path,
    context_length: int | None,
    tokens: int | None,
    stride: int | None,
) -> None:
    ids: list[int] = []
    for path in sorted(text_folder.iterdir()):
        ids += [*path.read_bytes(), END_OF_TEXT]
    if tokens is not None:
        ids = ids[: tokens + 1]
    model = load_model(find_checkpoint(tiny_run)).model
    length = context_length or model.context_length
    nats: list[float] = []
    with torch.no_grad():
        while len(nats) < len(ids) - 1:
            # where the last scored target ends, or so that `stride` new ones fit behind a context
            start = len(nats) if stride is None else max(0, len(nats) + stride - length)
            start = start if stride is None else min(start, len(ids) - 1 - length)
            inputs, targets = ids[start : start + length], ids[start + 1 : start + length + 1]
            hidden, _ = model(torch.tensor([inputs[: len(targets)]]))
            logits = (hidden[0].double() @ model.token_embedding.weight.double().T)[:, :257]
            found = F.cross_entropy(logits, torch.tensor(targets), reduction="none").tolist()
            nats += found[len(nats) - start :]
    assert len(nats) == len(ids) - 1
    text_bytes = sum(i != END_OF_TEXT for i in ids[1:])

    result = evaluate(
        checkpoint=str(tiny_run),
        data=str(text_folder),
        context_length=context_length,
        tokens=tokens,
        stride=stride,
    )
    assert result["scored_tokens"] == len(ids) - 1
    assert result["bytes"] == text_bytes
    assert result["documents"] == ids[:-1].count(END_OF_TEXT) + 1
    assert result["loss"] == pytest.approx(sum(nats) / len(nats), abs=1e-6)
    for unit, count in (("token", len(nats)), ("byte", text_bytes)):
        wanted = math.exp(sum(nats) / count)
        assert result[f"{unit}_perplexity"] == pytest.approx(wanted, rel=1e-5)
    assert result["bits_per_byte"] == pytest.approx(sum(nats) / math.log(2) / text_bytes, rel=1e-6)
    if tokens is None:
        words = sum(len(path.read_text().split()) for path in text_folder.iterdir())
        assert result["words"] == words
        assert math.log(result["word_perplexity"]) == pytest.approx(sum(nats) / words, rel=1e-6)
        losses = [math.fsum(nats[i::length]) / len(nats[i::length]) for i in (0, 1)]
        told = [stretch["loss"] for stretch in result["loss_by_position"][:2]]
        assert told == pytest.approx(losses, abs=1e-5)
    # documents by hand, for the standard error
    sums = [(0.0, 0)]
    for token, loss in zip(ids[1:], nats, strict=True):
        sums[-1] = (sums[-1][0] + loss, sums[-1][1] + 1)
        if token == END_OF_TEXT:
            sums.append((0.0, 0))
    mean = sum(nats) / len(nats)
    rest = [total - mean * count for total, count in sums if count]
    wanted = math.sqrt(len(rest) / (len(rest) - 1) * sum(r * r for r in rest)) / len(nats)
    assert result["standard_error"] == pytest.approx(wanted, rel=1e-4)


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
    (tmp_path / "byte.txt").write_text("x")
    (tmp_path / "folder").mkdir()
    cases: list[tuple[dict[str, Any], str]] = [
        ({"checkpoint": None}, "checkpoint=null: .*eval.py checkpoint="),
        ({"checkpoint": str(tmp_path / "no")}, "no"),
        ({"checkpoint": []}, "checkpoint="),
        ({"checkpoint": [checkpoint, 3]}, "checkpoint="),
        (
            {"checkpoint": checkpoint, "context_length": 33},
            "context_length=33: .* 32 tokens .*positions=repeat",
        ),
        ({"checkpoint": checkpoint, "stride": 33}, "stride=33: must be at most .* 32 tokens"),
        (
            {"checkpoint": checkpoint, "figure": str(tmp_path / "x.pdf")},
            "figure=.*must end with .png",
        ),
        (
            {"checkpoint": checkpoint, "data": "wikitext"},
            "data=wikitext: .*no such file or folder; .*wikitext2",
        ),
        ({"checkpoint": checkpoint, "data": "fineweb"}, "tokens=null: .*tokens=1000000"),
        ({"checkpoint": checkpoint, "data": "huggingface"}, "needs source.path=FOLDER"),
        ({"checkpoint": checkpoint, "source": EvalSourceConfig(split="x")}, "data=null"),
        (
            {"checkpoint": checkpoint, "data": "text", "source": EvalSourceConfig(split="x")},
            "source.split=x: data=text is of kind text",
        ),
        ({"checkpoint": checkpoint, "data": str(tmp_path / "no")}, "no such file or folder"),
        ({"checkpoint": checkpoint, "data": str(tmp_path / "folder")}, "holds no"),
        ({"checkpoint": checkpoint, "data": str(tmp_path / "empty.txt")}, "data=.*empty.*no text"),
        ({"checkpoint": checkpoint, "data": str(tmp_path / "byte.txt")}, "data=.*byte.*one token"),
        (
            {"checkpoint": checkpoint, "json": str(tmp_path / "empty.txt" / "x.json")},
            r"json=.*cannot be written",
        ),
        (
            {"checkpoint": checkpoint, "json": str(tmp_path / "folder")},
            r"json=.*folder: cannot be written: Is a directory",
        ),
        # before the text is read, which there is none of
        (
            {"checkpoint": checkpoint, "stride": 33, "data": str(tmp_path / "folder")},
            "stride=33: must be at most",
        ),
        (
            {"checkpoint": checkpoint, "positions": "repeat"},
            "positions=repeat: has no effect up to the 32 tokens",
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
    written = tmp_path / "numbers.json"
    scored = run_command(
        ["eval.py", f"checkpoint={tiny_run}", f"data={text_folder}", "tokens=99", f"json={written}"]
    )
    assert scored.code == 0, scored.stderr
    assert "99 tokens" in scored.stdout
    assert json.loads(written.read_text())["data"] == str(text_folder)
    alone = (
        "import sys; from slayformer.config_commands import EvalConfig; "
        "from slayformer.evaluation.perplexity import run; "
        f"run(EvalConfig(checkpoint={str(tiny_run)!r})); "
        "assert 'deepspeed' not in sys.modules"
    )
    assert run_command(["-c", alone]).code == 0


@pytest.mark.slow
def test_several_checkpoints_one_table_and_a_picture(
    tiny_run: Path, text_folder: Path, tmp_path: Path, capsys: Any
) -> None:
    written, figure = tmp_path / "numbers.json", tmp_path / "new" / "position.png"
    paths = [str(tiny_run), str(find_checkpoint(tiny_run))]
    options: dict[str, Any] = {"data": str(text_folder), "tokens": 300, "json": str(written)}
    results = run(EvalConfig(checkpoint=paths, figure=str(figure), **options))
    assert json.loads(written.read_text()) == results
    assert [result["checkpoint"] for result in results] == [paths[1], paths[1]]
    assert results[0]["loss"] == results[1]["loss"]
    printed = capsys.readouterr().out
    assert printed.count(f"{results[0]['loss']:.4f}") == 2
    assert printed.count("slay") >= 2
    assert "16–31" in printed
    assert figure.read_bytes().startswith(b"\x89PNG")
    # one in a list is a list, and alone it is not
    run(EvalConfig(checkpoint=paths[:1], **options))
    (only,) = json.loads(written.read_text())
    assert only["loss"] == results[0]["loss"]


@pytest.mark.slow
def test_wikitext_from_local_parquet(tiny_run: Path, tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    lines = [
        "",
        " = One = \n",
        " some words \n",
        " = = P = = \n",
        " more \n",
        " = Two = \n",
        " end ",
    ]
    folder = tmp_path / "wikitext"
    folder.mkdir()
    for split, rows in (("train", ["not this"]), ("validation", lines), ("test", ["a b", "c d"])):
        table = pyarrow.table({"text": rows})
        pyarrow.parquet.write_table(table, folder / f"{split}-00000-of-00001.parquet")
    checkpoint = str(tiny_run)
    source = EvalSourceConfig(path=str(folder))
    result = evaluate(checkpoint=checkpoint, data="wikitext2", source=source)
    # two articles, each with its end-of-text; the first byte is not scored
    text = "".join(lines) + "\n"
    assert result["documents"] == 2
    assert result["bytes"] == len(text) - 1
    assert result["data"].startswith("wikitext2: ")
    assert "split validation" in result["data"]
    # a folder of Parquet alone: rows are documents, of the split that is named
    scored = evaluate(
        checkpoint=checkpoint, data=str(folder), source=EvalSourceConfig(split="test")
    )
    assert (scored["documents"], scored["bytes"], scored["words"]) == (2, 5, 3)
    with pytest.raises(UserError, match=r"data=.*split=nothing"):
        evaluate(checkpoint=checkpoint, data=str(folder), source=EvalSourceConfig(split="nothing"))
    # a data set of the hub has a README, which is none of its documents
    (folder / "README.md").write_text("about it")
    (folder / ".hidden").mkdir()
    (folder / ".hidden" / "notes.txt").write_text("hidden")
    again = evaluate(checkpoint=checkpoint, data=str(folder), source=EvalSourceConfig(split="test"))
    assert again["text_sha256"] == scored["text_sha256"]
    (folder / "notes.txt").write_text("whose?")
    with pytest.raises(
        UserError, match=r"holds texts \(.txt\) and .* \(.parquet\): say which, data="
    ):
        evaluate(checkpoint=checkpoint, data=str(folder))
    of_text = evaluate(
        checkpoint=checkpoint, data="text", source=EvalSourceConfig(path=str(folder))
    )
    assert of_text["documents"] == 2
    with pytest.raises(UserError, match=r"test-00000.*is a file of a data set: name its folder"):
        evaluate(checkpoint=checkpoint, data=str(folder / "test-00000-of-00001.parquet"))


@pytest.mark.slow
def test_ranks_share_the_windows(
    tiny_run: Path, text_folder: Path, tmp_path: Path, run_command: Any
) -> None:
    options = {"checkpoint": str(tiny_run), "data": str(text_folder), "tokens": 2700, "stride": 9}
    alone = evaluate(**options, batch_samples=5)
    for processes in (2, 3):
        written = tmp_path / f"{processes}.json"
        command = ["torchrun", "--standalone", f"--nproc-per-node={processes}", "eval.py"]
        arguments = [f"{key}={value}" for key, value in options.items()]
        finished = run_command([*command, *arguments, "batch_samples=5", f"json={written}"])
        assert finished.code == 0, finished.stderr
        assert finished.stdout.count("bits/byte") == 1
        result = json.loads(written.read_text())
        assert (result["scored_tokens"], result["documents"]) == (2700, 2)
        for key in ("loss", "word_perplexity", "bits_per_byte", "standard_error"):
            assert result[key] == pytest.approx(alone[key], rel=1e-9)
