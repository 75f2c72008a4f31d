"""From a configuration to a finished run: what is checked first, and what ends a run early."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from slayformer.attention.context_parallel import check_context_parallel
from slayformer.config import TrainConfig
from slayformer.config_checks import BUDGET_OPTIONS
from slayformer.data.corpus import check_source_paths
from slayformer.data.tokenizer import vocabulary_size
from slayformer.errors import ConfigError, DataError, UserError
from slayformer.training import checkpoint, distributed
from slayformer.training.budget import Plan, make_plan
from slayformer.training.engine import check_engine
from slayformer.training.initial_weights import (
    InitialWeights,
    check_tokenizer,
    find_initial_weights,
    recorded_path,
)
from slayformer.training.inputs import Inputs, open_inputs
from slayformer.training.interruption import resume_command
from slayformer.training.loop import Training
from slayformer.training.plan_table import print_plan
from slayformer.training.run_directory import RunStart, start_run, with_absolute_paths
from slayformer.training.run_lock import RunLock
from slayformer.training.schedule import check_schedule
from slayformer.training.trackers import check_trackers
from slayformer.training.watch import watched


def run(config: TrainConfig) -> Path | None:
    """Train as `config` says and return the run directory; None after a dry run.

    A run to resume that is finished is left as it is.
    SIGINT, SIGTERM or SIGUSR1 on any rank ends it after the update under way, with a checkpoint.
    Raises UserError for whatever the user can mend.
    """
    config = with_absolute_paths(config)
    # asked for together; a branch has both on record
    if config.initial_weights is not None and config.resume not in (None, "auto"):
        hint = f"resume={config.resume} goes on with weights of its own; leave one of them out"
        raise ConfigError("initial_weights", config.initial_weights, hint)
    vocabulary = vocabulary_size(config.tokenizer)
    check_context_parallel(config.model, config.attention, config.engine.context_parallel)
    if config.dry_run:
        find_initial_weights(config, vocabulary)
        plan = make_plan(config, vocabulary, distributed.planned_world_size())
        check_schedule(config.schedule, plan.updates, plan.tokens_at)
        if os.environ.get("RANK", "0") == "0":
            note = "" if "WORLD_SIZE" in os.environ else " (WORLD_SIZE is not set: planned for one)"
            print_plan(Console(), plan, config, vocabulary, note)
            try:
                check_source_paths(config.data)
            except (DataError, OSError) as error:
                # a plan may be made elsewhere
                print(f"note: on this machine the run would end with: {error}")
        return None
    distributed.initialize(config.engine.timeout_seconds)
    check_engine(config.engine, distributed.device())
    check_trackers(config.logging)
    plan = make_plan(config, vocabulary, distributed.world_size())
    check_schedule(config.schedule, plan.updates, plan.tokens_at)
    weights = distributed.run_on_main(lambda: find_initial_weights(config, vocabulary))
    inputs = open_inputs(config)
    lock = RunLock()
    try:
        start = distributed.run_on_main(lambda: _start(config, plan, inputs, weights, lock))
        if start.finished:
            _say_finished(config, plan, start)
        else:
            _train(config, plan, inputs, start, weights)
    finally:
        lock.release()
    return start.directory


def _say_finished(config: TrainConfig, plan: Plan, start: RunStart) -> None:
    if not distributed.is_main():
        return
    done = f"finished: all {plan.updates:,} updates of {start.directory} are done; "
    if plan.ends_partially:
        done += (
            f"the last was smaller than the others, so none can follow: to train further start "
            f"another run with initial_weights={start.directory}"
        )
    else:
        done += _larger_budget(config)
    Console().print(done, markup=False, highlight=False, soft_wrap=True)


def _larger_budget(config: TrainConfig) -> str:
    asked = {name: getattr(config.budget, name) for name in BUDGET_OPTIONS}
    name, amount = next((name, amount) for name, amount in asked.items() if amount is not None)
    return (
        f"to train further give a larger budget than budget.{name}={amount} too, for example "
        f"budget.{name}={2 * amount}"
    )


def _train(
    config: TrainConfig,
    plan: Plan,
    inputs: Inputs,
    start: RunStart,
    weights: InitialWeights | None,
) -> None:
    # what the run started from stays on record however it goes on
    origin = checkpoint.read_config(start.checkpoint).initial_weights if start.checkpoint else None
    config = replace(config, initial_weights=origin or recorded_path(config))
    if start.is_branch:
        # killed before its first checkpoint it sets out from there again
        config = replace(config, resume=str(start.checkpoint))
    advice = f"go on from the newest checkpoint with: {resume_command(start.directory)}"
    with distributed.shared_sequences(plan.context_parallel):
        try:
            training = Training(config, plan, inputs, start, weights)
            with training.log or nullcontext(), watched(config.engine.timeout_seconds, advice):
                training.run()
            # not after an exception: it waits for the device, and the device for other ranks
            training.engine.close()
        except RuntimeError as error:
            if distributed.lost_another(error):
                what = "another process of this run has died, and its own output says why"
            elif distributed.timed_out(error):
                what = "the processes are alive but no longer reach one another (network?)"
            else:
                raise
            raise UserError(f"{what}; {advice}") from error


def _start(
    config: TrainConfig,
    plan: Plan,
    inputs: Inputs,
    weights: InitialWeights | None,
    lock: RunLock,
) -> RunStart:
    warning = None if weights is None else check_tokenizer(weights, inputs.data.tokenizer)
    start = start_run(config, plan, inputs.data, lock)
    return replace(start, warnings=(*start.warnings, *([warning] if warning else [])))
