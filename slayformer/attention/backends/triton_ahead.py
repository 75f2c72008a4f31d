"""Kernels compiled ahead, for GPUs that need not be there, and what they take.

Passes run on tiny CPU tensors with every kernel's start replaced by a note of its arguments, so
what is compiled is what training and decoding would run.
"""

from __future__ import annotations

import dataclasses
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import mangle_type

from slayformer.attention import backends
from slayformer.attention.backends import triton_start
from slayformer.errors import UserError
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

    def title(self) -> str:
        """Return the kernel's name with what tells its variants apart."""
        constants, name = dict(self.constants), self.kernel.__name__
        if "IS_KEY" in constants:
            return f"{name} ({'keys' if constants['IS_KEY'] else 'queries'})"
        if "REVERSE" in constants:
            kept = "states" if constants["KEEP_ALL"] else "sums"
            return f"{name} ({'backward' if constants['REVERSE'] else 'forward'}, {kept})"
        return name


@dataclass(frozen=True)
class Found:
    """What a compiled kernel takes."""

    registers: int
    spilled_bytes: int
    shared_bytes: int
    tensor_core: int

    def fits(self, architecture: int) -> bool:
        """Return whether nothing spills and a block can have the shared memory."""
        return not self.spilled_bytes and self.shared_bytes <= MOST_SHARED_BYTES[architecture]


def recorded_starts(mechanism: str, dtype: str, width: int, architecture: int) -> list[Start]:
    """Return the starts of a training step and of a decoded token for heads of this width.

    Each kind once, as on a GPU.
    """
    starts: dict[Start, None] = {}

    def note(
        kernel: Any,
        grid: tuple[int, ...],
        arguments: dict[str, Any],
        constants: dict[str, Any],
        warps: int,
    ) -> None:
        starts[_start(kernel, arguments, constants, warps)] = None

    kept_launch, kept_backend = triton_start.launch, backends.BACKENDS["triton"]
    kept_architecture = triton_start.architecture_of
    triton_start.launch = note
    triton_start.architecture_of = lambda device: architecture
    backends.BACKENDS["triton"] = dataclasses.replace(kept_backend, obstacle=lambda q, v: None)
    try:
        attention = make_attention(
            mechanism, num_heads=2, head_dim=width, max_sequence_length=1024, backend="triton"
        )
        shape = (1, 1024, 2, width)
        q, k, v = (
            torch.randn(shape, dtype=DTYPES[dtype]).transpose(1, 2).requires_grad_()
            for _ in range(3)
        )
        # nothing has been computed: the gradients have shapes, but no values
        attention(q, k, v)[0].sum().backward()
        with torch.no_grad():
            token = (x[:, :, :1] for x in (q, k, v))
            attention(*token, state=attention.init_state(len(q)))
    finally:
        triton_start.launch = kept_launch
        triton_start.architecture_of = kept_architecture
        backends.BACKENDS["triton"] = kept_backend
    return list(starts)


def _start(kernel: Any, arguments: dict[str, Any], constants: dict[str, Any], warps: int) -> Start:
    """Return a start as triton would specialise it: what is divisible by 16 is taken to be so."""
    types, divisible = {}, []
    free = set(kernel.do_not_specialize or ())
    for name, value in arguments.items():
        types[name] = mangle_type(value)
        whole = value.data_ptr() if isinstance(value, torch.Tensor) else value
        if name not in free and whole % 16 == 0:
            divisible.append(name)
    return Start(kernel, tuple(types.items()), tuple(divisible), tuple(constants.items()), warps)


def compile_start(start: Start, architecture: int) -> Found:
    """Compile a kernel for one architecture and return what it takes."""
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
        options=triton_start.options_of(start.warps),
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
        raise UserError(f"ptxas told no registers and spills: {usage}")
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
        raise UserError(f"{Path(command[0]).name}: {done.stderr.strip()}")
    return done.stdout + done.stderr
