"""Our tokenizers as transformers' fast tokenizers: the same ids for the same text."""

from __future__ import annotations

from itertools import pairwise

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
