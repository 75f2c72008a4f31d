"""eval.py against other people's scorers, exported folders, and contexts beyond the trained one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from slayformer.config import ModelConfig, TokenizerConfig
from slayformer.config_commands import EvalConfig
from slayformer.data.shards import TokenStream
from slayformer.data.tokenizer import build_tokenizer
from slayformer.errors import UserError
from slayformer.evaluation.loss import score
from slayformer.evaluation.perplexity import run
from slayformer.evaluation.scored_model import extend_context, load_scored_model
from slayformer.evaluation.windows import Text, TextWindows
from slayformer.model.gpt2 import GPT2
from slayformer.presets import load_preset
from slayformer.training.objective import LanguageModelObjective

# a real text that everyone has
LICENSE = Path(__file__).parents[2] / "LICENSE"


def evaluate(**options: Any) -> dict[str, Any]:
    (result,) = run(EvalConfig(**options))
    return result


@pytest.fixture(scope="module")
def gpt2_folder(tmp_path_factory: Any) -> Path:
    """Return a folder with transformers' own GPT-2, its weights large enough to matter."""
    from transformers import GPT2Config, GPT2LMHeadModel

    from slayformer.huggingface import fast_tokenizer

    folder = tmp_path_factory.mktemp("gpt2")
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 48, "vocab_size": 50257}
    model = GPT2LMHeadModel(GPT2Config(**sizes))
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    tokenizer = build_tokenizer(TokenizerConfig("gpt2"), list)
    fast_tokenizer(tokenizer, context_length=48).save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("stride", [None, 20])
def test_transformers_gpt2_in_a_plain_loop(gpt2_folder: Path, stride: int | None) -> None:
    from transformers import GPT2LMHeadModel

    text = LICENSE.read_text(encoding="utf-8")
    tokenizer = build_tokenizer(TokenizerConfig("gpt2"), list)
    ids = [*tokenizer.encode(text), tokenizer.end_of_text]
    model = GPT2LMHeadModel.from_pretrained(gpt2_folder).eval()
    nats: list[float] = []
    with torch.no_grad():
        while len(nats) < len(ids) - 1:
            start = len(nats) if stride is None else max(0, len(nats) + stride - 48)
            start = start if stride is None else min(start, len(ids) - 1 - 48)
            window = torch.tensor([ids[start : start + 49]])
            logits = model(window[:, :-1]).logits[0]
            found = F.cross_entropy(logits, window[0, 1:], reduction="none").tolist()
            nats += found[len(nats) - start :]
    result = evaluate(checkpoint=str(gpt2_folder), data=str(LICENSE), stride=stride)
    assert result["mechanism"] == "softmax"
    assert result["scored_tokens"] == len(ids) - 1
    assert result["loss"] == pytest.approx(math.fsum(nats) / len(nats), abs=1e-5)
    assert result["bytes"] == len(text.encode()) - len(tokenizer.decode(ids[:1]))


@pytest.mark.slow
def test_an_exported_folder_is_its_checkpoint(tiny_run: Path, tmp_path: Path) -> None:
    from slayformer.huggingface.export import ExportConfig
    from slayformer.huggingface.export import run as export_hf

    folder = export_hf(ExportConfig(checkpoint=str(tiny_run), directory=str(tmp_path / "out")))
    text = tmp_path / "text.txt"
    # a special token's text in a document is text
    text.write_text("Ünïcode <|endoftext|> and so on. " * 30, encoding="utf-8")
    ours, exported = run(
        EvalConfig(checkpoint=[str(tiny_run), str(folder)], data=str(text), stride=10)
    )
    for key in (
        "mechanism",
        "scored_tokens",
        "bytes",
        "words",
        "documents",
        "context_length",
        "text_sha256",
    ):
        assert exported[key] == ours[key], key
    assert exported["loss"] == pytest.approx(ours["loss"], abs=1e-6)
    with pytest.raises(UserError, match=r"data=null: .*data=FILE_OR_FOLDER"):
        evaluate(checkpoint=str(folder))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UserError, match="type llama, not slayformer or gpt2"):
        evaluate(checkpoint=str(folder), data=str(text))


@pytest.mark.slow
def test_lm_evaluation_harness_agrees(gpt2_folder: Path) -> None:
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    from lm_eval.api.instance import Instance

    text = LICENSE.read_text(encoding="utf-8")[:6000]
    harness = huggingface.HFLM(pretrained=str(gpt2_folder), device="cpu", batch_size=4)
    request = Instance("loglikelihood_rolling", {}, (text,), 0)
    (log_likelihood,) = harness.loglikelihood_rolling([request], disable_tqdm=True)
    # it starts from an end-of-text and scores every token of the text
    scored = load_scored_model(gpt2_folder, torch.device("cpu"))
    end = scored.tokenizer.end_of_text
    ids = np.array([end, *scored.tokenizer.encode(text)])
    windows = TextWindows(
        Text(TokenStream([ids]), len(ids), end, "the text"),
        context_length=48,
        stride=48,
        isolate_documents=False,
    )
    totals = score(
        LanguageModelObjective(scored.model, scored.precision),
        windows,
        windows=windows.windows,
        batch_samples=8,
        byte_lengths=scored.tokenizer.token_byte_lengths(),
    )
    assert totals.tokens == len(ids) - 1
    assert totals.bytes == len(text.encode())
    assert totals.loss == pytest.approx(-log_likelihood / totals.tokens, abs=1e-4)


def small_model(attention: str, context_length: int) -> GPT2:
    shape = ModelConfig(layers=1, heads=2, width=16, context_length=context_length)
    return GPT2(shape, load_preset(attention), vocabulary_size=50, seed=0).eval()


@pytest.mark.parametrize("positions", ["repeat", "interpolate"])
@pytest.mark.parametrize("attention", ["slay", "softmax"])
def test_a_longer_context_goes_on_with_the_trained_positions(
    attention: str, positions: str
) -> None:
    model = small_model(attention, 8)
    table = model.position_embedding.weight.detach().clone()
    ids = torch.randint(50, (2, 29), generator=torch.Generator().manual_seed(0))
    short, _ = model(ids[:, :8])
    extend_context(model, 8, None)
    assert model.position_embedding.weight.shape == (8, 16)
    extend_context(model, 29, positions)
    longer = model.position_embedding.weight
    if positions == "repeat":
        assert torch.equal(longer, table.repeat(4, 1)[:29])
        # nothing changes within the trained context
        torch.testing.assert_close(model(ids[:, :8])[0], short)
    else:
        assert torch.equal(longer[0], table[0])
        torch.testing.assert_close(longer[28], table[7])
        # 28 steps over 7: every fourth is a trained one, the others lie between
        torch.testing.assert_close(longer[::4], table)
        torch.testing.assert_close(longer[2], (table[0] + table[1]) / 2)
    whole, _ = model(ids)
    assert whole.isfinite().all()
    # token by token through the states, as decoding goes on beyond the trained context
    states = model.init_states(2)
    for start in range(0, 29, 5):
        part, states = model(ids[:, start : start + 5], states=states)
        torch.testing.assert_close(part, whole[:, start : start + 5], rtol=1e-3, atol=1e-4)


def test_what_cannot_be_longer_says_so() -> None:
    with pytest.raises(UserError, match="positions=repeat: has no effect up to the 8 tokens"):
        extend_context(small_model("slay", 8), 8, "repeat")
    with pytest.raises(UserError, match=r"context_length=9: .* 8 tokens .*positions=interpolate"):
        extend_context(small_model("slay", 8), 9, None)
    with pytest.raises(UserError, match="context_length=9: cosformer is defined for the 8 tokens"):
        extend_context(small_model("cosformer", 8), 9, "repeat")


@pytest.mark.slow
def test_scoring_beyond_the_trained_context(tiny_run: Path, tmp_path: Path) -> None:
    result = evaluate(
        checkpoint=str(tiny_run),
        context_length=128,
        positions="repeat",
        figure=str(tmp_path / "position.png"),
    )
    within = evaluate(checkpoint=str(tiny_run))
    assert (result["trained_context_length"], result["positions"]) == (32, "repeat")
    assert within["positions"] is None
    assert result["scored_tokens"] == within["scored_tokens"]
    assert result["loss_by_position"][-1]["last"] == 127
    assert math.isfinite(result["loss"])
