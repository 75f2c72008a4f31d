"""Compile the Triton kernels ahead, for GPUs that need not be there, and check what they take.

Forward and backward passes run on tiny CPU tensors with every kernel's start replaced by a note of
its arguments, so what is compiled is what training would run. For every kernel a line tells its
registers a thread, bytes spilled to memory, shared memory and tensor-core instructions. The exit
code is 1 if any kernel spills or takes more shared memory than a block can have.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from slayformer.attention import backends
from slayformer.presets import make_attention

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# shared memory of a block, bytes (CUDA C++ Programming Guide, technical specifications)
MOST_SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
TENSOR_CORE = ("HGMMA", "HMMA", "UTCHMMA", "UTCQMMA")


@dataclass(frozen=True)
class Start:
    """One start of a kernel: types of its arguments, values of its constants."""

    kernel: Any
    types: tuple[tuple[str, str], ...]
    divisible_by_16: tuple[str, ...]
    constants: tuple[tuple[str, Any], ...]
    warps: int


@dataclass(frozen=True)
class Found:
    """What a compiled kernel takes."""

    registers: int
    spilled_bytes: int
    shared_bytes: int
    tensor_core: int


def recorded_starts(mechanism: str, dtype: torch.dtype, width: int) -> list[Start]:
    """Return the starts of a training step's passes for heads of this width, each kind once."""
    from slayformer.attention.backends import triton_walk

    starts: dict[Start, None] = {}

    def note(
        kernel: Any,
        grid: tuple[int, ...],
        arguments: dict[str, Any],
        constants: dict[str, Any],
        warps: int,
    ) -> None:
        starts[_start(kernel, arguments, constants, warps)] = None

    kept_launch, kept_backend = triton_walk.launch, backends.BACKENDS["triton"]
    triton_walk.launch = note
    backends.BACKENDS["triton"] = dataclasses.replace(kept_backend, obstacle=lambda q, v: None)
    try:
        attention = make_attention(
            mechanism, num_heads=2, head_dim=width, max_sequence_length=1024, backend="triton"
        )
        shape = (1, 1024, 2, width)
        q, k, v = (
            torch.randn(shape, dtype=dtype).transpose(1, 2).requires_grad_() for _ in range(3)
        )
        # nothing has been computed: the gradients have shapes, but no values
        attention(q, k, v)[0].sum().backward()
    finally:
        triton_walk.launch = kept_launch
        backends.BACKENDS["triton"] = kept_backend
    return list(starts)


def _start(
    kernel: Any, arguments: dict[str, Any], constants: dict[str, Any], warps: int
) -> Start:
    """Return a start as triton would specialise it: what is divisible by 16 is taken to be so."""
    from triton.runtime.jit import mangle_type

    types, divisible = {}, []
    free = set(kernel.do_not_specialize or ())
    for name, value in arguments.items():
        types[name] = mangle_type(value)
        whole = value.data_ptr() if isinstance(value, torch.Tensor) else value
        if name not in free and whole % 16 == 0:
            divisible.append(name)
    return Start(
        kernel, tuple(types.items()), tuple(divisible), tuple(constants.items()), warps
    )


def compile_start(start: Start, architecture: int) -> Found:
    """Compile a kernel for one architecture and return what it takes."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = start.kernel.arg_names
    types = dict(start.types)
    source = ASTSource(
        fn=start.kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs=dict(start.constants),
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in start.divisible_by_16},
    )
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", architecture, 32),
        options={"num_warps": start.warps, "num_stages": 1},
    )
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as folder:
        text, binary = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        text.write_text(compiled.asm["ptx"])
        binary.write_bytes(compiled.asm["cubin"])
        assembler = tools / ("ptxas-blackwell" if architecture >= 100 else "ptxas")
        target = f"sm_{architecture}{'a' if architecture >= 90 else ''}"
        usage = _output([assembler, "-v", "--gpu-name", target, text, "-o", f"{binary}.again"])
        code = _output([tools / "nvdisasm", "-c", binary])
    found = [re.search(rf"{p}", usage) for p in (r"Used (\d+) reg", r"(\d+) bytes spill stores")]
    if None in found:
        raise SystemExit(f"error: ptxas told no registers and spills: {usage}")
    registers, spilled = (int(match[1]) for match in found if match)
    return Found(
        registers=registers,
        spilled_bytes=spilled,
        shared_bytes=compiled.metadata.shared,
        tensor_core=sum(len(re.findall(rf"\b{name}\b", code)) for name in TENSOR_CORE),
    )


def _output(command: list[Any]) -> str:
    """Return what a tool of the toolchain says, or end with what it complains of."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"error: {Path(command[0]).name}: {done.stderr.strip()}")
    return done.stdout + done.stderr


def read_arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--architectures",
        nargs="+",
        type=int,
        choices=MOST_SHARED_BYTES,
        default=list(MOST_SHARED_BYTES),
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
        choices=DTYPES,
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
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> int:
    """Check what the command line asks for; return the exit code."""
    options = read_arguments(given)
    if importlib.util.find_spec("triton") is None:
        raise SystemExit("error: the package triton is not installed: pip install triton")
    cases = [
        (start, f"{mechanism} {dtype} {width}", architecture)
        for mechanism in options.mechanisms
        for dtype in options.dtypes
        for width in options.widths
        for start in recorded_starts(mechanism, DTYPES[dtype], width)
        for architecture in options.architectures
    ]
    console = Console(width=None if sys.stdout.isatty() else 120)
    columns = ["heads", "kernel", "for", "registers", "spilled B", "shared KB", "tensor-core"]
    table = Table(*columns, title="Kernels; tensor-core: instructions")
    failed = 0
    known: dict[tuple[Start, int], Found] = {}
    progress = track(cases, "compiling", console=Console(stderr=True))
    for start, heads, architecture in progress:
        if (start, architecture) not in known:
            known[start, architecture] = compile_start(start, architecture)
        found = known[start, architecture]
        fits = found.shared_bytes <= MOST_SHARED_BYTES[architecture]
        bad = found.spilled_bytes > 0 or not fits
        failed += bad
        shared = f"{found.shared_bytes / 1024:.1f}"
        row = [found.registers, found.spilled_bytes, shared, found.tensor_core]
        name = start.kernel.__name__ + _side(start)
        style = "red" if bad else None
        table.add_row(heads, name, f"sm_{architecture}", *map(str, row), style=style)
    console.print(table)
    if failed:
        print(f"{failed} of {len(cases)} kernels spill or need too much shared memory")
        return 1
    print(f"all {len(cases)} kernels run without spills")
    return 0


def _side(start: Start) -> str:
    """Return what tells a kernel's variants apart."""
    constants = dict(start.constants)
    if "IS_KEY" in constants:
        return " (keys)" if constants["IS_KEY"] else " (queries)"
    if "REVERSE" in constants:
        kind = "backward" if constants["REVERSE"] else "forward"
        return f" ({kind}, {'kept' if constants['KEEP_ALL'] else 'sums'})"
    return ""


if __name__ == "__main__":
    sys.exit(main())
