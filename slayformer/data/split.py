"""Which documents are trained on and which are held out: whole documents, by a hash of their id.

A copy under another name is on the side of the first.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from slayformer.config import DataConfig
from slayformer.data.corpus import Document, Source, open_source
from slayformer.errors import ConfigError, DataError

TRAIN, VALIDATION = "train", "validation"
# a trained tokenizer sees the first training documents, up to this much text
TOKENIZER_TRAINING_CHARACTERS = 256_000_000

# in the cache directory
DIGESTS_FOLDER = "digests"

Sided = tuple[str, Document]


class SplitCorpus:
    """The documents of a configuration, each on its side of the split.

    `label` is a short name for folders; `total` the number of documents, None if not known.
    """

    def __init__(self, data: DataConfig) -> None:
        """Open the sources of `data`; raises DataError if one is not there."""
        self._fraction = data.validation_fraction
        self._digests = Path(data.cache_directory).expanduser().absolute() / DIGESTS_FOLDER
        self._main = open_source(data.source, "data.source")
        self._validation: Source | None = None
        if data.validation_source is not None:
            self._validation = open_source(data.validation_source, "data.validation_source")
            if self._validation.shares_with(self._main):
                raise DataError(
                    f"{self._validation.where}: {self._main.where} has the same text, which would "
                    f"be trained on: keep them apart, or leave data.validation_source null to hold "
                    f"out data.validation_fraction of it"
                )
        elif self._fraction == 0:
            hint = "must be above 0 unless data.validation_source is set"
            raise ConfigError("data.validation_fraction", 0, hint)
        self.label = self._main.label
        self.total = self._main.total
        if self.total is not None and self._validation is not None:
            more = self._validation.total
            self.total = None if more is None else self.total + more

    def describe(self) -> dict[str, Any]:
        """Return what the documents and their sides depend on, as JSON."""
        source = self._main.describe(self._digests)
        if self._validation is not None:
            return {"source": source, "validation_source": self._validation.describe(self._digests)}
        # which they are follows from the source; earlier versions held each out by its own name
        copies = {"copies": "on one side"} if self._copies else {}
        return {"source": source, "validation_fraction": self._fraction, **copies}

    def readings(self) -> list[Iterator[Sided]]:
        """Return the readings that together give every document; the first has all for training."""
        if self._validation is None:
            return [((self._side(d.id), d) for d in self._main.documents())]
        train = ((TRAIN, document) for document in self._main.documents())
        return [train, ((VALIDATION, document) for document in self._validation.documents())]

    @property
    def has_validation_source(self) -> bool:
        """Whether validation has a source of its own."""
        return self._validation is not None

    def check_parts(self, parts: int) -> None:
        """Raise ConfigError if the main source cannot be cut into so many parts."""
        most = self._main.most_parts()
        if parts > most:
            hint = (
                f"{self._main.where} can be cut into {most} at most, which is the number of its "
                f"files or row groups (1 if document_start joins rows)"
            )
            raise ConfigError("data.parts", parts, hint)

    def reading(self, part: int, parts: int) -> Iterator[Sided]:
        """Return part number `part` of `parts` of the main source; after them the validation's."""
        if part == parts and self._validation is not None:
            return ((VALIDATION, document) for document in self._validation.documents())
        documents = self._main.documents(part, parts)
        if self._validation is not None:
            return ((TRAIN, document) for document in documents)
        return ((self._side(d.id), d) for d in documents)

    def tokenizer_texts(self) -> Iterator[str]:
        """Yield the training documents that a trained tokenizer learns from.

        Raises DataError if there is none.
        """
        characters = documents = 0
        for side, document in self.readings()[0]:
            documents += 1
            if side == TRAIN:
                yield document.text
                characters += len(document.text)
                if characters >= TOKENIZER_TRAINING_CHARACTERS:
                    return
        if characters == 0:
            raise self.refuse(TRAIN, documents)

    def refuse(self, empty_side: str, documents: int) -> DataError:
        """Return the error for `empty_side` having none of the first `documents` documents."""
        if documents == 0:
            return DataError(f"{self._main.where}: there is no text in it")
        if documents == 1:
            return DataError(
                f"{self._main.where}: it is one document, and whole documents are held out for "
                f"validation; give a folder of several, divide it with data.source.document_start "
                f"(a regular expression; a document starts at each matching line: '^$' for blank "
                f"lines), or set data.validation_source"
            )
        positions = [self._position(d.id) for d in islice(self._main.documents(), documents)]
        if empty_side == VALIDATION:
            works = f"at least {math.floor(min(positions) * 1e4 + 1) / 1e4:.4f}"
        else:
            works = f"at most {math.floor(max(positions) * 1e4) / 1e4:.4f}"
        return DataError(
            f"data.validation_fraction={self._fraction} leaves no {empty_side} document among "
            f"{documents}: use {works}, more documents, or data.validation_source"
        )

    def _side(self, document_id: str) -> str:
        return VALIDATION if self._position(document_id) < self._fraction else TRAIN

    def _position(self, document_id: str) -> float:
        return split_position(self._copies.get(document_id, document_id))

    @cached_property
    def _copies(self) -> dict[str, str]:
        return self._main.copies(self._digests)


def split_position(document_id: str) -> float:
    """Return where a document lies in [0, 1): a hash of its id, blind to all other documents.

    Those below data.validation_fraction are held out.
    """
    digest = hashlib.sha256(document_id.encode("utf-8", "surrogatepass")).digest()
    # 53 bits: all that a float in [0, 1) can hold
    return (int.from_bytes(digest[:8]) >> 11) / (1 << 53)
