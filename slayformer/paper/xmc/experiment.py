"""A model of extreme classification, trained and scored; and a linear reference of a library."""

from __future__ import annotations

import importlib.util
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slayformer.config import AttentionConfig, OptimizerConfig, ScheduleConfig, one_of, positive
from slayformer.errors import UserError
from slayformer.paper.xmc.data import Documents
from slayformer.paper.xmc.metrics import precision_at, propensities, scored_precision_at
from slayformer.paper.xmc.model import XmcModel
from slayformer.training.small import train_small

RANKS = (1, 3, 5)
# documents ranked at a time: what holds a weight for every label
RANKED_DOCUMENTS = 512


@dataclass(frozen=True)
class XmcSettings:
    """The model's sizes and how it is trained; `encoder` is told in `XmcModel`."""

    width: int = positive()
    heads: int = positive()
    encoder: str = one_of("mean", "attention")
    epochs: int = positive()
    batch_documents: int = positive()
    learning_rate: float = positive()


@dataclass(frozen=True)
class Batch:
    """Documents as flat features and weights from `starts_B` on, and their labels.

    `labels_BN` is padded with 0; `labelled_BN` tells which are real.
    """

    features: Tensor
    weights: Tensor
    starts_B: Tensor
    labels_BN: Tensor
    labelled_BN: Tensor


def make_batch(documents: Documents, chosen: np.ndarray, device: torch.device) -> Batch:
    """Return the documents `chosen` as a batch on `device`."""
    starts = documents.features.starts
    spans = [np.arange(starts[row], starts[row + 1]) for row in chosen]
    flat = np.concatenate(spans)
    labels = documents.labels.take(chosen)
    counts = np.diff(labels.starts)
    labelled = np.arange(max(1, counts.max())) < counts[:, None]
    padded = np.zeros(labelled.shape, np.int64)
    padded[labelled] = labels.values
    arrays = (
        documents.features.values[flat],
        documents.weights[flat],
        np.cumsum([0, *map(len, spans[:-1])]),
        padded,
        labelled,
    )
    return Batch(*(torch.from_numpy(array).to(device) for array in arrays))


def label_loss(model: XmcModel, batch: Batch) -> Tensor:
    """Return the mean surprise at a document's labels in nats; documents without labels are out."""
    document_BC = model.encode(batch.features, batch.weights, batch.starts_B)
    log_weights_BN = model.log_weights(document_BC, batch.labels_BN)
    count_B = batch.labelled_BN.sum(dim=1)
    surprise_B = -(log_weights_BN * batch.labelled_BN).sum(dim=1) / count_B.clamp_min(1)
    return surprise_B.sum() / (count_B > 0).sum().clamp_min(1)


def epochs(count: int, size: int, seed: int) -> Iterator[np.ndarray]:
    """Yield batches of `size` of `count` documents, in another order each epoch, without end."""
    order = np.random.default_rng(seed)
    while True:
        shuffled = order.permutation(count)
        yield from np.split(shuffled, range(size, count, size))


def train_and_score(
    train: Documents,
    test: Documents,
    options: AttentionConfig,
    settings: XmcSettings,
    seed: int,
    progress: Callable[[float], None] = lambda share: None,
) -> dict[str, Any]:
    """Return P@k and PSP@k on `test` of a model trained on `train`, and the seconds it took."""
    start = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = XmcModel(
        options,
        feature_count=train.feature_count,
        label_counts=torch.from_numpy(label_counts(train)),
        width=settings.width,
        heads=settings.heads,
        encoder=settings.encoder,
        seed=seed,
    ).to(device)
    batches = epochs(len(train), settings.batch_documents, seed)
    updates = settings.epochs * math.ceil(len(train) / settings.batch_documents)
    train_small(
        model,
        lambda update: label_loss(model, make_batch(train, next(batches), device)),
        updates=updates,
        optimizer=OptimizerConfig(learning_rate=settings.learning_rate, weight_decay=0.0),
        schedule=ScheduleConfig(decay="linear", warmup_updates=updates // 20),
        told=lambda update, loss: progress(update / updates),
    )
    ranked = rank(model.eval(), test, device)
    return {
        "mechanism": options.name,
        "settings": asdict(settings),
        "seed": seed,
        "scores": scores(ranked, train, test),
        "seconds": time.monotonic() - start,
    }


@torch.no_grad()
def rank(model: XmcModel, documents: Documents, device: torch.device) -> np.ndarray:
    """Return the labels with the most weight, the first first, [documents, max(RANKS)]."""
    found = []
    for first in range(0, len(documents), RANKED_DOCUMENTS):
        chosen = np.arange(first, min(first + RANKED_DOCUMENTS, len(documents)))
        batch = make_batch(documents, chosen, device)
        document_BC = model.encode(batch.features, batch.weights, batch.starts_B)
        found.append(model.log_weights(document_BC).topk(max(RANKS), dim=-1).indices.cpu().numpy())
    return np.concatenate(found)


def scores(ranked: np.ndarray, train: Documents, test: Documents) -> dict[str, float]:
    """Return P@k and PSP@k of `ranked` for each of RANKS."""
    p = propensities(train.labels, train.label_count)
    plain = {f"P@{k}": precision_at(ranked, test.labels, k) for k in RANKS}
    return plain | {f"PSP@{k}": scored_precision_at(ranked, test.labels, p, k) for k in RANKS}


def label_counts(documents: Documents) -> np.ndarray:
    """Return how many of `documents` have each label, [L]."""
    return np.bincount(documents.labels.values, minlength=documents.label_count)


def most_frequent(train: Documents, test: Documents) -> dict[str, float]:
    """Return the scores of answering the labels that are most frequent in training."""
    best = np.argsort(-label_counts(train), kind="stable")[: max(RANKS)]
    return scores(np.tile(best, (len(test), 1)), train, test)


def has_omikuji() -> bool:
    """Return whether the package omikuji is installed; not every platform has it."""
    return importlib.util.find_spec("omikuji") is not None


def score_omikuji(
    train_file: Path, test_file: Path, train: Documents, test: Documents
) -> dict[str, Any]:
    """Return the scores of omikuji (Parabel's trees of linear classifiers) on the same files.

    Raises UserError if the package is missing or fails.
    """
    if not has_omikuji():
        raise UserError("omikuji is missing: pip install 'slayformer[paper]', or reference=false")
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        ranked_file = Path(folder) / "ranked.npy"
        command = [sys.executable, "-m", "slayformer.paper.xmc.omikuji_ranking"]
        command += [str(path) for path in (train_file, test_file, ranked_file)]
        ended = subprocess.run([*command, str(max(RANKS))], capture_output=True, text=True)
        if ended.returncode:
            raise UserError(f"omikuji failed on {train_file}: {ended.stderr[-500:]}")
        ranked = np.load(ranked_file)
    return {"scores": scores(ranked, train, test), "seconds": time.monotonic() - start}
