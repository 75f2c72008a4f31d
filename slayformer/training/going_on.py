"""Whether a run can go on from a checkpoint, and what it has changed since."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slayformer.config import TrainConfig
from slayformer.config_loading import dotted, to_plain
from slayformer.data.prepare import PreparedData
from slayformer.data.tokenizer import vocabulary_size
from slayformer.errors import CheckpointError
from slayformer.training.budget import Plan, make_plan
from slayformer.training.checkpoint import OPTIMIZER, read_config, read_state


def check_fits(path: Path, config: TrainConfig, plan: Plan, data: PreparedData) -> None:
    """Raise CheckpointError unless a run of `config` can go on from checkpoint `path`.

    Model, mechanism, tokenizer, seed and `data` must be as they were, and `plan` must have seen as
    many samples at that update. World size and ZeRO stage may be others.
    """
    state, started = read_state(path), read_config(path)
    saved, asked = to_plain(started), to_plain(config)
    if not (path / OPTIMIZER).is_file():
        raise CheckpointError(
            f"{path} has no {OPTIMIZER}: an earlier version wrote it; its weights can still be used"
        )
    for field in ("model", "attention", "tokenizer", "seed"):
        before, now = (dotted({field: plain[field]}) for plain in (saved, asked))
        if before.get(f"{field}.name") != now.get(f"{field}.name"):
            # options of two mechanisms cannot be set against each other
            before, now = ({field: options[f"{field}.name"]} for options in (before, now))
        changed = [key for key in before | now if before.get(key) != now.get(key)]
        for key in changed:
            # the same mechanism by another engine goes on
            if key != "attention.backend":
                given = f"{key}={before.get(key)}"
                raise CheckpointError(
                    f"{path} was saved with {given}, which is not {now.get(key)}; to go on give "
                    f"the run's own options, or none beside run_directory and resume=auto"
                )
    if asked["initial_weights"] not in (None, saved["initial_weights"]):
        raise CheckpointError(
            f"{path} started from initial_weights={saved['initial_weights']}, which is not "
            f"{asked['initial_weights']}; leave it out to go on"
        )
    if state["tokenizer"] != data.tokenizer.identity:
        name = data.tokenizer.name
        raise CheckpointError(f"{path} was saved with a {name} tokenizer of other text")
    # earlier versions did not save it
    if state.get("data_identity", data.identity) != data.identity:
        raise CheckpointError(
            f"{path} was trained on other text ({state['data']}, now {data.directory.name}): its "
            f"data options were others, or the text has been edited; to go on with new text start "
            f"another run with initial_weights={path}"
        )
    update, samples = state["update"], state["samples"]
    if update > plan.updates or plan.samples_at(update) != samples:
        raise CheckpointError(
            f"{path} has seen {samples:,} samples in {update:,} updates, which the plan of this "
            f"batch and budget ({plan.samples:,} samples in {plan.updates:,} updates) never does"
            f"{_why_never(path, started, state, config, plan)}"
        )


def _why_never(
    path: Path, started: TrainConfig, state: dict[str, Any], config: TrainConfig, plan: Plan
) -> str:
    """Return why `plan` cannot go on from checkpoint `path`, if not only for its options."""
    world_size = state["world_size"]
    before = make_plan(started, vocabulary_size(started.tokenizer), world_size)
    if before.ends_partially and state["update"] == before.updates:
        return (
            f"; its last update was smaller than the others, so none can follow: start another run "
            f"with initial_weights={path}"
        )
    if config.batch.samples_per_device is not None and world_size != plan.world_size:
        return (
            f"; batch.samples_per_device scales with the processes, {world_size} then and "
            f"{plan.world_size} now"
        )
    return ""


def changes_so_far(path: Path, config: TrainConfig) -> list[str]:
    """Return what a run has changed since it began, up to going on from checkpoint `path`."""
    state = read_state(path)
    now = [f"{c} after update {state['update']:,}" for c in changed_settings(path, config)]
    return [*state.get("changed_settings", []), *now]


def changed_settings(path: Path, config: TrainConfig) -> list[str]:
    """Return `field before -> now` for what `config` has changed since checkpoint `path`."""
    before, now = dotted(to_plain(read_config(path))), dotted(to_plain(config))
    ignored = {"run_directory", "resume", "dry_run", "initial_weights"}
    return [
        f"{field} {before.get(field)} -> {now.get(field)}"
        for field in sorted(before.keys() | now.keys())
        if field not in ignored and before.get(field) != now.get(field)
    ]
