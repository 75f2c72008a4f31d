"""What a benchmark found as files: a JSON record that can be read again, and a table as CSV."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

from slayformer.errors import ConfigError

Found = TypeVar("Found")


def read_record(path: Path, from_plain: Callable[[dict[str, Any]], Found]) -> Found:
    """Return what an earlier run wrote to `path`; raises ConfigError if that is not there."""
    try:
        return from_plain(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        hint = f"cannot be read ({error.strerror}); name the folder of an earlier run"
        raise ConfigError("redraw", path, hint) from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError("redraw", path, "is not a record of this command") from error


def write_record(path: Path, plain: dict[str, Any]) -> None:
    """Write a record that `read_record` reads."""
    path.write_text(json.dumps(plain, indent=2) + "\n", encoding="utf-8")


def write_csv(path: Path, kind: type[Any], cells: Sequence[Any]) -> None:
    """Write instances of the dataclass `kind`, a row each."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [item.name for item in fields(kind)])
        writer.writeheader()
        writer.writerows(asdict(cell) for cell in cells)
