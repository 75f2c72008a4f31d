"""Table 4: extreme classification, by documents that attend to labels.

The paper's Eurlex-4K is on no package registry; the set that runs anywhere is made from WordNet.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from slayformer.config_loading import to_plain
from slayformer.data.shards import write_atomically
from slayformer.errors import DataError
from slayformer.paper.item import FAILS, HOLDS, ONE_SEED, Claim, Data, Item, Request, Table
from slayformer.paper.published import TABLE_4
from slayformer.paper.xmc.data import read_documents, write_documents
from slayformer.paper.xmc.experiment import (
    RANKS,
    XmcSettings,
    has_omikuji,
    most_frequent,
    score_omikuji,
    train_and_score,
)
from slayformer.paper.xmc.wordnet import DEBIAN_FOLDER, make_documents, read_synsets
from slayformer.presets import load_preset

MECHANISMS = ("slay", "performer", "yat_spherical", "softmax")
ENCODERS = ("mean", "attention")
# of the rates .02, .05 and .1 this one was best for slay, performer and softmax, those tried, on
# 8,000 training documents kept out of training
SETTINGS = XmcSettings(
    width=128, heads=1, encoder="mean", epochs=20, batch_documents=512, learning_rate=0.05
)
METRICS = [f"{kind}@{k}" for kind in ("P", "PSP") for k in RANKS]
# of the smaller size
QUICK_EPOCHS = 5


def compute(request: Request) -> Data:
    """Return scores on the WordNet set: of each mechanism and encoder, and of the references."""
    train, test = make_documents(read_synsets(DEBIAN_FOLDER))
    files = [request.directory / f"{side}.txt" for side in ("train", "test")]
    for path, documents in zip(files, (train, test), strict=True):
        write_documents(path, documents)
    return measure(
        files[0],
        files[1],
        mechanisms=MECHANISMS,
        encoders=request.choose(quick=ENCODERS[:1], full=ENCODERS),
        seeds=range(request.seed_count(quick=1, full=3)),
        settings=replace(SETTINGS, epochs=request.choose(quick=QUICK_EPOCHS, full=SETTINGS.epochs)),
        reference=has_omikuji(),
        directory=request.directory,
        progress=request.progress,
    )


def measure(
    train_file: Path,
    test_file: Path,
    *,
    mechanisms: Sequence[str],
    encoders: Sequence[str],
    seeds: Sequence[int],
    settings: XmcSettings,
    reference: bool,
    directory: Path,
    progress: Callable[[float], None] = lambda share: None,
) -> Data:
    """Return the sizes of the data and a row of scores for each method, a number a seed.

    Models that `directory` keeps are not trained again. Raises DataError if the two files do not
    belong together or hold too little.
    """
    train, test = read_documents(train_file), read_documents(test_file)
    for name in ("feature_count", "label_count"):
        ours, theirs = getattr(train, name), getattr(test, name)
        if ours != theirs:
            told = f"{train_file} has {name} {ours:,}, {test_file} has {theirs:,}"
            raise DataError(f"{told}: they are not of one set")
    for path, documents in ((train_file, train), (test_file, test)):
        if not len(documents):
            raise DataError(f"{path} holds no documents")
    if train.label_count < max(RANKS):
        told = f"{train_file} has {train.label_count} labels"
        raise DataError(f"{told}: the first {max(RANKS)} are scored, so there must be as many")
    directory.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(train_file.read_bytes() + test_file.read_bytes()).hexdigest()
    rows = [{"method": "most frequent labels", "scores": [most_frequent(train, test)]}]
    if reference:
        linear = _kept(
            directory / "omikuji.json",
            {"data": digest},
            partial(score_omikuji, train_file, test_file, train, test),
        )
        rows.append({"method": "omikuji", "scores": [linear["scores"]]})
    work = [(encoder, mechanism) for encoder in encoders for mechanism in mechanisms]
    total, done = len(work) * len(seeds), 0
    for encoder, mechanism in work:
        options, own, scores = load_preset(mechanism), replace(settings, encoder=encoder), []
        for seed in seeds:

            def advance(part: float, done: int = done) -> None:
                progress((done + part) / total)

            result = _kept(
                directory / f"{mechanism}-{encoder}-seed{seed}.json",
                {"data": digest, "attention": to_plain(options), "settings": to_plain(own)},
                partial(train_and_score, train, test, options, own, seed, advance),
            )
            done += 1
            scores.append(result["scores"])
        rows.append({"method": mechanism, "encoder": encoder, "scores": scores})
    return {
        "training_documents": len(train),
        "test_documents": len(test),
        "features": train.feature_count,
        "labels": train.label_count,
        "seeds": len(seeds),
        "settings": asdict(settings),
        "rows": rows,
    }


def _kept(path: Path, what: dict[str, Any], work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the result that `path` keeps of the same work; or do it and keep it."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["what"] == what:
            return kept["result"]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    result = work()
    write_atomically(path, (json.dumps({"what": what, "result": result}, indent=2).encode(),))
    return result


def tables(data: Data) -> Sequence[Table]:
    """Return Table 4: measured rows, then the published ones of another data set."""
    rows = [
        [_label(row), *(_cell([scores[metric] for scores in row["scores"]]) for metric in METRICS)]
        for row in data["rows"]
    ]
    for mechanism, published in TABLE_4.items():
        name = f"{mechanism}, published (Eurlex-4K)"
        rows.append([name, *(f"{published[metric]:.4f}" for metric in METRICS)])
    measured = {row["method"] for row in data["rows"]}
    reference = "" if "omikuji" in measured else "Not run: omikuji, trees of linear classifiers."
    seeds = "1 seed" if data["seeds"] == 1 else f"mean ± sample std of {data['seeds']} seeds"
    own = data["settings"]
    note = (
        f"{data['training_documents']:,} training documents, {data['test_documents']:,} for "
        f"test, {data['features']:,} features, {data['labels']:,} labels. Models, all alike: "
        f"{seeds}, {own['epochs']} epochs in batches of {own['batch_documents']}, width "
        f"{own['width']}, heads: {own['heads']}, learning rate {own['learning_rate']:g}. PSP is "
        f"divided by the best attainable, the published one was not: compare only P. {reference}"
    ).strip()
    return [Table("table_4", "Table 4: extreme classification", ["method", *METRICS], rows, note)]


def _label(row: dict[str, Any]) -> str:
    told = {"mean": "mean of embeddings", "attention": "attention over tokens (ours)"}
    return f"{row['method']}, {told[row['encoder']]}" if "encoder" in row else row["method"]


def _cell(values: Sequence[float]) -> str:
    text = f"{statistics.fmean(values):.4f}"
    return f"{text} ± {statistics.stdev(values):.4f}" if len(values) > 1 else text


def claims(data: Data) -> Sequence[Claim]:
    """Return the paper's claim of section 3.4, that SLAY beats Performer in every column."""
    means = {
        row["method"]: {m: statistics.fmean(one[m] for one in row["scores"]) for m in METRICS}
        for row in data["rows"]
        if row.get("encoder") == "mean"
    }
    if not {"slay", "performer"} <= means.keys():
        return []
    better = all(means["slay"][metric] > means["performer"][metric] for metric in METRICS)
    told = "; ".join(
        f"{metric} {means['slay'][metric]:.3f} and {means['performer'][metric]:.3f}"
        for metric in ("P@1", "P@5", "PSP@5")
    )
    return [
        Claim(
            "In extreme classification SLAY scores higher than Performer in every column.",
            "section 3.4, Table 4",
            f"SLAY and Performer: {told}",
            (HOLDS if better else FAILS) + f" ({ONE_SEED})" * (data["seeds"] == 1),
        )
    ]


ITEM = Item(
    name="extreme_classification",
    title="Extreme classification: documents attend to labels",
    sources=("Table 4",),
    minutes=15.0,
    compute=compute,
    published="Eurlex-4K; the set here is WordNet's glosses (documents) and what their words are "
    "kinds of (labels). scripts/xmc.py runs on files of Eurlex-4K.",
    tables=tables,
    claims=claims,
)
