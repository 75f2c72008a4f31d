"""Results of a comparison of language models in one small file, to be kept and handed on.

JSON: `format`, `name`, what every run had in common (`setting`, `unigram_loss`, `scored_tokens`),
what made them unlike (`unequal`, empty if fair), and a record a run: `mechanism`, `seed`, `loss`
(nats/token of the last validation), `bits_per_byte`, `parameters`, `training_tokens`, `curve`
([training tokens, validation loss] pairs) and `environment` (versions, device, git revision).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slayformer.config_differences import differing_keys
from slayformer.errors import UserError
from slayformer.evaluation.fairness import find_differences
from slayformer.evaluation.runs import Run, find_runs, named_apart

FORMAT = "slayformer language models 1"
# of this project's own comparisons, one file each
KEPT = Path(__file__).parent / "results"
KEYS = ("name", "setting", "unigram_loss", "scored_tokens", "unequal", "runs")
RUN_KEYS = ("mechanism", "seed", "loss", "bits_per_byte", "parameters", "training_tokens", "curve")
# what tells one experiment from another; paths of a machine are left out
SETTING = (
    *("model.", "optimizer.", "schedule.", "batch.", "budget.", "tokenizer.", "validation."),
    *("data.source.", "data.validation_source.", "engine.zero_stage", "engine.precision"),
)
ENVIRONMENT = ("slayformer", "git_revision", "python", "device", "threads", "packages")


def read_results(path: Path) -> dict[str, Any]:
    """Return the results in the file `path`, or of the finished runs in the folder `path`.

    Raises UserError for what is neither.
    """
    if path.is_dir():
        return collect(path)
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        lacking = [key for key in KEYS if key not in results]
        lacking += [key for run in results["runs"] for key in RUN_KEYS if key not in run]
        if results["format"] != FORMAT or lacking or not results["runs"]:
            told = f"lacks {lacking[0]}" if lacking else f"is not of the format {FORMAT!r}"
            raise UserError(f"{path}: {told}")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not a results file: {error!r}") from error
    return dict(results)


def collect(folder: Path) -> dict[str, Any]:
    """Return the results of the finished language models in `folder`, such as a comparison."""
    found = find_runs([folder]).runs
    if not found:
        raise UserError(f"{folder}: no run in it has finished")
    return results_of(folder.resolve().name, found)


def results_of(name: str, found: Sequence[Run]) -> dict[str, Any]:
    """Return the results of runs; mechanisms with unlike options are told apart by them."""
    runs = sorted(named_apart(found), key=lambda run: (run.mechanism, run.seed))
    configs = [run.config for run in runs]
    apart = {*differing_keys(configs)}
    setting = {
        key: value
        for key, value in configs[0].items()
        if key.startswith(SETTING) and key not in apart
    }
    return {
        "format": FORMAT,
        "name": name,
        "setting": setting,
        "unigram_loss": runs[0].summary["unigram_loss"],
        "scored_tokens": runs[0].scored_tokens,
        "unequal": sorted({str(difference) for difference in find_differences(runs)}),
        "runs": [_record(run) for run in runs],
    }


def _record(run: Run) -> dict[str, Any]:
    summary = run.summary
    return {
        "mechanism": run.mechanism,
        "seed": run.seed,
        "loss": summary["validation_loss"],
        "bits_per_byte": summary["bits_per_byte"],
        "parameters": summary["parameters"],
        "training_tokens": summary["tokens"],
        "curve": run.curve("validation"),
        "environment": {k: v for k, v in run.environment.items() if k in ENVIRONMENT},
    }
