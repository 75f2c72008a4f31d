"""Tokenizers: GPT-2's vocabulary, plain bytes, and byte-level BPE trained on the corpus.

Text comes back byte for byte. Special-token text inside a document is ordinary text: only the
preparation puts an end-of-text id. A lone surrogate, which is no text at all, becomes U+FFFD.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from slayformer.config import TokenizerConfig
from slayformer.cores import usable_cores
from slayformer.errors import DataError, nearest

END_OF_TEXT = "<|endoftext|>"
DESCRIPTION_FILE = "tokenizer.json"

GPT2_RANKS = "assets/r50k_base.tiktoken.gz"
GPT2_RANKS_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
GPT2_END_OF_TEXT = 50256
# well below the million at which tiktoken gives up: it remembers every place where it could end
LONG_WHITE_SPACE = 100_000
# as Unicode defines it, which Python's \s does not
WHITE_SPACE = r"[\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]"


class Tokenizer(ABC):
    """Text to token ids and back.

    `vocabulary_size` counts every id, `end_of_text` included. `identity` is the sha256 (hex) of
    everything that defines the tokenizer: equal identity, equal ids.
    """

    name: ClassVar[str]
    # null: the configuration chooses
    fixed_vocabulary_size: ClassVar[int | None] = None

    def __init__(self, token_bytes: list[bytes], end_of_text: int, definition: bytes) -> None:
        """Keep the bytes of every id, in the order of the ids, and the `definition` to hash."""
        self.vocabulary_size = len(token_bytes)
        self.end_of_text = end_of_text
        self.identity = hashlib.sha256(self.name.encode() + b"\0" + definition).hexdigest()
        self._token_bytes = token_bytes

    @classmethod
    @abstractmethod
    def build(cls, vocabulary_size: int, texts: Callable[[], Iterable[str]]) -> Tokenizer:
        """Return a new tokenizer; one that learns its vocabulary reads the training `texts()`."""

    @classmethod
    @abstractmethod
    def load(cls, directory: Path) -> Tokenizer:
        """Return the tokenizer that `save` wrote into `directory`, not yet checked."""

    @abstractmethod
    def _encode(self, text: str) -> np.ndarray:
        """Return the ids (unsigned integers) of `text`, which is not empty and valid Unicode."""

    def encode_array(self, text: str) -> np.ndarray:
        """Return the ids of `text` as an array of unsigned integers."""
        return self._encode(_valid_unicode(text)) if text else np.empty(0, np.uint32)

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, never `end_of_text`."""
        return self.encode_array(text).tolist()

    def encode_batch(self, texts: Sequence[str], workers: int | None = None) -> list[np.ndarray]:
        """Return the ids of each text, encoded by `workers` threads (None: one a usable core)."""
        with ThreadPoolExecutor(workers or usable_cores()) as pool:
            return list(pool.map(self.encode_array, texts))

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of `ids`; bytes that are not UTF-8 become U+FFFD.

        Raises ValueError for an id outside the vocabulary.
        """
        for token in ids:
            if not 0 <= token < self.vocabulary_size:
                raise ValueError(f"id {token} is outside the vocabulary of {self.vocabulary_size}")
        return b"".join(self._token_bytes[i] for i in ids).decode("utf-8", errors="replace")

    def token_byte_lengths(self) -> np.ndarray:
        """Return int64 [vocabulary_size]: UTF-8 bytes each id stands for, 0 for end-of-text."""
        lengths = np.array([len(token) for token in self._token_bytes], dtype=np.int64)
        lengths[self.end_of_text] = 0
        return lengths

    def written(self) -> dict[str, int]:
        """Return the id of every token by how a byte-level BPE file writes it."""
        characters = byte_characters()
        tokens = (
            END_OF_TEXT if id == self.end_of_text else "".join(characters[byte] for byte in token)
            for id, token in enumerate(self._token_bytes)
        )
        return {token: id for id, token in enumerate(tokens)}

    def describe(self) -> dict[str, Any]:
        """Return name, identity and vocabulary size, as shards and manifests record them."""
        return {
            "name": self.name,
            "identity": self.identity,
            "vocabulary_size": self.vocabulary_size,
        }

    def save(self, directory: Path) -> None:
        """Write into `directory`, made if need be, what `load_tokenizer` reads."""
        directory.mkdir(parents=True, exist_ok=True)
        # last, so a half-written folder does not load
        text = json.dumps(self.describe(), indent=2) + "\n"
        (directory / DESCRIPTION_FILE).write_text(text, encoding="utf-8")


class GPT2Tokenizer(Tokenizer):
    """GPT-2's byte-level BPE: tiktoken with the ranks that ship with this package."""

    name = "gpt2"
    fixed_vocabulary_size = 50257

    def __init__(self) -> None:
        import tiktoken
        from tiktoken_ext.openai_public import r50k_pat_str  # type: ignore[import-untyped]

        ranks = gpt2_ranks()
        self._encoding = tiktoken.Encoding(
            self.name,
            pat_str=r50k_pat_str,
            mergeable_ranks=ranks,
            special_tokens={END_OF_TEXT: GPT2_END_OF_TEXT},
            explicit_n_vocab=self.fixed_vocabulary_size,
        )
        token_bytes = [*sorted(ranks, key=ranks.__getitem__), END_OF_TEXT.encode()]
        super().__init__(token_bytes, GPT2_END_OF_TEXT, GPT2_RANKS_SHA256.encode())

    @classmethod
    def build(cls, vocabulary_size: int, texts: Callable[[], Iterable[str]]) -> GPT2Tokenizer:
        return cls()

    @classmethod
    def load(cls, directory: Path) -> GPT2Tokenizer:
        return cls()

    def _encode(self, text: str) -> np.ndarray:
        if len(text) <= LONG_WHITE_SPACE:
            return self._encoding.encode_to_numpy(text, disallowed_special=())
        # the last white space before a word begins a token: cut there, the ids are the same
        long = re.finditer(rf"{WHITE_SPACE}{{{LONG_WHITE_SPACE},}}", text)
        cuts = [run.end() - 1 for run in long if run.end() < len(text)]
        pieces = (text[start:end] for start, end in pairwise([0, *cuts, len(text)]))
        ids = [self._encoding.encode_to_numpy(piece, disallowed_special=()) for piece in pieces]
        return np.concatenate(ids)


class BytesTokenizer(Tokenizer):
    """Ids 0 to 255 are the UTF-8 bytes, 256 is end-of-text."""

    name = "bytes"
    fixed_vocabulary_size = 257

    def __init__(self) -> None:
        super().__init__([*(bytes([i]) for i in range(256)), END_OF_TEXT.encode()], 256, b"")

    @classmethod
    def build(cls, vocabulary_size: int, texts: Callable[[], Iterable[str]]) -> BytesTokenizer:
        return cls()

    @classmethod
    def load(cls, directory: Path) -> BytesTokenizer:
        return cls()

    def _encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), dtype=np.uint8)


class BPETokenizer(Tokenizer):
    """Byte-level BPE trained on the corpus; the last id is end-of-text.

    End-of-text is unknown to the BPE itself, which would find it in the text of a document.
    """

    name = "bpe"
    definition_file: ClassVar[str] = "bpe.json"

    def __init__(self, definition: bytes) -> None:
        """Load `definition`: the file format of the `tokenizers` library, without end-of-text."""
        import tokenizers

        self.definition = definition
        self._bpe = tokenizers.Tokenizer.from_str(definition.decode())
        byte_of = {character: byte for byte, character in byte_characters().items()}
        token_bytes = []
        for token in range(self._bpe.get_vocab_size()):
            characters = self._bpe.id_to_token(token) or ""
            token_bytes.append(bytes(byte_of[character] for character in characters))
        super().__init__([*token_bytes, END_OF_TEXT.encode()], len(token_bytes), definition)

    @classmethod
    def build(cls, vocabulary_size: int, texts: Callable[[], Iterable[str]]) -> BPETokenizer:
        import tokenizers
        from tokenizers import models, pre_tokenizers, trainers

        bpe = tokenizers.Tokenizer(models.BPE())
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        trainer = trainers.BpeTrainer(
            vocab_size=vocabulary_size - 1,
            initial_alphabet=sorted(byte_characters().values()),
            show_progress=False,
        )
        bpe.train_from_iterator(map(_valid_unicode, texts()), trainer)
        tokenizer = cls(bpe.to_str().encode())
        if tokenizer.vocabulary_size < vocabulary_size:
            raise DataError(
                f"tokenizer.vocabulary_size={vocabulary_size}: the training documents give only "
                f"{tokenizer.vocabulary_size} tokens; use at most that many, or more text"
            )
        return tokenizer

    @classmethod
    def load(cls, directory: Path) -> BPETokenizer:
        return cls((directory / cls.definition_file).read_bytes())

    def _encode(self, text: str) -> np.ndarray:
        # the batch form lets other threads run meanwhile
        (encoding,) = self._bpe.encode_batch_fast([text], add_special_tokens=False)
        return np.array(encoding.ids, dtype=np.uint32)

    def save(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / self.definition_file).write_bytes(self.definition)
        super().save(directory)


TOKENIZERS: dict[str, type[Tokenizer]] = {
    tokenizer.name: tokenizer for tokenizer in (GPT2Tokenizer, BytesTokenizer, BPETokenizer)
}


def vocabulary_size(config: TokenizerConfig) -> int:
    """Return how many ids the tokenizer of `config` has, without making it."""
    size = TOKENIZERS[config.name].fixed_vocabulary_size or config.vocabulary_size
    assert size is not None
    return size


def build_tokenizer(config: TokenizerConfig, texts: Callable[[], Iterable[str]]) -> Tokenizer:
    """Return the tokenizer of `config`, trained on `texts()` if it is of the kind that is.

    Raises DataError if the texts are too few for the vocabulary.
    """
    return TOKENIZERS[config.name].build(vocabulary_size(config), texts)


def load_tokenizer(directory: Path) -> Tokenizer:
    """Return the tokenizer saved in `directory`; nothing in it is executed.

    Raises DataError if it is missing, damaged or made by something else.
    """
    path = directory / DESCRIPTION_FILE
    try:
        description = json.loads(path.read_bytes())
        name, identity = description["name"], description["identity"]
    except FileNotFoundError:
        raise DataError(f"{directory} holds no tokenizer: {path.name} is missing") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is not a tokenizer description: {error!r}") from error
    if name not in TOKENIZERS:
        raise DataError(f"{path} names the tokenizer {name}: {nearest(str(name), TOKENIZERS)}")
    try:
        tokenizer = TOKENIZERS[name].load(directory)
    # the tokenizers library raises bare Exception for a file it cannot read
    except Exception as error:
        raise DataError(f"the {name} tokenizer in {directory} is damaged: {error!r}") from error
    if tokenizer.identity != identity:
        raise DataError(f"the {name} tokenizer in {directory} is not the one {path.name} describes")
    return tokenizer


def gpt2_ranks() -> dict[bytes, int]:
    """Return GPT-2's 50,256 byte sequences with their ids, from the file in this package.

    Raises DataError if the file is damaged.
    """
    asset = resources.files(__package__).joinpath(GPT2_RANKS)
    try:
        content = gzip.decompress(asset.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{asset} cannot be read ({error}); install slayformer again") from error
    if hashlib.sha256(content).hexdigest() != GPT2_RANKS_SHA256:
        raise DataError(f"{asset} is damaged; install slayformer again")
    lines = (line.split() for line in content.splitlines())
    return {base64.b64decode(token): int(rank) for token, rank in lines}


def byte_characters() -> dict[int, str]:
    """Return the printable character that stands for each byte in a byte-level BPE file.

    Bytes that print in Latin-1 stand for themselves; the others take U+0100 and up, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable}
    return characters | {byte: chr(0x100 + i) for i, byte in enumerate(others)}


def _valid_unicode(text: str) -> str:
    """Return `text` with surrogate pairs joined and lone surrogates replaced by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
