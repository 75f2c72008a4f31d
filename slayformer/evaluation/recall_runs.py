"""Recall runs beside those of language models: which belong together, and what they came to."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from slayformer.config_differences import differing_keys, value_of
from slayformer.errors import UserError
from slayformer.evaluation.runs import (
    NAMED,
    Recall,
    Run,
    attention_options,
    named_apart,
    own_mechanism,
)


def is_recall_of(run: Run, recall: Recall) -> bool:
    """Return whether `recall` is of the mechanism of `run` with the options it has there."""
    if own_mechanism(run) != own_mechanism(recall):
        return False
    here, there = attention_options(run), attention_options(recall)
    # a key that one lacks is an option its version did not have
    return all(here[key] == there[key] for key in here.keys() & there.keys())


def check_recalls(recalls: Sequence[Recall]) -> list[Recall]:
    """Return `recalls` with options in their names, as `named_apart` gives them.

    Raises UserError if they differ in more than mechanism and seed, or two in nothing.
    """
    for recall in recalls:
        for key in differing_keys([recalls[0].config, recall.config]):
            if not key.startswith(("attention.", *NAMED)):
                ours, theirs = value_of(recall.config, key), value_of(recalls[0].config, key)
                raise UserError(
                    f"{recall.folder} and {recalls[0].folder} are no recall of one kind: their "
                    f"{key} differ ({ours} and {theirs}); leave one of them out"
                )
    return named_apart(recalls)


def mean_recall(recalls: Sequence[Recall]) -> dict[str, float]:
    """Return the share of values recalled by number of pairs, the mean over seeds."""
    by_seed = [recall.summary["accuracy"] for recall in recalls]
    return {p: statistics.fmean(one[p] for one in by_seed) for p in (by_seed or [{}])[0]}


def recall_statement(recalls: Sequence[Recall]) -> str:
    """Return what the recall runs were."""
    summary, seeds = recalls[0].summary, sorted({recall.seed for recall in recalls})
    model = summary["config"]["model"]
    return (
        f"Recall: {model['layers']} layers of width {model['width']} with a short convolution of "
        f"{model['short_convolution']}, {summary['updates']:,} updates, seeds "
        f"{', '.join(map(str, seeds))}; chance {100 * summary['chance']:.1f} %."
    )


def unmatched_statement(recalls: Sequence[Recall], runs: Sequence[Run]) -> list[str]:
    """Return a sentence that names the recall runs whose options none of `runs` has, if any."""
    alone = [recall for recall in recalls if not any(is_recall_of(run, recall) for run in runs)]
    names = ", ".join(dict.fromkeys(recall.mechanism for recall in alone))
    return [f"Recall runs of {names} belong to no row: none has their options."] if alone else []
