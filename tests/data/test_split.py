from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from slayformer.config import DataConfig, SourceConfig
from slayformer.data.split import SplitCorpus, split_position
from slayformer.errors import ConfigError, DataError


def folder_of(path: Path, names: list[str]) -> DataConfig:
    path.mkdir(exist_ok=True)
    for name in names:
        (path / name).write_text(f"the text of {name}")
    source = SourceConfig(kind="text", path=str(path))
    return DataConfig(source=source, validation_fraction=0.3)


def sides(data: DataConfig) -> dict[str, str]:
    return {d.id: side for reading in SplitCorpus(data).readings() for side, d in reading}


def test_position_by_hand():
    # printf 1790-Washington-1.txt | sha256sum
    digest = "fe7ea177bcf5f333"
    assert split_position("1790-Washington-1.txt") == pytest.approx(int(digest, 16) / 2**64)


def test_fraction_is_met_and_spread():
    ids = [f"{number:05d}.txt" for number in range(20_000)]
    held_out = [split_position(name) < 0.05 for name in ids]
    # binomial with p = 0.05: five standard deviations
    assert abs(sum(held_out) - 1000) < 5 * (20_000 * 0.05 * 0.95) ** 0.5
    for start in range(0, 20_000, 5_000):
        assert abs(sum(held_out[start : start + 5_000]) - 250) < 5 * (5_000 * 0.05 * 0.95) ** 0.5


def test_sides_do_not_depend_on_other_documents(tmp_path):
    names = [f"document_{number}.txt" for number in range(40)]
    few = sides(folder_of(tmp_path / "few", names[::3]))
    many = sides(folder_of(tmp_path / "many", names))
    assert set(many.values()) == {"train", "validation"}
    assert all(many[name] == side for name, side in few.items())


def test_tokenizer_sees_training_documents_only(tmp_path, monkeypatch):
    data = folder_of(tmp_path, [f"document_{number}.txt" for number in range(40)])
    train = [f"the text of {name}" for name, side in sides(data).items() if side == "train"]
    assert len(train) < 40
    assert list(SplitCorpus(data).tokenizer_texts()) == train
    monkeypatch.setattr(
        "slayformer.data.split.TOKENIZER_TRAINING_CHARACTERS", len(train[0] + train[1]) + 1
    )
    assert list(SplitCorpus(data).tokenizer_texts()) == train[:3]


@pytest.mark.parametrize("document_start", [None, "^the"])
def test_copies_are_on_one_side(tmp_path, document_start):
    names = [f"document_{number}.txt" for number in range(40)]
    data = folder_of(tmp_path / "text", names)
    data.source.document_start = document_start
    data.cache_directory = str(tmp_path / "cache")
    before = sides(data)
    described = SplitCorpus(data).describe()
    assert described == {
        "source": SplitCorpus(data)._main.describe(),
        "validation_fraction": 0.3,
    }
    # after the original by name and before it, in another folder, and by a link
    (tmp_path / "text" / "a").mkdir()
    for name in names:
        text = (tmp_path / "text" / name).read_text()
        (tmp_path / "text" / f"{name[:-4]} (1).txt").write_text(text)
        (tmp_path / "text" / "a" / name).symlink_to(tmp_path / "text" / name)
    found: dict[str, set[str]] = {}
    corpus = SplitCorpus(data)
    for side, document in corpus.readings()[0]:
        found.setdefault(document.text, set()).add(side)
    assert len(found) == 40
    assert all(len(on) == 1 for on in found.values())
    assert set.union(*found.values()) == {"train", "validation"} == set(before.values())
    # tokens of before, when copies could be on both sides, are others
    assert ("copies" in corpus.describe()) == (document_start is None)


def test_own_validation_source(tmp_path):
    data = folder_of(tmp_path / "a", ["one.txt", "two.txt"])
    data.validation_source = folder_of(tmp_path / "b", ["three.txt"]).source
    assert sides(data) == {"one.txt": "train", "two.txt": "train", "three.txt": "validation"}
    assert SplitCorpus(data).total == 3


def test_validation_that_is_trained_on_is_refused(tmp_path):
    data = folder_of(tmp_path / "text", ["one.txt", "two.txt"])
    held_out = folder_of(tmp_path / "text" / "held_out", ["three.txt"]).source
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "four.txt").symlink_to(tmp_path / "text" / "two.txt")
    links = SourceConfig(kind="text", path=str(tmp_path / "links"), document_start="^a")
    single = SourceConfig(kind="text", path=str(tmp_path / "text" / "one.txt"))
    for source in (data.source, held_out, links, single):
        data.validation_source = source
        with pytest.raises(DataError, match=r"^data\.validation_source\.path=.* the same text"):
            SplitCorpus(data)
    sotu = SourceConfig(kind="sotu")
    with pytest.raises(DataError, match=r"^data\.validation_source\.kind=sotu: .* the same text"):
        SplitCorpus(DataConfig(source=sotu, validation_source=sotu))


def test_rows_that_are_trained_on_are_refused(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    rows = SourceConfig(kind="huggingface", path=str(tmp_path))
    # the field that is forgotten is the split
    again = dataclasses.replace(rows, path=str(tmp_path / "link"), streaming=False)
    with pytest.raises(DataError, match=r"^data\.validation_source\.path=.* the same text"):
        SplitCorpus(DataConfig(source=rows, validation_source=again))
    SplitCorpus(
        DataConfig(source=rows, validation_source=dataclasses.replace(again, split="validation"))
    )


def test_missing_validation_source_is_named(tmp_path):
    data = folder_of(tmp_path, ["one.txt"])
    data.validation_source = SourceConfig(kind="text", path="nowhere")
    with pytest.raises(DataError, match=r"^data\.validation_source\.path=nowhere: there is no"):
        SplitCorpus(data)


def test_fraction_of_nothing(tmp_path):
    data = folder_of(tmp_path, ["one.txt", "two.txt"])
    data.validation_fraction = 0.0
    with pytest.raises(ConfigError, match=r"data\.validation_fraction=0: must be above 0"):
        SplitCorpus(data)


@pytest.mark.parametrize(("fraction", "empty"), [(1e-6, "validation"), (0.999999, "train")])
def test_refusal_names_a_fraction_that_works(tmp_path, fraction, empty):
    data = folder_of(tmp_path, [f"document_{number}.txt" for number in range(5)])
    data.validation_fraction = fraction
    error = SplitCorpus(data).refuse(empty, 5)
    assert isinstance(error, DataError)
    assert f"data.validation_fraction={fraction} leaves no {empty} document among 5" in str(error)
    found = re.search(r"use at (?:least|most) (0\.\d+)", str(error))
    assert found is not None
    data.validation_fraction = float(found.group(1))
    assert sorted(set(sides(data).values())) == ["train", "validation"]
