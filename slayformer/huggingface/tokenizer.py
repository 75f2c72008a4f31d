"""Our tokenizers as transformers' fast tokenizers, and back: the same ids for the same text."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from slayformer.data.tokenizer import (
    END_OF_TEXT,
    BPETokenizer,
    BytesTokenizer,
    GPT2Tokenizer,
    Tokenizer,
    byte_characters,
    gpt2_ranks,
)
from slayformer.errors import DataError


def fast_tokenizer(tokenizer: Tokenizer, *, context_length: int) -> PreTrainedTokenizerFast:
    """Return a fast tokenizer that gives every text the ids that `tokenizer` gives it.

    The text of a special token is ordinary text (`split_special_tokens`). End-of-text stands for
    the beginning, the end and, on the left, the padding of a text.
    """
    backend = _BACKENDS[type(tokenizer)](tokenizer)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([END_OF_TEXT])
    assert backend.token_to_id(END_OF_TEXT) == tokenizer.end_of_text
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        padding_side="left",
        model_max_length=context_length,
        model_input_names=["input_ids", "attention_mask"],
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
    )


def _gpt2(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    ranks, written = gpt2_ranks(), byte_characters()

    def spell(token: bytes) -> str:
        return "".join(written[byte] for byte in token)

    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        # the two parts that are left when all earlier merges have been applied to its bytes
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            made = [ranks.get(left + right, len(ranks)) for left, right in pairwise(parts)]
            first = made.index(min(made))
            parts[first : first + 2] = [parts[first] + parts[first + 1]]
        if len(parts) == 2:
            merges.append((spell(parts[0]), spell(parts[1])))
    vocabulary = {spell(token): rank for token, rank in ranks.items()}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return backend


def _bytes(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    vocabulary = {character: byte for byte, character in byte_characters().items()}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return backend


def _bpe(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    assert isinstance(tokenizer, BPETokenizer)
    return tokenizers.Tokenizer.from_str(tokenizer.definition.decode())


_BACKENDS = {GPT2Tokenizer: _gpt2, BytesTokenizer: _bytes, BPETokenizer: _bpe}


class ExportedTokenizer(Tokenizer):
    """A byte-level fast tokenizer from a folder of transformers, such as `fast_tokenizer` makes."""

    name = "exported"

    def __init__(self, fast: PreTrainedTokenizerFast) -> None:
        byte_of = {character: byte for byte, character in byte_characters().items()}
        token_bytes = []
        for token in range(len(fast)):
            written = fast.convert_ids_to_tokens(token)
            # what is no byte's character is in special tokens only
            token_bytes.append(bytes(byte_of[c] for c in written if c in byte_of))
        self._fast = fast
        definition = fast.backend_tokenizer.to_str().encode()
        super().__init__(token_bytes, fast.eos_token_id, definition)

    @classmethod
    def build(cls, vocabulary_size: int, texts: object) -> ExportedTokenizer:
        raise NotImplementedError("an exported tokenizer is loaded, not made")

    @classmethod
    def load(cls, directory: Path) -> ExportedTokenizer:
        """Return the tokenizer in `directory`; DataError if there is none of bytes."""
        try:
            fast = PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
        except (OSError, ValueError) as error:
            raise DataError(f"{directory} holds no tokenizer: {error}") from error
        if not isinstance(fast.backend_tokenizer.decoder, decoders.ByteLevel):
            raise DataError(f"the tokenizer in {directory} is not one of bytes, as GPT-2's is")
        if fast.eos_token_id is None:
            raise DataError(f"the tokenizer in {directory} has no end-of-text")
        # whole documents are encoded, and the text of a special token is ordinary text
        fast.model_max_length = 1 << 62
        fast.split_special_tokens = True
        return cls(fast)

    def _encode(self, text: str) -> np.ndarray:
        return np.array(self._fast.encode(text, add_special_tokens=False), dtype=np.uint32)
