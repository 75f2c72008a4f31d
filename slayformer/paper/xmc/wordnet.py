"""A data set in the same form from WordNet 3: what is said of a word, and what it is a kind of.

A document is the gloss of a noun or verb; its labels are the synsets it descends from. The files
are Debian's package wordnet-base, in the format that its manual page wndb(5) tells.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from slayformer.errors import DataError
from slayformer.paper.xmc.data import Documents, Rows

DEBIAN_FOLDER = Path("/usr/share/wordnet")
PARTS = {"n": "data.noun", "v": "data.verb"}
# a hypernym, or that of an instance
IS_A = ("@", "@i")
# one in that many synsets is a test document, by a hash of its name
TEST_SHARE = 5


@dataclass(frozen=True)
class Synset:
    """The names of the synsets it is a kind of, and what is said of it."""

    parents: tuple[str, ...]
    gloss: str


def read_synsets(folder: Path) -> dict[str, Synset]:
    """Return every noun and verb synset by its name, as n00001740; DataError if unreadable."""
    synsets = {}
    for part, file in PARTS.items():
        path = folder / file
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            hint = "apt-get install wordnet-base, or name the folder that holds data.noun"
            raise DataError(f"{path}: cannot be read ({error.strerror}): {hint}") from error
        for number, line in enumerate(lines, start=1):
            # the licence is indented
            if line.startswith("  "):
                continue
            try:
                name, synset = _synset(part, line)
            except (ValueError, IndexError) as error:
                raise DataError(f"{path}, line {number}: not a synset of wndb(5)") from error
            synsets[name] = synset
    return synsets


def _synset(part: str, line: str) -> tuple[str, Synset]:
    """Return a line's synset: offset, file, part, words (hexadecimal count), pointers, gloss."""
    fields, _, gloss = line.partition(" | ")
    words = fields.split(" ")
    at = 4 + 2 * int(words[3], 16)
    pointers = [words[i : i + 4] for i in range(at + 1, at + 1 + 4 * int(words[at]), 4)]
    parents = tuple(kind + offset for symbol, offset, kind, _ in pointers if symbol in IS_A)
    return part + words[0], Synset(parents, gloss.strip())


def ancestors(synsets: dict[str, Synset]) -> dict[str, frozenset[str]]:
    """Return every synset above each, however far."""
    found: dict[str, frozenset[str]] = {}

    def climb(name: str) -> frozenset[str]:
        if name not in found:
            parents = synsets[name].parents
            found[name] = frozenset(parents).union(*map(climb, parents))
        return found[name]

    for name in synsets:
        climb(name)
    return found


def make_documents(
    synsets: dict[str, Synset],
    *,
    least_feature_documents: int = 3,
    least_label_documents: int = 5,
    most_label_share: float = 0.1,
) -> tuple[Documents, Documents]:
    """Return training and test documents.

    Features are the words of glosses, weighted by count x ln(N / documents with the word), that
    are in `least_feature_documents` training documents. Labels are the ancestors of
    `least_label_documents`, but not those of more than `most_label_share` of all ("entity"), which
    would be right without reading. Documents that this leaves without features or labels are out.
    """
    above = ancestors(synsets)
    rows = [
        (name, Counter(re.findall(r"[a-z]+", synset.gloss.lower())), above[name])
        for name, synset in synsets.items()
        if synset.parents
    ]
    training = [row for row in rows if not _is_test(row[0])]
    word_documents = Counter(word for _, words, _ in training for word in words)
    label_documents = Counter(label for _, _, labels in training for label in labels)
    words = sorted(w for w, count in word_documents.items() if count >= least_feature_documents)
    most = most_label_share * len(training)
    labels = sorted(
        label for label, count in label_documents.items() if least_label_documents <= count <= most
    )
    word_ids = {word: number for number, word in enumerate(words)}
    label_ids = {label: number for number, label in enumerate(labels)}
    rarity = {word: math.log(len(training) / word_documents[word]) for word in words}

    def documents(chosen: list[tuple[str, Counter[str], frozenset[str]]]) -> Documents:
        features, weights, kept_labels = [], [], []
        for _, counts, ancestry in chosen:
            known = sorted(word for word in counts if word in word_ids)
            own = sorted(label_ids[label] for label in ancestry if label in label_ids)
            if known and own:
                features.append([word_ids[word] for word in known])
                weights += [counts[word] * rarity[word] for word in known]
                kept_labels.append(own)
        return Documents(
            Rows.of(features),
            np.array(weights, np.float32),
            Rows.of(kept_labels),
            len(words),
            len(labels),
        )

    return documents(training), documents([row for row in rows if _is_test(row[0])])


def _is_test(name: str) -> bool:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) % TEST_SHARE == 0
