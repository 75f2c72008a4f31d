"""Extreme classification: the format, the metrics by hand, attention to labels, WordNet."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from slayformer.errors import ConfigError, DataError
from slayformer.paper.extreme_classification import METRICS, SETTINGS, claims, measure, tables
from slayformer.paper.xmc.data import Documents, Rows, read_documents, write_documents
from slayformer.paper.xmc.experiment import epochs, has_omikuji, label_loss, make_batch
from slayformer.paper.xmc.metrics import precision_at, propensities, scored_precision_at
from slayformer.paper.xmc.model import XmcModel
from slayformer.paper.xmc.wordnet import ancestors, make_documents, read_synsets
from slayformer.presets import load_preset

TEXT = """\
3 5 4
0,2 1:0.5 4:2
 0:1
3 2:-1.5e-1
"""
TRUTH = Rows.of([[0, 2], [], [3]])
CPU = torch.device("cpu")


def model(mechanism: str, encoder: str = "mean", counts: Sequence[int] = (4,) * 11) -> XmcModel:
    return XmcModel(
        load_preset(mechanism, backend="torch"),
        feature_count=9,
        label_counts=torch.tensor(counts),
        width=16,
        heads=2,
        encoder=encoder,
        seed=1,
    )


def documents() -> Documents:
    features = Rows.of([[0, 3, 8], [1], [2, 4, 5, 7]])
    weights = np.array([1, 2, 0.5, 3, 1, 1, 0.25, 2], np.float32)
    return Documents(features, weights, Rows.of([[0, 2], [], [10, 4, 1]]), 9, 11)


def test_a_file_is_read_and_written_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "train.txt"
    path.write_text(TEXT)
    read = read_documents(path)
    assert (len(read), read.feature_count, read.label_count) == (3, 5, 4)
    assert [row.tolist() for row in read.labels] == [[0, 2], [], [3]]
    assert [row.tolist() for row in read.features] == [[1, 4], [0], [2]]
    np.testing.assert_allclose(read.weights, [0.5, 2, 1, -0.15])
    write_documents(path, read)
    again = read_documents(path)
    assert path.read_text().splitlines()[2] == " 0:1"
    np.testing.assert_array_equal(again.weights, read.weights)
    np.testing.assert_array_equal(again.features.values, read.features.values)
    np.testing.assert_array_equal(again.labels.starts, read.labels.starts)
    # labels left out without the space before the features
    path.write_text("1 5 4\n3:1 4:2\n")
    assert read_documents(path).features.values.tolist() == [3, 4]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: header 'N D L' expected .* found an empty file"),
        ("3 5\n", "line 1: header 'N D L' expected .* found '3 5'"),
        (TEXT.replace("3 5 4", "4 5 4"), "line 1 says N=4 documents, 3 lines follow"),
        (TEXT.replace("0,2", "0,x"), "line 2: label 'x' is not a whole number"),
        (TEXT.replace("0,2", "0,4"), "line 2: label 4 is not below 4"),
        (TEXT.replace(" 0:1", " 5:1"), "line 3: feature 5 is not below 5"),
        (TEXT.replace("-1.5e-1", "nan"), "line 4: feature '2:nan' is not written FEATURE:VALUE"),
        (TEXT.replace("2:-1.5e-1", "2"), "line 4: feature '2' is not written FEATURE:VALUE"),
    ],
)
def test_errors_name_the_line_and_the_field(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.txt"
    path.write_text(text)
    with pytest.raises(DataError, match=f"bad.txt.*{message}"):
        read_documents(path)
    with pytest.raises(DataError, match=r"none\.txt: cannot be read"):
        read_documents(tmp_path / "none.txt")


def test_metrics_by_hand() -> None:
    ranked = np.array([[0, 1, 2], [1, 0, 3], [0, 3, 1]])
    assert precision_at(ranked, TRUTH, 1) == pytest.approx(1 / 3)
    assert precision_at(ranked, TRUTH, 3) == pytest.approx((2 + 0 + 1) / 9)
    # N = 3 and each of labels 0, 2, 3 once: C = (ln 3 − 1) 2.5^.55, 1/p = 1 + C (N_l + 1.5)^−.55
    rare, common = 1 / (1 + 0.0986123 * (2.5 / 1.5) ** 0.55), 1 / (1 + 0.0986123)
    p = propensities(TRUTH, 4)
    np.testing.assert_allclose(p, [common, rare, common, common], rtol=1e-6)
    # unequal: labels 0 and 2 of the first row, then 3 of the last
    p = np.array([0.5, 1.0, 0.2, 0.25])
    assert scored_precision_at(ranked, TRUTH, p, 1) == pytest.approx(2 / (5 + 4))
    assert scored_precision_at(ranked, TRUTH, p, 2) == pytest.approx((2 + 4) / (7 + 4))
    assert scored_precision_at(ranked, TRUTH, p, 3) == pytest.approx((7 + 4) / (7 + 4))


def test_psp_is_one_for_a_perfect_ranking_and_never_above() -> None:
    draws = np.random.default_rng(0)
    truth = Rows.of(draws.permutation(20)[: draws.integers(1, 8)] for _ in range(50))
    p = propensities(truth, 20)
    # the rarest first: with the labels of a document in any other order less is gained
    perfect = np.array(
        [
            [*sorted(row, key=lambda label: p[label]), *set(range(20)).difference(row)]
            for row in truth
        ]
    )
    for k in (1, 3, 5):
        assert scored_precision_at(perfect, truth, p, k) == pytest.approx(1, abs=1e-12)
        for _ in range(20):
            ranked = np.array([draws.permutation(20) for _ in truth])
            assert 0 < scored_precision_at(ranked, truth, p, k) < 1


@pytest.mark.parametrize("mechanism", ["slay", "slay_exact_poly", "linear_elu", "softmax", "yat"])
def test_label_weights_stay_on_their_device(mechanism: str) -> None:
    document = torch.empty(3, 16, device="meta")
    built = model(mechanism).to("meta")
    assert built.log_weights(document).is_meta
    assert built.log_weights(document, torch.zeros(3, 2, dtype=torch.long, device="meta")).is_meta


def own_weights(built: XmcModel, document: Tensor) -> Tensor:
    """Return each head's weights as `Attention.forward` applies them, [H, B, L]."""
    # values that tell the labels apart, as many at a time as a head is wide
    query, keys = (
        x.unflatten(-1, (2, 8)).transpose(0, 1)[None]
        for x in (built.query(document), built.label_keys.weight)
    )
    query = F.pad(query, (0, 0, 0, 8))
    values = F.pad(torch.eye(11, dtype=document.dtype), (0, 5)).expand(1, 2, -1, -1)
    parts = [
        built.label_attention(query, keys, part, causal=False)[0] for part in values.split(8, -1)
    ]
    return torch.cat(parts, dim=-1)[0, :, : len(document), :11]


@pytest.mark.parametrize("mechanism", ["slay", "performer", "softmax", "yat_spherical"])
def test_label_weights_are_the_mechanisms_own_attention(mechanism: str) -> None:
    built = model(mechanism)
    batch = make_batch(documents(), np.arange(3), CPU)
    document = built.encode(batch.features, batch.weights, batch.starts_B)
    weights = built.log_weights(document).exp()
    torch.testing.assert_close(weights.sum(-1), torch.ones(3), atol=1e-3, rtol=0)
    some = built.log_weights(document, batch.labels_BN)
    torch.testing.assert_close(some.exp(), weights.gather(1, batch.labels_BN))
    own = own_weights(built, document)
    torch.testing.assert_close(weights, own.mean(0), atol=2e-5, rtol=1e-3)
    # seen 0, 1, 9 and 3 times: so much more, plus one
    frequent = model(mechanism, counts=[0, 1, 9, *[3] * 8])
    own = own * torch.tensor([1.0, 2, 10, *[4] * 8])
    wanted = (own / own.sum(-1, keepdim=True)).mean(0)
    weights = frequent.log_weights(document).exp()
    torch.testing.assert_close(weights, wanted, atol=2e-5, rtol=1e-3)
    some = frequent.log_weights(document, batch.labels_BN)
    torch.testing.assert_close(some.exp(), weights.gather(1, batch.labels_BN))


@pytest.mark.parametrize("encoder", ["mean", "attention"])
def test_a_document_does_not_depend_on_its_batch(encoder: str) -> None:
    built, rows = model("slay", encoder), documents()
    together = make_batch(rows, np.array([0, 1, 2]), CPU)
    document = built.encode(together.features, together.weights, together.starts_B)
    for row in range(3):
        alone = make_batch(rows, np.array([row]), CPU)
        one = built.encode(alone.features, alone.weights, alone.starts_B)
        torch.testing.assert_close(one[0], document[row])
    if encoder == "mean":
        table = built.feature_embedding.weight
        mean = (table[0] + 2 * table[3] + 0.5 * table[8]) / 3.5
        torch.testing.assert_close(document[0], built.document_norm(mean))


def test_the_loss_is_the_surprise_at_the_labels_and_reaches_every_weight() -> None:
    built = model("slay", "attention")
    batch = make_batch(documents(), np.array([2, 1, 0]), CPU)
    loss = label_loss(built, batch)
    log_weights = built.log_weights(built.encode(batch.features, batch.weights, batch.starts_B))
    # of documents 2 and 0, for 1 has no labels
    wanted = -(log_weights[0, [10, 4, 1]].mean() + log_weights[2, [0, 2]].mean()) / 2
    torch.testing.assert_close(loss, wanted)
    loss.backward()
    gradients = {name: weight.grad for name, weight in built.named_parameters()}
    for name, gradient in gradients.items():
        assert gradient is not None, name
        assert gradient.abs().sum() > 0, name
    with pytest.raises(ConfigError, match=r"attention=slay_best: .*labels stand nowhere"):
        model("slay_best")


def test_every_document_is_seen_once_an_epoch() -> None:
    batches = epochs(7, 3, seed=0)
    first, second = ([next(batches) for _ in range(3)] for _ in range(2))
    assert [len(batch) for batch in first] == [3, 3, 1]
    assert sorted(np.concatenate(first)) == sorted(np.concatenate(second)) == list(range(7))
    assert not np.array_equal(np.concatenate(first), np.concatenate(second))


def test_models_learn_what_the_words_say(tmp_path: Path) -> None:
    # label l is there if word l is; the other words say nothing
    draws = np.random.default_rng(0)
    features = [np.sort(draws.permutation(30)[:5]) for _ in range(600)]
    labels = [row[row < 12] for row in features]
    everything = Documents(Rows.of(features), np.ones(3000, np.float32), Rows.of(labels), 30, 12)
    files = [tmp_path / "train.txt", tmp_path / "test.txt"]
    for path, span in zip(files, (slice(0, 500), slice(500, 600)), strict=True):
        chosen = np.arange(600)[span]
        part = replace(
            everything,
            features=everything.features.take(chosen),
            weights=np.ones(5 * len(chosen), np.float32),
            labels=everything.labels.take(chosen),
        )
        write_documents(path, part)

    def measured() -> dict:
        return measure(
            *files,
            mechanisms=["softmax", "yat_spherical"],
            encoders=["mean"],
            seeds=[0],
            settings=replace(SETTINGS, width=32, epochs=30, batch_documents=100),
            reference=has_omikuji(),
            directory=tmp_path,
        )

    data = measured()
    assert [row["method"] for row in data["rows"][1:-2]] == ["omikuji"] * has_omikuji()
    frequent, *linear, softmax, yat = (row["scores"][0] for row in data["rows"])
    for scores in (*linear, softmax, yat):
        # not 1, for some documents have no label
        assert scores["P@1"] > 0.8 > 0.5 > frequent["P@1"]
        assert all(0 <= value <= 1 for value in scores.values())
        assert scores["PSP@1"] > 0.9
    # kept: the same without training, and shown
    kept = tmp_path / "softmax-mean-seed0.json"
    record = json.loads(kept.read_text())
    record["result"]["scores"]["P@1"] = 0.125
    kept.write_text(json.dumps(record))
    again = json.loads(json.dumps(measured()))
    (table,) = tables(again)
    assert table.rows[1 + has_omikuji()][:2] == ["softmax, mean of embeddings", "0.1250"]
    assert table.rows[-2][:2] == ["slay, published (Eurlex-4K)", "0.4978"]
    assert claims(again) == []
    files[1].write_text("0 30 13\n")
    with pytest.raises(DataError, match=r"label_count 12, .* has 13: they are not of one set"):
        measured()
    for train, test, told in (
        ("0 30 12\n", "1 30 12\n0 1:1\n", "train.txt holds no documents"),
        ("1 30 12\n0 1:1\n", "0 30 12\n", "test.txt holds no documents"),
        ("1 30 4\n0 1:1\n", "1 30 4\n0 1:1\n", "has 4 labels: the first 5 are scored"),
    ):
        for path, text in zip(files, (train, test), strict=True):
            path.write_text(text)
        with pytest.raises(DataError, match=told):
            measured()


def test_a_verdict_of_one_seed_says_so() -> None:
    better = dict.fromkeys(METRICS, 0.5)
    for count, told in ((1, " (one seed)"), (3, "")):
        rows = [
            {"method": method, "encoder": "mean", "scores": [scores] * count}
            for method, scores in (("slay", better), ("performer", dict.fromkeys(METRICS, 0.4)))
        ]
        (claim,) = claims({"rows": rows, "seeds": count})
        assert claim.verdict == f"holds{told}"


def synset_line(offset: int, parent: int | None, gloss: str) -> str:
    pointers = "000" if parent is None else f"001 @ {parent:08} n 0000"
    return f"{offset:08} 03 n 02 a_word 0 another 0 {pointers} | {gloss}  \n"


def test_wordnet_becomes_documents(tmp_path: Path) -> None:
    lines = ["  1 This is the licence | with a bar\n", synset_line(1, None, "all there is")]
    lines += [synset_line(2, 1, "it lives"), synset_line(3, 2, "it barks")]
    lines += [synset_line(n, 3, f"it barks; a dog of kind {n}") for n in range(10, 60)]
    (tmp_path / "data.noun").write_text("".join(lines))
    (tmp_path / "data.verb").write_text(
        "00000007 29 v 01 run 0 001 @ 00000008 v 0000 01 + 02 00 | go\n"
        "00000008 29 v 01 move 0 000 01 + 02 00 | change place\n"
    )
    synsets = read_synsets(tmp_path)
    assert len(synsets) == 55
    above = ancestors(synsets)
    assert above["n00000010"] == {"n00000001", "n00000002", "n00000003"}
    assert above["v00000007"] == {"v00000008"}
    train, test = make_documents(synsets, most_label_share=1.0)
    # every dog, its parent and its grandparent; not the two roots, and not run: go is rare
    assert len(train) + len(test) == 52
    assert len(test) > 0
    assert (train.label_count, train.feature_count) == (test.label_count, test.feature_count)
    # labels with at least five documents below: 1, 2, 3; words: it, barks, a, dog, of, kind
    assert (train.label_count, train.feature_count) == (3, 6)
    assert make_documents(synsets, most_label_share=0.97)[0].label_count < 3
    (tmp_path / "data.verb").write_text("no synset\n")
    with pytest.raises(DataError, match=r"data\.verb, line 1: not a synset"):
        read_synsets(tmp_path)
    with pytest.raises(DataError, match="apt-get install wordnet-base"):
        read_synsets(tmp_path / "nowhere")
