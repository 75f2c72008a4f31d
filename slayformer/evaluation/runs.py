"""What runs left behind: found in folders, read, and named apart."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from slayformer.config_differences import INCIDENTAL, differing_keys
from slayformer.config_loading import dotted, to_plain
from slayformer.errors import UserError
from slayformer.evaluation.document_losses import DocumentLosses, read_document_losses

# training losses of single updates are noisy: a curve shows at most this many means of them
CURVE_POINTS = 150
# what has columns of its own in tables
NAMED = ("seed", "attention.name")
# where tokens are from, which says nothing where they are the same
ORIGIN = ("data.source.", "data.validation_source.", "data.parts")


@dataclass(frozen=True)
class Run:
    """What a finished run left behind in `folder`.

    `mechanism` names it in tables. `config` has dotted keys, and as `initial_weights` what they
    are rather than where; it and `environment` are empty, `data_identity` (of its text and split)
    and `documents` None, where the run kept none.
    """

    folder: Path
    mechanism: str
    seed: int
    summary: dict[str, Any]
    plan: dict[str, Any]
    metrics: list[dict[str, Any]]
    tokenizer_identity: str
    config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    documents: DocumentLosses | None = None
    data_identity: str | None = None

    def curve(self, kind: str) -> list[tuple[int, float]]:
        """Return (training tokens, loss in nats/token) of the `train` or `validation` records.

        The losses of many updates are averaged over neighbours, to at most CURVE_POINTS points.
        """
        records = [record for record in self.metrics if record["kind"] == kind]
        size = max(1, math.ceil(len(records) / CURVE_POINTS)) if kind == "train" else 1
        groups = [records[start : start + size] for start in range(0, len(records), size)]
        return [(g[-1]["tokens"], statistics.fmean(r["loss"] for r in g)) for g in groups]

    @property
    def scored_tokens(self) -> int | None:
        """Tokens of the last validation, None without one."""
        counts = [r["scored_tokens"] for r in self.metrics if r["kind"] == "validation"]
        return counts[-1] if counts else None


def is_finished(folder: Path) -> bool:
    """Return whether the run in `folder` reached its budget and wrote its summary."""
    try:
        return json.loads((folder / "summary.json").read_text(encoding="utf-8"))["finished"] is True
    except (OSError, ValueError, KeyError, TypeError):
        return False


def read_run(folder: Path) -> Run:
    """Return the finished run in `folder`; raises UserError if it is unfinished or unreadable."""
    from omegaconf import OmegaConf
    from yaml import YAMLError  # type: ignore[import-untyped]

    from slayformer.data.tokenizer import load_tokenizer
    from slayformer.training.checkpoint import find_checkpoint, read_state
    from slayformer.training.initial_weights import recorded_identity
    from slayformer.training.logging import METRICS_FILE, read_records

    if not is_finished(folder):
        raise UserError(f"{folder}: not a finished run (its summary.json does not say so)")
    try:
        summary, plan = (
            json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
            for name in ("summary", "plan")
        )
        # earlier versions wrote none
        surroundings = folder / "environment.json"
        environment = json.loads(surroundings.read_text()) if surroundings.exists() else {}
        config: Any = OmegaConf.to_container(OmegaConf.load(folder / "config.yaml"))
        lines = read_records(folder / METRICS_FILE)
        # a resumed run may have told the same update twice: the later line stands
        records = {(r["kind"], r["update"]): r for _, r in lines}
        # one model in two places is one beginning
        config["initial_weights"] = recorded_identity(folder) or config.get("initial_weights")
        summary["mechanism"], summary["seed"], plan["updates"]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, YAMLError) as error:
        told = " ".join(str(error).split())
        raise UserError(f"{folder}: unreadable run: {told or type(error).__name__}") from error
    newest = find_checkpoint(folder)
    metrics = sorted(records.values(), key=lambda record: record["update"])
    return Run(
        folder,
        summary["mechanism"],
        summary["seed"],
        summary,
        plan,
        metrics,
        load_tokenizer(newest / "tokenizer").identity,
        dotted(config),
        environment,
        read_document_losses(folder),
        # earlier versions did not save it
        read_state(newest).get("data_identity"),
    )


@dataclass(frozen=True)
class Recall:
    """A finished run of associative recall in `folder`; `config` has dotted keys."""

    folder: Path
    mechanism: str
    seed: int
    summary: dict[str, Any]
    config: dict[str, Any]


def read_recall(folder: Path) -> Recall:
    """Return the finished recall run in `folder`; UserError if unfinished or unreadable."""
    if not is_finished(folder):
        raise UserError(f"{folder}: not a finished run (its summary.json does not say so)")
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    try:
        parts = summary["mechanism"], summary["seed"], summary, dotted(summary["config"])
    except KeyError as error:
        raise UserError(f"{folder}: unreadable run: its summary.json lacks {error}") from error
    return Recall(folder, *parts)


AnyRun = TypeVar("AnyRun", Run, Recall)


@dataclass(frozen=True)
class Found:
    """Runs in folders: of language models and of recall, and the names of unfinished ones."""

    runs: list[Run]
    recalls: list[Recall]
    unfinished: list[str]


def find_runs(folders: Iterable[Path], *, required: bool = True) -> Found:
    """Return the runs in `folders`, each a run or a folder of runs such as a comparison.

    Raises UserError for a folder that is neither, if they are `required`.
    """
    found = Found([], [], [])
    homes: dict[Path, None] = {}
    for folder in folders:
        inside = [folder] if _holds_run(folder) else sorted(folder.glob("*/"))
        inside = [one for one in inside if _holds_run(one)]
        if required and not folder.exists():
            raise UserError(f"{folder}: there is no such folder")
        if required and not inside:
            hint = "a run directory, or a folder of them, has a plan.json or summary.json"
            raise UserError(f"{folder}: no run here; {hint}")
        homes |= dict.fromkeys(one.resolve() for one in inside)
    for home in homes:
        if not is_finished(home):
            found.unfinished.append(home.name)
        elif (home / "plan.json").exists():
            found.runs.append(read_run(home))
        else:
            found.recalls.append(read_recall(home))
    return found


def _holds_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("plan.json", "summary.json"))


def named_apart(runs: Sequence[AnyRun]) -> list[AnyRun]:
    """Return `runs` with options in their names: the mechanism's that are not those of its file.

    And others that tell runs of one mechanism apart. Raises UserError if two are the same
    mechanism, options and seed.
    """
    named = [replace(run, mechanism=_name(run, runs)) for run in runs]
    by_name: dict[tuple[str, int], AnyRun] = {}
    for run in named:
        other = by_name.setdefault((run.mechanism, run.seed), run)
        if other is not run:
            raise UserError(
                f"{other.folder} and {run.folder} are the same run twice "
                f"({run.mechanism}, seed {run.seed}): name one of them"
            )
    return named


def _name(run: Run | Recall, runs: Sequence[Run | Recall]) -> str:
    same = [other for other in runs if other.mechanism == run.mechanism]
    ignored: tuple[str, ...] = (*INCIDENTAL, *NAMED)
    texts = {one.data_identity for one in same if isinstance(one, Run)}
    if len(texts - {None}) == len(texts) == 1:
        ignored += ORIGIN
    keys = {*changed_options(run), *differing_keys([one.config for one in same], ignored)}
    told = [f"{k.removeprefix('attention.')}={v}" for k, v in run.config.items() if k in keys]
    return ", ".join([run.mechanism, *told])


def changed_options(run: Run | Recall) -> list[str]:
    """Return the keys of the mechanism's options that are not as in configs/attention.

    What computes it counts as none, and so does what only one of them has, being of another
    version. A mechanism without such a file has none.
    """
    from slayformer.presets import load_preset, preset_names

    name = own_mechanism(run)
    if name not in preset_names():
        return []
    preset = dotted({"attention": to_plain(load_preset(name))})
    return [
        key
        for key, value in attention_options(run).items()
        if key in preset and preset[key] != value
    ]


def own_mechanism(run: Run | Recall) -> str:
    """Return the mechanism of `run` without the options that may be in its name."""
    return run.config.get("attention.name", run.mechanism)


def attention_options(run: Run | Recall) -> dict[str, Any]:
    """Return the mechanism's options by their dotted key: what computes it is none."""
    unlike = ("attention.name", "attention.mechanism", "attention.backend")
    return {k: v for k, v in run.config.items() if k.startswith("attention.") and k not in unlike}
