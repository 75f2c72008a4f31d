"""One rank of the scorer's test: `torchrun score_worker.py FOLDER` writes a file a rank."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from slayformer.data.loader import WindowLoader
from slayformer.data.shards import TokenStream
from slayformer.evaluation.loss import score
from slayformer.training import distributed


class Counted(nn.Module):
    """Known losses, and the number of forward passes; ranks meet in each, as sharded weights do."""

    def __init__(self, nats: np.ndarray) -> None:
        super().__init__()
        self.nats = torch.from_numpy(nats.astype(np.float32))
        self.forwards = 0

    def forward(self, ids_BT: Tensor, targets_BT: Tensor, *rest: object) -> Tensor:
        self.forwards += 1
        dist.barrier()
        return self.nats[targets_BT.clamp_min(0)] * (targets_BT >= 0)


distributed.initialize()
stream = TokenStream([np.random.default_rng(2).integers(0, 40, size=51)])
objective = Counted(np.random.default_rng(1).uniform(0, 9, size=40))
loader = WindowLoader(stream, context_length=5, seed=None, end_of_text=99)
byte_lengths = np.full(100, 2)
totals = score(objective, loader, windows=10, batch_samples=3, byte_lengths=byte_lengths)
record = {**vars(totals), "forwards": objective.forwards}
(Path(sys.argv[1]) / f"rank_{distributed.rank()}.json").write_text(json.dumps(record))
