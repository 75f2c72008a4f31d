"""One process of a launch that trains many runs: `train_worker.py CASES.json FOLDER`.

CASES.json maps a name to the overrides of a run; each run goes into FOLDER/name. Afterwards every
rank writes FOLDER/name-RANK.json with a digest of its weights and buffers.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slayformer.cli import compose
from slayformer.config_loading import load_config
from slayformer.errors import ConfigError
from slayformer.training import (
    bad_updates,
    deepspeed_settings,
    distributed,
    engine,
    loop,
    loss_scale,
    run,
    saving,
)

# every weight of these tiny models is sharded, as a large one's would be
deepspeed_settings.STAGE3_WHOLE_BELOW = 0
# nobody would want fp16 or an offloaded optimizer on a CPU, but they compute there what a GPU does
run.check_engine = engine.check_engine = lambda engine, device: None
# so high that gradients overflow
loss_scale.FIRST_SCALE = 2.0**24

# early enough for a short run to have a mean to leap from
bad_updates.RECENT = 4
BAD_UPDATE = 6

# these runs say themselves whether they want it
os.environ.pop("WANDB_MODE", None)
os.environ["WANDB_SILENT"] = "true"

cases: dict[str, list[str]] = json.loads(Path(sys.argv[1]).read_text())
folder = Path(sys.argv[2])


class Observed(engine.TrainingEngine):
    """The engine, which tells its buffers and, unless they are sharded, its weights at the end.

    Runs named after a fault have it in BAD_UPDATE, on the last rank alone.
    """

    name = ""
    updates = 0

    def __init__(self, objective: Any, config: Any) -> None:
        initial = {name: p.detach().clone() for name, p in objective.model.named_parameters()}
        to_device = objective.to

        def move(device: torch.device) -> torch.nn.Module:
            # in stage 3 they are cut by then: no device has to hold them all
            assert config.engine.zero_stage < 3 or not any(map(torch.numel, objective.parameters()))
            return to_device(device)

        objective.to = move
        super().__init__(objective, config)
        weights = self.consolidated_weights()
        if weights is not None:
            assert all(torch.equal(weights[name], tensor) for name, tensor in initial.items())
        # half an hour and a minute; what ranks tell one another may take a week
        waits = [
            group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
            for group in dist.distributed_c10d._world.pg_map
        ]
        assert len(waits) >= 3, waits
        assert sorted(set(waits)) == [1860, 7 * 86400], waits

    def forward(self, batch: Any) -> torch.Tensor:
        nats_BT = super().forward(batch)
        if self.updates != BAD_UPDATE or distributed.rank() < distributed.world_size() - 1:
            return nats_BT
        if self.name.startswith("nan_loss"):
            return nats_BT * torch.nan
        if self.name.startswith("nan_gradient"):
            nats_BT.register_hook(lambda gradient: gradient * torch.nan)
        if self.name.startswith("spike"):
            return nats_BT * 100
        return nats_BT

    def step(self, learning_rate: float, *, is_poisoned: bool = False) -> float:
        self.updates += 1
        Late.updates += 1
        return super().step(learning_rate, is_poisoned=is_poisoned)

    def close(self) -> None:
        model = self.objective.model
        tensors = dict(model.named_buffers())
        if self.zero_stage < 3:
            tensors |= dict(model.named_parameters())
        digests = {
            name: hashlib.sha256(tensor.detach().numpy().tobytes()).hexdigest()
            for name, tensor in tensors.items()
        }
        told = folder / f"{self.name}-{distributed.rank()}.json"
        told.write_text(json.dumps(digests))
        super().close()


class Late(saving.Saver):
    """Begins to write a copy when the weights it was made of have changed twice, or at a wait."""

    updates = 0
    in_a_hurry = False

    def _join(self) -> None:
        self.in_a_hurry = True
        super()._join()
        self.in_a_hurry = False

    def _write(self, snapshot: saving.Snapshot) -> None:
        begun = Late.updates
        while Late.updates < begun + 2 and not self.in_a_hurry:
            time.sleep(0.001)
        super()._write(snapshot)


def talk() -> None:
    """Check what ranks tell one another."""
    own, world = distributed.rank(), distributed.world_size()
    assert distributed.broadcast_object(f"from {own}") == "from 0"
    assert distributed.gather_objects(own) == list(range(world))
    total = distributed.sum_over_ranks(torch.tensor([own, 0.1], dtype=torch.float64))
    assert total.tolist() == [sum(range(world)), 0.1 * world]
    assert distributed.run_on_main(lambda: distributed.rank()) == 0

    def refuse() -> None:
        raise ConfigError("field", own, "only rank 0 finds it")

    with pytest.raises(ConfigError, match=r"^field=0: only rank 0 finds it$") as caught:
        distributed.run_on_main(refuse)
    assert caught.value.value == 0

    def fill() -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "metrics.jsonl")

    with pytest.raises(OSError, match=r"No space left on device: 'metrics\.jsonl'"):
        distributed.run_on_main(fill)


distributed.initialize()
talk()
loop.TrainingEngine, loop.Saver = Observed, Late  # type: ignore[misc]
for name, overrides in cases.items():
    Observed.name = name
    run.run(load_config(compose("train", [*overrides, f"run_directory={folder / name}"])))
