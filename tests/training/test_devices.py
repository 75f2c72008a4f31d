"""Devices by the names that drivers and people give them."""

from __future__ import annotations

import pytest
import torch

from slayformer.errors import ConfigError
from slayformer.training.devices import check_offload, check_precision, named_device


@pytest.mark.parametrize(
    ("name", "precision", "teraflops"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA A100-PCIE-40GB", "fp16", 312),
        ("A100", "fp32", 19.5),
        ("NVIDIA H100 80GB HBM3", "bf16", 989),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H100 NVL", "bf16", 835),
        ("h100", "fp32", 67),
        ("NVIDIA H200", "bf16", 989),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16", None),
        ("NVIDIA GH200 480GB", "bf16", None),
        ("NVIDIA A10", "bf16", None),
        ("Tesla V100-SXM2-16GB", "fp16", None),
        ("CPU", "fp32", None),
    ],
)
def test_peaks_of_named_devices(name: str, precision: str, teraflops: float | None) -> None:
    peak = named_device(name, precision).peak_flops
    assert peak is None if teraflops is None else peak == teraflops * 1e12


def test_fp16_and_offloading_are_refused_on_a_cpu() -> None:
    cpu = torch.device("cpu")
    for precision in ("fp32", "bf16"):
        check_precision(precision, cpu)
    with pytest.raises(ConfigError, match=r"^engine.precision=fp16: .*use bf16 or fp32$"):
        check_precision("fp16", cpu)
    check_offload(False, cpu)
    with pytest.raises(ConfigError, match=r"^engine.offload_optimizer=true: there is no GPU"):
        check_offload(True, cpu)


def test_bf16_is_refused_on_a_gpu_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100-SXM2-16GB")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    gpu = torch.device("cuda", 0)
    check_precision("fp16", gpu)
    with pytest.raises(ConfigError, match=r"Tesla V100-SXM2-16GB has no bf16; use fp16 or fp32"):
        check_precision("bf16", gpu)
