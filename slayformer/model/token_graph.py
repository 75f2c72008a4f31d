"""One decoded token as a CUDA graph: a recorded trip through the model, started at once.

A token's kernels are so short that starting them takes longer than running them. A recording fixes
where every tensor lies, so it serves states whose size never changes, which linear mechanisms have.

Shape suffixes: B sequences, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slayformer.attention.states import map_tensors, tensors_of
from slayformer.errors import ConfigError
from slayformer.model.gpt2 import GPT2, ModelState

# runs before the recording, in which libraries take their memory and kernels are compiled
WARM_UPS = 3


class TokenGraph:
    """Decodes token after token from `states` on; call it under `torch.no_grad()`.

    The caller sees to it that positions stay inside the model's context: a recording cannot raise.
    Raises ConfigError if the model is not on a GPU or its states grow.
    """

    def __init__(self, model: GPT2, states: ModelState) -> None:
        device = states.seen_B.device
        if device.type != "cuda":
            raise ConfigError("cuda_graph", True, f"needs a GPU; the model is on the {device.type}")
        batch_size = len(states.seen_B)
        self._ids_B1 = torch.zeros(batch_size, 1, dtype=torch.long, device=device)
        # apart from one another, as what comes after them is
        self._states = map_tensors(states, torch.clone)
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                _, after = model(self._ids_B1, states=self._states)
        torch.cuda.current_stream(device).wait_stream(side)
        check_constant(self._states, after)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._logits_BV = self._record(model)

    def _record(self, model: GPT2) -> Tensor:
        """Return the next token's logits; the states in their place become those after it."""
        hidden, after = model(self._ids_B1, states=self._states)
        logits_BV = model.logits(hidden[:, -1])
        for kept, new in zip(tensors_of(self._states), tensors_of(after), strict=True):
            kept.copy_(new)
        return logits_BV

    def __call__(self, ids_B1: Tensor) -> Tensor:
        """Return the logits [B, V] after these tokens, which the next call overwrites."""
        self._ids_B1.copy_(ids_B1)
        self._graph.replay()
        return self._logits_BV


def check_constant(before: ModelState, after: ModelState | None) -> None:
    """Raise ConfigError unless both have tensors of the same shapes and dtypes."""
    shapes = [[(x.shape, x.dtype) for x in tensors_of(states)] for states in (before, after)]
    if shapes[0] != shapes[1]:
        hint = "needs a linear mechanism: what this one remembers grows with every token"
        raise ConfigError("cuda_graph", True, hint)
