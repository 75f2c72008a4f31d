"""`scripts/xmc.py` and `scripts/prepare_xmc.py`: Table 4 on one's own files, and a set to try."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from slayformer.config import positive, seed_numbers, share
from slayformer.errors import ConfigError
from slayformer.paper.extreme_classification import ENCODERS, measure, tables
from slayformer.paper.files import write_table
from slayformer.paper.render import markdown
from slayformer.paper.xmc.data import write_documents
from slayformer.paper.xmc.experiment import XmcSettings
from slayformer.paper.xmc.wordnet import make_documents, read_synsets
from slayformer.presets import load_preset
from slayformer.progress import PlainProgress


@dataclass
class ModelSettings:
    """The model's sizes and how it is trained."""

    width: int = positive()
    heads: int = positive()
    epochs: int = positive()
    batch_documents: int = positive()
    learning_rate: float = positive()


@dataclass
class XmcConfig:
    """Everything `scripts/xmc.py` is told."""

    train: str
    test: str
    mechanisms: list[str]
    encoders: list[str]
    settings: ModelSettings
    seeds: list[int] = seed_numbers()  # noqa: RUF009, it gives a field
    reference: bool = True
    directory: str = "xmc_results"


@dataclass
class PrepareXmcConfig:
    """Everything `scripts/prepare_xmc.py` is told; `make_documents` says what the limits mean."""

    # where data.noun and data.verb are
    source: str
    directory: str
    least_feature_documents: int = positive()
    least_label_documents: int = positive()
    most_label_share: float = share()


def run(config: XmcConfig) -> None:
    """Train what the directory does not keep, write the table and print it.

    Raises ConfigError or DataError for what cannot work.
    """
    for key in ("mechanisms", "encoders", "seeds"):
        values = getattr(config, key)
        if not values or len(set(values)) < len(values):
            raise ConfigError(key, values, "name at least one, and each once")
    for name in config.mechanisms:
        load_preset(name)
    for name in config.encoders:
        if name not in ENCODERS:
            raise ConfigError("encoders", name, f"choose from {', '.join(ENCODERS)}")
    settings = XmcSettings(encoder=ENCODERS[0], **vars(config.settings))
    if settings.width % settings.heads:
        hint = f"must divide settings.width={settings.width}"
        raise ConfigError("settings.heads", settings.heads, hint)
    directory, console = Path(config.directory), Console()
    with PlainProgress(console=console) as bar:
        task = bar.add_task("training", total=1.0)
        data = measure(
            Path(config.train),
            Path(config.test),
            mechanisms=config.mechanisms,
            encoders=config.encoders,
            seeds=config.seeds,
            settings=settings,
            reference=config.reference,
            directory=directory,
            progress=lambda share: bar.update(task, completed=share),
        )
    for table in tables(data):
        write_table(directory, table)
        console.print(markdown(table), soft_wrap=True, highlight=False, markup=False)
    console.print(str(directory), soft_wrap=True, highlight=False, markup=False)


def prepare(config: PrepareXmcConfig) -> None:
    """Write train.txt and test.txt made from WordNet and say what is in them."""
    directory, console = Path(config.directory), Console()
    sides = make_documents(
        read_synsets(Path(config.source)),
        least_feature_documents=config.least_feature_documents,
        least_label_documents=config.least_label_documents,
        most_label_share=config.most_label_share,
    )
    directory.mkdir(parents=True, exist_ok=True)
    for name, documents in zip(("train.txt", "test.txt"), sides, strict=True):
        write_documents(directory / name, documents)
        told = (
            f"{len(documents):,} documents, {documents.feature_count:,} features, "
            f"{documents.label_count:,} labels, "
            f"{len(documents.labels.values) / max(1, len(documents)):.1f} labels a document"
        )
        console.print(f"{directory / name}: {told}", soft_wrap=True, highlight=False, markup=False)
