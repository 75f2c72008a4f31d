"""wandb and TensorBoard: they repeat what metrics.jsonl holds, and may fail without harm.

Heavy packages are imported here alone, and only where they are asked for.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from rich.console import Console

from slayformer.config import LoggingConfig
from slayformer.errors import ConfigError

TENSORBOARD_FOLDER = "tensorboard"


def check_trackers(config: LoggingConfig) -> None:
    """Raise ConfigError if TensorBoard is asked for and its package is missing."""
    if config.tensorboard and importlib.util.find_spec("tensorboard") is None:
        hint = "the package is missing: pip install tensorboard"
        raise ConfigError("logging.tensorboard", True, hint)


class Tracker:
    """Where records go besides metrics.jsonl. Its first failure is told once and ends it."""

    name = ""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._working = True

    def log(self, record: dict[str, Any]) -> None:
        """Send a record on."""
        if self._working:
            try:
                self._log(record)
            except Exception as error:
                self._give_up(error)

    def finish(self) -> None:
        """Write what is left."""
        if self._working:
            try:
                self._finish()
            except Exception as error:
                self._give_up(error)

    def _log(self, record: dict[str, Any]) -> None:
        raise NotImplementedError

    def _finish(self) -> None:
        raise NotImplementedError

    def _give_up(self, error: Exception) -> None:
        self._working = False
        self._console.print(
            f"warning: {self.name} failed ({error}); training goes on, metrics.jsonl has "
            f"everything",
            markup=False,
            soft_wrap=True,
        )


class Wandb(Tracker):
    """A wandb run, `id`; a resumed run goes on with `run_id`."""

    name = "wandb"

    def __init__(
        self,
        run_directory: Path,
        config: LoggingConfig,
        settings: dict[str, Any],
        run_id: str | None,
        console: Console,
    ) -> None:
        super().__init__(console)
        self.id: str | None = run_id
        try:
            import wandb

            self._run = wandb.init(
                project=config.wandb_project,
                name=run_directory.name,
                dir=str(run_directory),
                mode=config.wandb,  # type: ignore[arg-type]
                config=settings,
                id=run_id,
                resume="allow",
            )
            self.id = self._run.id
        except Exception as error:
            self._give_up(error)

    def _log(self, record: dict[str, Any]) -> None:
        values = {f"{record['kind']}/{key}": value for key, value in record.items()}
        # no step of wandb's: offline it begins anew on resume
        self._run.log({**values, "update": record["update"], "tokens": record["tokens"]})

    def _finish(self) -> None:
        self._run.finish()


class TensorBoard(Tracker):
    """Event files in the run directory; what is there from `first_update` on is void."""

    name = "tensorboard"

    def __init__(self, run_directory: Path, first_update: int, console: Console) -> None:
        super().__init__(console)
        try:
            from torch.utils.tensorboard import SummaryWriter

            folder = str(run_directory / TENSORBOARD_FOLDER)
            self._writer = SummaryWriter(folder, purge_step=first_update)
        except Exception as error:
            self._give_up(error)

    def _log(self, record: dict[str, Any]) -> None:
        for key, value in record.items():
            if isinstance(value, int | float) and key != "update":
                self._writer.add_scalar(f"{record['kind']}/{key}", value, record["update"])

    def _finish(self) -> None:
        self._writer.close()
