"""What named accelerators can do at most, and which one is here."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from slayformer.errors import ConfigError

# dense FLOP/s of matrix products, from NVIDIA's data sheets (which print twice as many, with
# sparsity, for tensor cores); bf16 and fp16 are equal there. fp32 is that of the vector units:
# torch leaves TF32 off. The first entry whose pattern is found in the device's name counts.
_PEAKS: dict[str, tuple[str, dict[str, float]]] = {
    "A100": (r"\bA100\b", {"half": 312e12, "fp32": 19.5e12}),
    "H100 PCIe": (r"\bH100 PCIe\b", {"half": 756e12, "fp32": 51e12}),
    "H100 NVL": (r"\bH100 NVL\b", {"half": 835e12, "fp32": 60e12}),
    "H100": (r"\bH100\b", {"half": 989e12, "fp32": 67e12}),
    "H200 NVL": (r"\bH200 NVL\b", {"half": 835e12, "fp32": 60e12}),
    "H200": (r"\bH200\b", {"half": 989e12, "fp32": 67e12}),
}


@dataclass(frozen=True)
class Device:
    """A device by its name; `peak_flops` is the most FLOP/s in the precision, None if unknown."""

    name: str
    peak_flops: float | None


def named_device(name: str, precision: str) -> Device:
    """Return the device of that name, as a person or the driver writes it."""
    # a slice of a GPU has the GPU's name and less speed
    if not re.search(r"\bMIG\b", name):
        for known, (pattern, peaks) in _PEAKS.items():
            if re.search(pattern, name, re.IGNORECASE):
                return Device(known, peaks["fp32" if precision == "fp32" else "half"])
    return Device(name, None)


def found_device(precision: str) -> Device:
    """Return the current device of this process."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return named_device(name, precision)


def known_devices() -> str:
    """Return the names that `named_device` knows, in words."""
    return ", ".join(_PEAKS)


def check_precision(precision: str, device: torch.device) -> None:
    """Raise ConfigError if `device` cannot train in `precision`."""
    if device.type == "cpu" and precision == "fp16":
        hint = "a CPU has no fast fp16 products, and bf16 needs no loss scaling; use bf16 or fp32"
        raise ConfigError("engine.precision", precision, hint)
    if device.type == "cuda" and precision == "bf16" and not _has_bf16():
        hint = f"{torch.cuda.get_device_name(device)} has no bf16; use fp16 or fp32"
        raise ConfigError("engine.precision", precision, hint)


def _has_bf16() -> bool:
    # not in its tensor cores, it would be slower than fp32
    return torch.cuda.is_bf16_supported(including_emulation=False)


def check_offload(offload: bool, device: torch.device) -> None:
    """Raise ConfigError if the optimizer is to leave a `device` that it cannot leave."""
    if offload and device.type == "cpu":
        hint = "there is no GPU whose memory it could spare: AdamW is on the CPU already"
        raise ConfigError("engine.offload_optimizer", offload, hint)


def check_compiler(device: torch.device) -> None:
    """Raise ConfigError if torch.compile cannot compile for `device`, which a small sum tells."""
    try:
        torch.compile(lambda x: x + 1)(torch.zeros(8, device=device))
    # whatever it is that is missing, each in its own way
    except Exception as error:
        needed = "triton and a C compiler" if device.type == "cuda" else "a C++ compiler"
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        hint = f"torch.compile does not work here ({reason}); it needs {needed}: install g++ or "
        raise ConfigError("engine.compile", True, f"{hint}set CXX, or use false") from error
