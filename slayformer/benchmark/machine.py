"""What a measurement is made on: `python -m slayformer.benchmark.machine` prints it."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any

import torch

from slayformer.benchmark.contestants import peer_versions
from slayformer.errors import ConfigError
from slayformer.training.run_directory import git_revision, package_versions


def find_device(name: str) -> torch.device:
    """Return the device called `name`, with `auto` the GPU if there is one.

    Raises ConfigError if it is not here.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device", name, "torch finds no CUDA GPU here; use cpu")
    return torch.device(name)


def processor() -> str:
    """Return the processor's name, as far as the system tells."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def load_per_core() -> float:
    """Return how many processes want each core, mean over the last minute; 1 is a busy core."""
    # of the whole machine, as the load is; its cores may be more than this process may use
    return os.getloadavg()[0] / (os.cpu_count() or 1)


def describe(device: torch.device, threads: int) -> dict[str, Any]:
    """Return the machine and the software, to be written beside what was measured."""
    about: dict[str, Any] = {
        "device": str(device),
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": threads,
        "load_per_core": round(load_per_core(), 2),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "packages": {**package_versions(), **peer_versions()},
        "git_revision": git_revision(),
    }
    if device.type == "cpu":
        about["vector_instructions"] = torch.backends.cpu.get_cpu_capability()
    else:
        about["gpu"] = torch.cuda.get_device_name(device)
        about["gpu_memory_mib"] = torch.cuda.get_device_properties(device).total_memory // 2**20
        about["cuda"] = torch.version.cuda
    return about


def in_words(machine: dict[str, Any]) -> str:
    """Return the description in one line."""
    where = machine.get("gpu")
    if where is None:
        threads = machine["threads"]
        count = "1 thread" if threads == 1 else f"{threads} threads"
        where = (
            f"{machine['processor']}, {machine['cores']} cores, {machine['vector_instructions']}, "
            f"{count}, load {machine['load_per_core']:.1f} a core at the start"
        )
    return f"{where}, torch {machine['packages']['torch']}"


if __name__ == "__main__":
    found = describe(find_device("auto"), torch.get_num_threads())
    print(in_words(found))
    print(json.dumps(found, indent=2))
