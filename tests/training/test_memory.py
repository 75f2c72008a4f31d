"""The estimate by hand, and its activations against what autograd keeps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker

from slayformer.cli import compose
from slayformer.config import TrainConfig
from slayformer.config_loading import load_config
from slayformer.model.gpt2 import GPT2
from slayformer.training.memory import activation_bytes, estimate_memory


def estimate(config: TrainConfig, stage: int, devices: int, **engine: Any) -> Any:
    engine = {"precision": "fp32", **engine}
    config = replace(config, engine=replace(config.engine, zero_stage=stage, **engine))
    return estimate_memory(
        config, parameters=1000, vocabulary_size=257, world_size=devices, on_cpu=True
    )


def test_states_of_1000_parameters_on_four_devices(train_config: Any) -> None:
    # weights 4 bytes each, gradients 4 and a bucket of 4, moments 8 and in stage 3 a flat copy 4
    expected = {
        0: (4000, 4000, 8000),
        1: (4000, 8000, 2000),
        2: (4000, 5000, 2000),
        3: (1000, 5000, 3000),
    }
    for stage, parts in expected.items():
        memory = estimate(train_config(), stage, 4)
        assert (memory.weights, memory.gradients, memory.optimizer) == parts
        assert memory.total == sum(parts) + memory.activations
    # bf16 products keep a copy of the weights
    assert estimate(train_config(), 2, 4, precision="bf16").weights == 6000
    offloaded = estimate(train_config(), 2, 4, offload_optimizer=True)
    assert (offloaded.optimizer, offloaded.host) == (0, 3000)


def test_activations_of_gpt2_small_by_hand() -> None:
    config = load_config(compose("train", ["+experiment=gpt2_small_chinchilla"]))
    # 8 x 1024 tokens, 12 layers, C = 768: (8 + 12 + 16 + 16 + 2) C bytes in bf16 with dropout, and
    # two blocks of 512 MiB of logits, for the whole would be 1.5 GiB
    expected = 8 * 1024 * 12 * 54 * 768 + 2 * 512 * 2**20
    assert activation_bytes(config, 50257, on_cpu=False) == expected


def test_devices_that_share_sequences_hold_their_tokens_and_states() -> None:
    paper = ["+experiment=gpt2_small_chinchilla", "attention=slay", "engine.context_parallel=8"]
    config = load_config(compose("train", paper))
    sizes = {"parameters": 1000, "vocabulary_size": 50257, "world_size": 8}
    found = estimate_memory(config, **sizes, on_cpu=False, state_bytes=1200).activations
    # as above with 8 x 128 tokens, whose logits fit into one block each time; of 8 sequences the
    # states, and those of 8 devices in one of 12 layers
    expected = 1024 * 12 * 54 * 768 + 2 * 4 * 1024 * 50257 + 8 * 1200 + 8 * 8 * 1200 // 12
    assert found == expected


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("attention", ["softmax", "slay", "linear_elu", "performer"])
def test_activations_are_near_what_autograd_keeps(attention: str, precision: str) -> None:
    overrides = [f"attention={attention}", "batch.micro_samples=1", f"engine.precision={precision}"]
    shape = ["model.layers=4", "model.heads=2", "model.width=64", "model.context_length=512"]
    config = load_config(compose("train", [*overrides, *shape, "model.dropout=0.1"]))
    model = GPT2(config.model, config.attention, vocabulary_size=257, seed=0)
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    weights = {parameter.shape for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        place = tensor.untyped_storage().data_ptr()
        # neither weights nor their bf16 copies, which the estimate counts elsewhere
        if place not in own and tensor.shape not in weights and tensor.shape[::-1] not in weights:
            kept[place] = tensor
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"),
    ):
        model(torch.zeros(1, 512, dtype=torch.long))
    found = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    logits = 2 * 512 * 257 * 4
    estimated = activation_bytes(config, 257, on_cpu=True) - logits
    assert estimated == pytest.approx(found, rel=0.45)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("attention", ["softmax", "slay_best"])
def test_recomputing_keeps_less_and_changes_no_gradient(attention: str, precision: str) -> None:
    overrides = [f"attention={attention}", "batch.micro_samples=1", f"engine.precision={precision}"]
    shape = ["model.layers=4", "model.heads=2", "model.width=64", "model.context_length=512"]
    config = load_config(compose("train", [*overrides, *shape, "model.dropout=0.1"]))
    ids = torch.randint(257, (1, 512))
    logits = 2 * 512 * 257 * 4
    gradients: dict[str, list[torch.Tensor]] = {}
    peaks: dict[str, int] = {}
    for what in ("none", "attention", "block"):
        model = GPT2(config.model, config.attention, vocabulary_size=257, seed=0)
        model.recompute(what)
        torch.manual_seed(1)
        tracker = MemTracker()
        tracker.track_external(model)
        with tracker:
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                hidden, _ = model(ids)
            hidden.square().sum().backward()
        (peak,) = tracker.get_tracker_snapshot("peak").values()
        peaks[what] = sum(size for kind, size in peak.items() if "ACT" in str(kind))
        engine = replace(config.engine, activation_checkpointing=what)
        estimated = activation_bytes(replace(config, engine=engine), 257, on_cpu=True) - logits
        assert estimated == pytest.approx(peaks[what], rel=0.45), what
        gradients[what] = [p.grad for p in model.parameters() if p.grad is not None]
    assert peaks["block"] < 0.45 * peaks["none"]
    assert peaks["attention"] < 0.8 * peaks["none"]
    for what in ("attention", "block"):
        pairs = zip(gradients[what], gradients["none"], strict=True)
        # dropout included
        assert all(torch.equal(one, other) for one, other in pairs), what
