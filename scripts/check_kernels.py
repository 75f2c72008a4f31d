"""Compile the Triton kernels ahead, for GPUs that need not be there, and check what they take.

For every kernel that a training step or a decoded token starts a line tells its registers a thread,
bytes spilled to memory, shared memory and tensor-core instructions. The exit code is 1 if any
spills or takes more shared memory than a block can have.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys

from rich.console import Console
from rich.table import Table

from slayformer.cli import entry_point
from slayformer.errors import UserError

ARCHITECTURES = (80, 90, 100)


def read_arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--architectures",
        nargs="+",
        type=int,
        choices=ARCHITECTURES,
        default=list(ARCHITECTURES),
        help="compute capabilities without the dot (default: all)",
    )
    parser.add_argument(
        "--mechanisms",
        nargs="+",
        default=["slay", "slay_best"],
        metavar="NAME",
        help="linear mechanisms of configs/attention (default: slay slay_best)",
    )
    parser.add_argument(
        "--dtypes",
        nargs="+",
        choices=("bf16", "fp16", "fp32"),
        default=["bf16"],
        help="dtypes of q, k and v (default: bf16)",
    )
    parser.add_argument(
        "--widths",
        nargs="+",
        type=int,
        default=[32, 64, 128],
        metavar="D",
        help="widths of a head (default: 32 64 128)",
    )
    return parser.parse_args()


def main() -> None:
    """Check what the command line asks for; the exit code is 1 if a kernel does not fit."""
    options = read_arguments()
    if importlib.util.find_spec("triton") is None:
        raise UserError("the package triton is not installed: pip install triton")
    from slayformer.attention.backends.triton_ahead import (
        Found,
        Start,
        compile_start,
        recorded_starts,
    )
    from slayformer.evaluation.progress import progress_bar

    cases = [
        (start, f"{mechanism} {dtype} {width}", architecture)
        for mechanism in options.mechanisms
        for dtype in options.dtypes
        for width in options.widths
        for architecture in options.architectures
        for start in recorded_starts(mechanism, dtype, width, architecture)
    ]
    columns = ["heads", "kernel", "for", "registers", "spilled B", "shared KB", "tensor-core"]
    table = Table(*columns, title="Kernels; tensor-core: instructions")
    known: dict[tuple[Start, int], Found] = {}
    failed = 0
    with progress_bar() as bar:
        for start, heads, architecture in bar.track(cases, description="compiling"):
            if (start, architecture) not in known:
                known[start, architecture] = compile_start(start, architecture)
            found = known[start, architecture]
            failed += not found.fits(architecture)
            shared = f"{found.shared_bytes / 1024:.1f}"
            row = [found.registers, found.spilled_bytes, shared, found.tensor_core]
            style = None if found.fits(architecture) else "red"
            place = f"sm_{architecture}"
            table.add_row(heads, start.title(), place, *map(str, row), style=style)
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    if failed:
        print(f"{failed} of {len(cases)} kernels spill or need too much shared memory")
        sys.exit(1)
    print(f"all {len(cases)} kernels run without spills")


if __name__ == "__main__":
    entry_point(main)
