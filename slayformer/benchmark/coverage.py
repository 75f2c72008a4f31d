"""Which engine computes which mechanism: `python -m slayformer.benchmark.coverage` prints it."""

from __future__ import annotations

import torch

from slayformer.attention.backends import BACKENDS
from slayformer.benchmark.contestants import Shape, load_mechanism
from slayformer.errors import ConfigError
from slayformer.presets import load_preset, preset_names
from slayformer.registry import attention_entry
from slayformer.tables import markdown_table


def covers(name: str, shape: Shape) -> tuple[bool, str]:
    """Return whether `shape.backend` computes mechanism `name`, and if not, why."""
    config = load_preset(name)
    entry = attention_entry(config.mechanism or config.name)
    if shape.backend not in entry.attention.backends:
        return False, "over explicit pairs"
    try:
        with torch.no_grad():
            load_mechanism(name, shape)(*shape.draw())
    except ConfigError as error:
        return False, error.hint.removeprefix("cannot be used: ")
    return True, ""


def coverage_table(device: torch.device) -> str:
    """Return a Markdown table of every mechanism and every engine, tried on `device`."""
    rows = []
    for name in preset_names():
        cells = []
        for backend in BACKENDS:
            shape = Shape(1, 2, 32, 70, torch.float32, device, backend)
            can, why = covers(name, shape)
            cells.append("yes" if can else why)
        rows.append([f"`{name}`", *cells])
    columns = ["mechanism", *BACKENDS]
    return "\n".join(markdown_table(columns, rows, words=len(columns)))


if __name__ == "__main__":
    print(coverage_table(torch.device("cuda" if torch.cuda.is_available() else "cpu")))
