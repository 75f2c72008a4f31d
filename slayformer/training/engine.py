"""DeepSpeed behind six methods; no other file imports it.

What an update means is ours: the loop divides every loss by the targets of the whole update, so
DeepSpeed is told of one accumulation step and only hears where an update ends. That keeps a change
of accumulation at run time (a batch ramp) exact in every ZeRO stage.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from typing import Any

import torch
from torch import Tensor

from slayformer.config import TrainConfig
from slayformer.data.loader import Batch
from slayformer.training import distributed
from slayformer.training.objective import LanguageModelObjective
from slayformer.training.optimizer import build_optimizer
from slayformer.training.optimizer_state import gather, scatter

# parameters smaller than this many elements stay whole on every device in stage 3
STAGE3_WHOLE_BELOW = 100_000


class TrainingEngine:
    """A `LanguageModelObjective` under DeepSpeed: forward, backward, step, and its whole state.

    `objective` is the wrapped module, for evaluation; `device` is where batches must be.
    """

    def __init__(self, objective: LanguageModelObjective, config: TrainConfig) -> None:
        distributed.initialize()
        self.device = distributed.device()
        self.objective = objective.to(self.device)
        self.zero_stage = config.engine.zero_stage
        self._clipping = config.optimizer.gradient_clipping
        deepspeed = _import_deepspeed()
        optimizer = build_optimizer(objective, config.optimizer, self.device)
        self._engine, *_ = deepspeed.initialize(
            model=objective, optimizer=optimizer, config=deepspeed_settings(config)
        )
        if self.zero_stage == 3:
            # the head is the weight of another module: gather it for the objective as well
            deepspeed.zero.register_external_parameter(objective, objective.model.head_weight)

    def forward(self, batch: Batch) -> Tensor:
        """Return the cross entropy of every target in nats [B, T], ready for `backward`."""
        parts = (batch.ids_BT, batch.targets_BT, batch.document_ids_BT, batch.position_ids_BT)
        return self._engine(*(part if part is None else part.to(self.device) for part in parts))

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradients of `loss`; `last` marks the last forward pass of the update.

        Gradients are averaged over ranks, so a loss that is a share of the update's sum carries
        the factor world size.
        """
        self._engine.set_gradient_accumulation_boundary(last)
        self._engine.backward(loss)

    def step(self, learning_rate: float) -> float:
        """Update the weights; return the norm of all gradients before clipping.

        Every parameter group learns at its own scale of `learning_rate`.
        """
        for group in self._engine.optimizer.param_groups:
            group["lr"] = learning_rate * group["learning_rate_scale"]
        if self.zero_stage == 0:
            # without ZeRO DeepSpeed reports no norm in fp32, so norm and clipping are ours
            parameters = list(self.objective.parameters())
            limit = self._clipping or float("inf")
            norm = float(torch.nn.utils.clip_grad_norm_(parameters, limit))
            self._engine.step()
            return norm
        self._engine.step()
        return float(self._engine.get_global_grad_norm())

    def optimizer_moments(self) -> dict[str, Tensor]:
        """Return AdamW's moments by parameter, fp32 on the CPU: see `optimizer_state.gather`.

        Every rank must call it; only rank 0 gets them.
        """
        return gather(self._engine.optimizer, self.objective.model, self.zero_stage)

    def set_optimizer_moments(self, moments: dict[str, Tensor]) -> None:
        """Take what `optimizer_moments` returned on rank 0 of any world size and ZeRO stage."""
        scatter(self._engine.optimizer, self.objective.model, self.zero_stage, moments)

    def consolidated_weights(self) -> dict[str, Tensor] | None:
        """Return weights and persistent buffers of the GPT-2 on the CPU, fp32; None off rank 0.

        Every rank must call it: in stage 3 each weight is gathered in turn.
        """
        model = self.objective.model
        gathered = _import_deepspeed().zero.GatheredParameters
        weights: dict[str, Tensor] = {}
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                with gathered([parameter], enabled=self.zero_stage == 3):
                    if distributed.is_main():
                        weights[name] = parameter.detach().cpu().clone()
        if not distributed.is_main():
            return None
        buffers = model.state_dict(keep_vars=True)
        for name, buffer in model.named_buffers():
            if name in buffers:
                weights[name] = buffer.detach().cpu().clone()
        return weights

    def close(self) -> None:
        """Free what DeepSpeed holds, so that another engine can follow in this process."""
        self._engine.destroy()


def deepspeed_settings(config: TrainConfig) -> dict[str, Any]:
    """Return DeepSpeed's configuration: fp32 weights and reductions, nothing scheduled by it."""
    stage = config.engine.zero_stage
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": config.batch.micro_samples,
        "gradient_accumulation_steps": 1,
        "steps_per_print": sys.maxsize,
        "zero_optimization": {"stage": stage},
        # torch's AdamW is no optimizer of DeepSpeed's own
        "zero_allow_untested_optimizer": True,
        "communication_data_type": "fp32",
        # its default is 1; without ZeRO `step` clips
        "gradient_clipping": config.optimizer.gradient_clipping if stage > 0 else 0.0,
    }
    if stage == 3:
        settings["zero_optimization"]["stage3_param_persistence_threshold"] = STAGE3_WHOLE_BELOW
    return settings


def _import_deepspeed() -> Any:
    """Import deepspeed quietly, without the extension it would compile for minutes on a CPU."""
    # otherwise it warns of its guess
    os.environ["DS_ACCELERATOR"] = distributed.device().type
    # it calls collectives of torch by names that torch has begun to replace
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    deepspeed = importlib.import_module("deepspeed")
    # `import deepspeed.comm.torch as name` would bind the real torch
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    return deepspeed
