"""Windows of a text: every token but the first once, with as much context as fits; documents."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from slayformer.config import TokenizerConfig
from slayformer.data.shards import TokenStream
from slayformer.data.tokenizer import build_tokenizer
from slayformer.errors import DataError
from slayformer.evaluation.document_losses import DocumentLosses
from slayformer.evaluation.loss import LossTotals, perplexity, score
from slayformer.evaluation.perplexity_table import print_results
from slayformer.evaluation.windows import Text, TextWindows, standard_error
from slayformer.training.objective import IGNORE_INDEX

END_OF_TEXT = 256


def text_of(ids: list[int]) -> Text:
    # in pieces, as shards are
    pieces = np.array_split(np.array(ids, dtype=np.uint32), 3)
    return Text(TokenStream(pieces), len(ids), END_OF_TEXT, "the text")


def windows_of(
    ids: list[int], context_length: int, stride: int | None, isolate: bool = False
) -> TextWindows:
    return TextWindows(
        text_of(ids), context_length=context_length, stride=stride, isolate_documents=isolate
    )


class KnownLosses(nn.Module):
    """An objective whose loss depends on the target, and on the tokens seen before it if asked."""

    def __init__(self, nats: Tensor, per_token_seen: float = 0.0) -> None:
        super().__init__()
        self.nats = nats
        self.per_token_seen = per_token_seen

    def forward(self, ids_BT: Tensor, targets_BT: Tensor, *rest: Any) -> Tensor:
        seen_T = torch.arange(1, ids_BT.shape[1] + 1)
        nats_BT = self.nats[targets_BT.clamp_min(0)] + self.per_token_seen * seen_T
        return nats_BT * (targets_BT != IGNORE_INDEX)


def totals_of(objective: nn.Module, windows: TextWindows, batch_samples: int = 3) -> LossTotals:
    return score(
        objective,
        windows,
        windows=windows.windows,
        batch_samples=batch_samples,
        byte_lengths=np.ones(257, dtype=np.int64),
    )


def test_twenty_tokens_in_windows_of_ten_with_stride_five() -> None:
    ids = list(range(20))
    # powers of two: a sum of distinct ones says which went in, exactly
    nats = 2.0 ** torch.arange(257)
    windows = windows_of(ids, context_length=10, stride=5)
    totals = totals_of(KnownLosses(nats[:64].double()), windows)
    assert windows.windows == 3
    assert (totals.tokens, totals.nats) == (19, 2.0**20 - 2)
    # 10 tokens see 1 … 10, then 5 and the last 4 see as many as a full window leaves them
    batch = windows.batch([0, 1, 2])
    assert batch.ids_BT.tolist() == [list(range(10)), list(range(5, 15)), list(range(9, 19))]
    scored = batch.targets_BT != IGNORE_INDEX
    assert [row.nonzero().flatten().tolist() for row in scored] == [
        list(range(10)),
        list(range(5, 10)),
        list(range(6, 10)),
    ]
    seen = totals_of(KnownLosses(torch.zeros(257), per_token_seen=1.0), windows)
    assert seen.nats == sum(range(1, 11)) + sum(range(6, 11)) + sum(range(7, 11))


@pytest.mark.parametrize("tokens", [2, 5, 6, 7, 11, 12, 16, 17, 63])
@pytest.mark.parametrize("stride", [None, 1, 2, 4, 5])
def test_every_token_but_the_first_is_a_target_once(tokens: int, stride: int | None) -> None:
    ids = list(range(100, 100 + tokens))
    windows = windows_of(ids, context_length=5, stride=stride)
    if stride is None:
        assert windows.windows == math.ceil((tokens - 1) / 5)
    batch = windows.batch(list(range(windows.windows))[::-1])
    scored = batch.targets_BT != IGNORE_INDEX
    assert sorted(batch.targets_BT[scored].tolist()) == ids[1:]
    # each predicted from the token before it
    assert torch.equal(batch.targets_BT[scored], batch.ids_BT[scored] + 1)
    if stride is not None:
        # all of a full window's tokens lie before the last target
        context = scored.cumsum(1).eq(0).sum(1)[batch.ids_BT[:, 0] > 100]
        assert (context >= 5 - stride).all()


def test_a_unigram_model_has_one_loss_whatever_the_stride() -> None:
    draws = np.random.default_rng(0)
    ids = draws.integers(0, 257, size=211).tolist()
    nats = torch.from_numpy(draws.uniform(0, 9, size=257))
    wanted = nats[ids[1:]].sum().item()
    for context_length, stride in [(1, None), (7, None), (7, 1), (7, 3), (64, 7), (300, 5)]:
        windows = windows_of(ids, context_length, stride)
        for batch_samples in (1, 8):
            totals = totals_of(KnownLosses(nats), windows, batch_samples)
            assert totals.tokens == 210
            assert totals.nats == pytest.approx(wanted, rel=1e-12)


def test_isolated_documents_stay_isolated_and_positions_count_in_them() -> None:
    ids = [1, 2, END_OF_TEXT, 3, 4, END_OF_TEXT]
    windows = windows_of(ids, context_length=8, stride=None, isolate=True)
    batch = windows.batch([0])
    assert batch.document_ids_BT is not None
    assert batch.position_ids_BT is not None
    assert batch.document_ids_BT[0, :5].tolist() == [0, 0, 0, 1, 1]
    assert batch.position_ids_BT[0, :5].tolist() == [0, 1, 2, 0, 1]
    # targets 2, eot, 3 (after the first document), 4, eot; losses of their own ids
    nats = torch.zeros(257, dtype=torch.float64)
    nats[[2, END_OF_TEXT, 3, 4]] = torch.tensor([1.0, 10.0, 100.0, 1000.0], dtype=torch.float64)
    totals = totals_of(KnownLosses(nats), windows)
    assert totals.nats_T[:3] == (1001.0, 20.0, 100.0)
    assert totals.tokens_T[:3] == (2, 2, 1)


def test_nothing_can_be_scored_in_one_token() -> None:
    with pytest.raises(DataError, match="the text has 1 token: the first is never scored"):
        text_of([3])


def test_documents_own_what_was_scored_in_them() -> None:
    # 5 belongs to the document whose end-of-text is 256; the last document has no end
    ids = [5, 1, END_OF_TEXT, 2, 2, END_OF_TEXT, END_OF_TEXT, 3]
    nats = torch.zeros(257, dtype=torch.float64)
    nats[[1, 2, 3, END_OF_TEXT]] = torch.tensor([1.0, 2.0, 3.0, 10.0], dtype=torch.float64)
    for context_length, stride in [(3, None), (3, 2), (100, None)]:
        windows = windows_of(ids, context_length, stride)
        documents = windows.document_sums()
        score(
            KnownLosses(nats),
            windows,
            windows=windows.windows,
            batch_samples=2,
            byte_lengths=np.ones(257, dtype=np.int64),
            observe=documents.add,
        )
        found = documents.over_ranks()
        assert found.nats_D.tolist() == [11.0, 14.0, 10.0, 3.0]
        assert found.tokens_D.tolist() == [2, 3, 1, 1]


def test_standard_error_of_equal_documents_is_the_textbooks() -> None:
    losses = np.random.default_rng(1).normal(3, 0.5, size=40)
    lengths = np.full(40, 7)
    wanted = losses.std(ddof=1) / math.sqrt(40)
    assert standard_error(DocumentLosses(losses * 7, lengths)) == pytest.approx(wanted)
    assert standard_error(DocumentLosses(losses[:1], lengths[:1])) is None


def test_standard_error_is_the_spread_of_the_loss_over_drawn_documents() -> None:
    # documents of very different lengths, the long ones easier
    draws = np.random.default_rng(2)
    tokens = draws.integers(5, 500, size=(3000, 60)).astype(np.float64)
    nats = tokens * (draws.normal(4, 0.5, size=tokens.shape) - tokens / 500)
    spread = (nats.sum(1) / tokens.sum(1)).std(ddof=1)
    drawn = (DocumentLosses(*pair) for pair in zip(nats, tokens, strict=True))
    told = np.mean([standard_error(losses) for losses in drawn])
    assert told == pytest.approx(spread, rel=0.05)


def test_words_are_those_of_the_scored_text() -> None:
    tokenizer = build_tokenizer(TokenizerConfig("bytes"), list)
    ids = [*"Ünï  code\nis fun".encode(), END_OF_TEXT, *b"so it is", END_OF_TEXT]
    # the first byte is not scored; words never run from one document into the next
    assert text_of(ids).words(tokenizer) == 7
    assert text_of([*b"a b", END_OF_TEXT]).words(tokenizer) == 1


def test_a_text_is_the_same_whatever_its_tokens() -> None:
    def digest(name: str, *documents: str, cut: int | None = None) -> str:
        tokenizer = build_tokenizer(TokenizerConfig(name), list)
        end = tokenizer.end_of_text
        ids = [token for text in documents for token in (*tokenizer.encode(text), end)][:cut]
        return Text(TokenStream([np.array(ids)]), len(ids), end, "the text").digest(tokenizer)

    whole = digest("gpt2", "Hello, Wörld.", " and more")
    assert whole == digest("bytes", "Hello, Wörld.", " and more")
    assert whole != digest("bytes", "Hello, Wörld.", "and more")
    # as many bytes
    assert whole != digest("bytes", "Hello, Wörld. a", "nd more")
    assert digest("gpt2", "Hello, Wörld.", cut=4) != digest("bytes", "Hello, Wörld.", cut=4)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, ""),
        # an exported tokenizer is another by name
        ({"tokenizer": "c"}, ""),
        ({"tokenizer": "b", "scored_tokens": 11}, "the tokenizers differ: compare bits per byte"),
        # the same number of tokens of two tokenizers, or of two corpora
        ({"tokenizer": "b", "text_sha256": "y"}, "these are different stretches of text"),
        ({"text_sha256": "y"}, "these are different stretches of text"),
        ({"text_sha256": "y", "scored_tokens": 11}, "these are different stretches of text"),
    ],
)
def test_what_does_not_compare_is_told(change: dict, told: str, capsys: Any) -> None:
    numbers = ("loss", "token_perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte")
    result = {
        **{"checkpoint": "a", "data": "docs", "tokenizer": "a", "text_sha256": "x"},
        **{"mechanism": "slay", "context_length": 8, "trained_context_length": 8},
        **{"positions": None, "stride": None, "standard_error": None, "scored_tokens": 10},
        **{
            "loss_by_position": [{"first": 0, "last": 0, "loss": 1.0}],
            **dict.fromkeys(numbers, 1.0),
        },
    }
    print_results([result, result | change])
    printed = capsys.readouterr().out
    sentences = ("the tokenizers differ", "different stretches")
    assert [s for s in sentences if s in printed] == [s for s in sentences if s in told]
    assert told in printed


def test_word_and_byte_perplexity_of_a_text_by_hand() -> None:
    # " be or be" after the first token: 3 words, 9 bytes; all tokens at ln 8 nats, end-of-text too
    tokenizer = build_tokenizer(TokenizerConfig("bytes"), list)
    text = text_of([*b"x be or be", END_OF_TEXT])
    windows = TextWindows(text, context_length=4, stride=2, isolate_documents=False)
    totals = score(
        KnownLosses(torch.full((257,), math.log(8), dtype=torch.float64)),
        windows,
        windows=windows.windows,
        batch_samples=2,
        byte_lengths=tokenizer.token_byte_lengths(),
    )
    assert (totals.tokens, totals.bytes, text.words(tokenizer)) == (10, 9, 3)
    assert totals.perplexity == pytest.approx(8)
    # 8^10 for the text: the third and the ninth root of it
    assert perplexity(totals.nats, 3) == pytest.approx(1024)
    assert perplexity(totals.nats, 9) == pytest.approx(8 ** (10 / 9))
    # 30 bits in 9 bytes
    assert totals.bits_per_byte == pytest.approx(30 / 9)
    assert math.isnan(perplexity(1.0, 0))
