"""Fast tokenizers against ours: the same ids, the same text, after saving and loading too."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from slayformer.config import TokenizerConfig
from slayformer.data.tokenizer import BytesTokenizer, GPT2Tokenizer, Tokenizer, build_tokenizer
from slayformer.huggingface import fast_tokenizer

TEXTS = [
    "Hello world",
    "",
    " ",
    "\r\n\ttabs\tand\r\nlines\n\n\n",
    "\ufeffa mark, a \0 and a \x7f",
    "naïve façade — Ελληνικά, 漢字, 😀👩‍👧, e\u0301",
    "<|endoftext|> is <|endoftext|>",
    "".join(map(chr, range(0x250))),
    "7" * 100 + " " * 100 + "x" * 100,
]


@pytest.fixture(
    scope="module",
    params=[pytest.param("gpt2", marks=pytest.mark.slow), "bytes", "bpe"],
)
def pair(request: Any, text_folder: Path, tmp_path_factory: Any) -> tuple[Tokenizer, Any, Path]:
    """Return our tokenizer, the fast one loaded by AutoTokenizer, and the folder it is in."""
    texts = [path.read_text() for path in sorted(text_folder.iterdir())]
    made: dict[str, Any] = {
        "gpt2": GPT2Tokenizer,
        "bytes": BytesTokenizer,
        "bpe": lambda: build_tokenizer(TokenizerConfig("bpe", 320), lambda: texts),
    }
    tokenizer = made[request.param]()
    folder = tmp_path_factory.mktemp(request.param)
    fast_tokenizer(tokenizer, context_length=2048).save_pretrained(folder)
    return tokenizer, AutoTokenizer.from_pretrained(folder), folder


def test_ids_and_texts_are_ours(pair: Any, text_folder: Path) -> None:
    ours, fast, _ = pair
    draw = random.Random(0)
    ranges = [range(32, 127), range(0x3000), range(0x1F300, 0x1F600), (9, 10, 13, 32)]
    mixed = ["".join(chr(draw.choice(draw.choice(ranges))) for _ in range(40)) for _ in range(500)]
    documents = [path.read_text() for path in text_folder.iterdir()]
    for text in [*TEXTS, *mixed, *documents]:
        ids = ours.encode(text)
        assert fast(text)["input_ids"] == ids
        assert fast.decode(ids) == text
    # also of ids that are no text
    noise = [draw.randrange(ours.vocabulary_size - 1) for _ in range(300)]
    assert fast.decode(noise) == ours.decode(noise)


def test_one_id_begins_ends_and_pads_on_the_left(pair: Any) -> None:
    ours, fast, _ = pair
    end = ours.end_of_text
    assert [fast.bos_token_id, fast.eos_token_id, fast.pad_token_id] == [end] * 3
    assert len(fast) == ours.vocabulary_size
    assert fast.model_max_length == 2048
    batch = fast(["a", "a man, a plan"], padding=True)
    short, long = ours.encode("a"), ours.encode("a man, a plan")
    fill = len(long) - len(short)
    assert batch["input_ids"] == [[end] * fill + short, long]
    assert batch["attention_mask"] == [[0] * fill + [1] * len(short), [1] * len(long)]
    assert set(batch) == {"input_ids", "attention_mask"}
    assert fast.decode([*short, end], skip_special_tokens=True) == "a"


def test_gpt2_is_what_openai_published(pair: Any) -> None:
    ours, _, folder = pair
    if ours.name != "gpt2":
        return
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    in_order = sorted(model["vocab"], key=model["vocab"].__getitem__)
    vocabulary = {token: number for number, token in enumerate([*in_order, "<|endoftext|>"])}
    lines = "".join(f"{left} {right}\n" for left, right in model["merges"])
    # of encoder.json and vocab.bpe
    assert hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest() == (
        "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"
    )
    assert hashlib.sha256(f"#version: 0.2\n{lines}".encode()).hexdigest() == (
        "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
    )
