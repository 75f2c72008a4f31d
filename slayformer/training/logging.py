"""What a run tells while it works: metrics.jsonl, a live line or plain ones, trackers if asked.

Only rank 0 has a RunLog. metrics.jsonl is the truth.
"""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from slayformer.config import LoggingConfig, TrainConfig
from slayformer.config_loading import to_plain
from slayformer.data.shards import write_atomically
from slayformer.errors import UserError
from slayformer.finite import strict_json, with_nan
from slayformer.training.budget import Plan
from slayformer.training.going_on import changed_settings
from slayformer.training.inputs import Inputs
from slayformer.training.meters import PARTS
from slayformer.training.plan_table import print_plan
from slayformer.training.run_directory import RunStart, write_json
from slayformer.training.trackers import TensorBoard, Tracker, Wandb

METRICS_FILE = "metrics.jsonl"


def read_records(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Return the lines of a metrics file with the record in each, NaN where that has null.

    A line that a killed run left half-written is no record. Raises OSError without such a file.
    """
    found = []
    # what is cut off may end within a character
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict) and {"kind", "update"} <= record.keys():
                found.append((line, with_nan(record)))
    return found


def read_metrics(path: Path, *, up_to_update: int, last_update: int) -> list[str]:
    """Return the lines of a metrics file that a run resumed after `up_to_update` goes on from.

    The validation after the `last_update` of the plan is done again. Earlier versions wrote NaN.
    """
    return [
        json.dumps(strict_json(json.loads(line))) if "NaN" in line or "Infinity" in line else line
        for line, record in (read_records(path) if path.exists() else [])
        if record["update"] <= up_to_update
        and (record["kind"], record["update"]) != ("validation", last_update)
    ]


class RunLog:
    """Writes the records of a run: use it as a context, then call `train` and `validation`.

    `earlier` are the lines of metrics.jsonl that a resumed run goes on from; the file is cut to
    them. `wandb_id` is the run they went to, `settings` the configuration shown there.
    """

    def __init__(
        self,
        run_directory: Path,
        plan: Plan,
        config: LoggingConfig,
        *,
        earlier: list[str],
        settings: dict[str, Any],
        wandb_id: str | None,
        console: Console,
    ) -> None:
        path = run_directory / METRICS_FILE
        write_atomically(path, [f"{line}\n".encode() for line in earlier])
        self._file = path.open("a", encoding="utf-8")
        self._plan, self._every_updates = plan, config.every_updates
        self._wandb: Wandb | None = None
        self._trackers: list[Tracker] = []
        if config.wandb != "disabled":
            self._wandb = Wandb(run_directory, config, settings, wandb_id, console)
            self._trackers.append(self._wandb)
        if config.tensorboard:
            first_update = json.loads(earlier[-1])["update"] + 1 if earlier else 0
            self._trackers.append(TensorBoard(run_directory, first_update, console))
        self.console = console
        self._progress = Progress(
            TextColumn("update {task.completed:,}/{task.total:,}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[told]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task: TaskID = self._progress.add_task("", total=plan.updates, told="")

    def __enter__(self) -> RunLog:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()
        self._file.close()
        for tracker in self._trackers:
            tracker.finish()

    @property
    def wandb_id(self) -> str | None:
        """The wandb run these records go to, None without one."""
        return self._wandb.id if self._wandb is not None else None

    def train(self, record: dict[str, Any], *, warm_tokens_per_second: float | None) -> None:
        """Write the record of an update, and tell it in the live line or every so many updates.

        How long the rest takes follows from `warm_tokens_per_second`, and is not told without.
        """
        self._write({"kind": "train", **record})
        update, left = record["update"], self._plan.tokens - record["tokens"]
        told = (
            f"loss {record['loss']:.4f} nats/token  {record['tokens_per_second']:,.0f} tokens/s  "
            f"learning rate {record['learning_rate']:.2e}"
        )
        if warm_tokens_per_second is not None:
            told += f"  left {timedelta(seconds=round(max(left, 0) / warm_tokens_per_second))}"
        self._progress.update(self._task, completed=update, told=told)
        due = update % self._every_updates == 0 or update in (1, self._plan.updates)
        if due and not self.console.is_terminal:
            self.say(f"update {update:,}/{self._plan.updates:,}  {told}")

    def validation(self, record: dict[str, Any]) -> None:
        """Write and tell the record of a validation."""
        self._write({"kind": "validation", **record})
        self.say(
            f"validation after update {record['update']:,}: loss {record['loss']:.4f} nats/token, "
            f"perplexity {record['perplexity']:,.2f}, {record['bits_per_byte']:.4f} bits/byte, "
            f"{record['scored_tokens']:,} tokens"
        )

    def summary(self, summary: dict[str, Any], *, sample: str | None, checkpoint: Path) -> None:
        """Write summary.json and tell how the run ended."""
        directory = Path(self._file.name).parent
        write_json(directory / "summary.json", summary)
        if sample is not None:
            self.say(f"\nsample:\n{sample}\n")
        unigram, peak = summary["unigram_loss"], summary["peak_memory_bytes"] / 2**20
        self.say(f"validation loss        {summary['validation_loss']:.4f} nats/token")
        self.say(f"unigram cross entropy  {unigram:.4f} nats/token (ignoring all context)")
        self.say(f"speed                  {summary['tokens_per_second']:,.0f} tokens/s")
        milliseconds = summary["milliseconds_per_update"]
        parts = ", ".join(
            f"{part.replace('_', ' and ')} {milliseconds[part]:,.1f}" for part in PARTS
        )
        self.say(f"ms per update          {sum(milliseconds.values()):,.0f}: {parts}")
        if summary["mfu"] is not None:
            self.say(f"model FLOPs            {100 * summary['mfu']:.1f} % of the devices' peak")
        self.say(f"peak memory            {peak:,.0f} MiB per device")
        self.say(f"run directory          {directory}")
        self.say(f"checkpoint             {checkpoint}")

    def say(self, line: str) -> None:
        """Print one line as it is, above the live line."""
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _write(self, record: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps(strict_json(record)) + "\n")
            self._file.flush()
        except OSError as error:
            raise UserError(f"{self._file.name} cannot be written: {error}") from error
        for tracker in self._trackers:
            tracker.log(record)


def open_log(
    config: TrainConfig, plan: Plan, inputs: Inputs, start: RunStart, state: dict[str, Any]
) -> RunLog:
    """Print what the run will do, and return its log."""
    console = Console()
    update = state.get("update", 0)
    earlier: list[str] = []
    if start.metrics_from is not None:
        metrics = start.metrics_from / METRICS_FILE
        earlier = read_metrics(metrics, up_to_update=update, last_update=plan.updates)
    log = RunLog(
        start.directory,
        plan,
        config.logging,
        earlier=earlier,
        settings=to_plain(config),
        wandb_id=None if start.is_branch else state.get("wandb_id"),
        console=console,
    )
    print_plan(console, plan, config, inputs.data.tokenizer.vocabulary_size)
    epochs = plan.samples / inputs.train.windows
    log.say(
        f"data: {len(inputs.data.train):,} training tokens ({epochs:.2f} epochs), "
        f"{inputs.windows:,} validation windows of {plan.context_length:,} tokens"
    )
    log.say(f"run directory: {start.directory}")
    for warning in start.warnings:
        log.say(f"warning: {warning}")
    if start.checkpoint is not None:
        log.say(f"going on after update {update:,} from {start.checkpoint}")
        for change in changed_settings(start.checkpoint, config):
            log.say(f"changed since then: {change}")
    elif config.resume == "auto":
        log.say("no checkpoint there yet: starting anew")
    return log
