"""DeepSpeed behind a few methods; no other file imports it.

What an update means is ours: the loop divides every loss by the targets of the whole update, so
DeepSpeed is told of one accumulation step and only hears where an update ends. That keeps a change
of accumulation at run time (a batch ramp) exact in every ZeRO stage.
"""

from __future__ import annotations

import importlib
import math
import os
import sys
import warnings
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from slayformer.config import EngineConfig, TrainConfig
from slayformer.data.loader import Batch
from slayformer.errors import ConfigError
from slayformer.model.gpt2 import GPT2
from slayformer.training import distributed
from slayformer.training.deepspeed_settings import deepspeed_settings
from slayformer.training.devices import check_compiler, check_offload, check_precision
from slayformer.training.loss_scale import LossScale
from slayformer.training.objective import LanguageModelObjective
from slayformer.training.optimizer import build_optimizer
from slayformer.training.optimizer_state import gather, scatter


class TrainingEngine:
    """A `LanguageModelObjective` under DeepSpeed: forward, backward, step, and its whole state.

    `objective` is the wrapped module, for evaluation; `device` is where batches must be. In fp16
    `loss_scale` is that of the next update, else None.
    """

    def __init__(self, objective: LanguageModelObjective, config: TrainConfig) -> None:
        distributed.initialize(config.engine.timeout_seconds)
        self.device = distributed.device()
        check_engine(config.engine, self.device)
        self.objective = objective
        self.zero_stage = config.engine.zero_stage
        self._clipping = config.optimizer.gradient_clipping
        self.loss_scale = LossScale() if config.engine.precision == "fp16" else None
        objective.model.recompute(config.engine.activation_checkpointing)
        deepspeed = _import_deepspeed()
        from deepspeed.runtime.config import DeepSpeedConfigError

        parameters = sum(parameter.numel() for parameter in objective.parameters())
        optimizer = build_optimizer(objective, config.optimizer, self.device)
        settings = deepspeed_settings(config, parameters)
        try:
            if self.zero_stage == 3:
                # takes the weights to the device one by one and cuts each: all need not fit
                deepspeed.zero.Init(module=objective, config_dict_or_path=settings)
            objective.to(self.device)
            self._engine, *_ = deepspeed.initialize(
                model=objective, optimizer=optimizer, config=settings
            )
        except (ValidationError, ValueError, AssertionError, DeepSpeedConfigError) as error:
            if not config.engine.deepspeed:
                raise
            hint = f"DeepSpeed says: {error}"
            if isinstance(error, ValidationError):
                first = error.errors()[0]
                hint = f"DeepSpeed says of {'.'.join(map(str, first['loc']))}: {first['msg']}"
            raise ConfigError("engine.deepspeed", config.engine.deepspeed, hint) from error
        settings.check_all_read(config.engine.deepspeed or {}, again=config.resume is not None)
        distributed.limit_waiting()
        if self.zero_stage in (1, 2) and not config.engine.offload_optimizer:
            _share_weights(self._engine.optimizer)
        if self.zero_stage == 3:
            # what a module uses of another's weights is gathered for it as well: the head, and the
            # maps by which a block sums the keys of its stretch of a sequence
            used: list[tuple[Any, Any]] = [(objective, objective.model.head_weight)]
            if objective.context_group is not None:
                for block in objective.model.blocks:
                    used += [(block, p) for p in block.attention.parameters()]  # type: ignore[union-attr]
            for module, parameter in used:
                deepspeed.zero.register_external_parameter(module, parameter)
        if config.engine.compile:
            compile_blocks(objective.model, self.device)

    def forward(self, batch: Batch) -> Tensor:
        """Return the cross entropy of every target in nats [B, T], ready for `backward`."""
        parts = (batch.ids_BT, batch.targets_BT, batch.document_ids_BT, batch.position_ids_BT)
        return self._engine(*(part if part is None else part.to(self.device) for part in parts))

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradients of `loss`; `last` marks the last forward pass of the update.

        Gradients are averaged over ranks, so a loss that is a share of the update's sum carries
        the factor world size.
        """
        if self.loss_scale is not None:
            if self.zero_stage == 0:
                loss = loss * self.loss_scale.value
            else:
                # from here on it scales losses, and gradients back in `step`
                self._engine.optimizer.override_loss_scale(self.loss_scale.value)
        self._engine.set_gradient_accumulation_boundary(last)
        self._engine.backward(loss)

    def step(self, learning_rate: float, *, is_poisoned: bool = False) -> float:
        """Update the weights; return the norm of all gradients before clipping.

        Every parameter group learns at its own scale of `learning_rate`. Gradients that are not
        finite are dropped with nothing changed but fp16's loss scale, which says nothing of those
        that `is_poisoned` on purpose; neither is the norm finite then.
        """
        for group in self._engine.optimizer.param_groups:
            group["lr"] = learning_rate * group["learning_rate_scale"]
        norm = self._clip() if self.zero_stage == 0 else 0.0
        if math.isfinite(norm):
            self._engine.step()
        else:
            self._engine.optimizer.zero_grad()
        if self.zero_stage > 0:
            norm = float(self._engine.get_global_grad_norm())
        if self.loss_scale is not None and not is_poisoned:
            self.loss_scale.after_update(overflowed=not math.isfinite(norm))
        return norm

    def _clip(self) -> float:
        """Scale back and clip the gradients and return their norm.

        Without ZeRO DeepSpeed reports no norm in fp32, so norm and clipping are ours.
        """
        parameters = list(self.objective.parameters())
        if self.loss_scale is not None:
            gradients = [p.grad for p in parameters if p.grad is not None]
            torch._foreach_mul_(gradients, 1 / self.loss_scale.value)
        limit = self._clipping or float("inf")
        return float(torch.nn.utils.clip_grad_norm_(parameters, limit))

    def optimizer_moments(self) -> dict[str, Tensor]:
        """Return AdamW's moments by parameter, fp32 on the CPU: see `optimizer_state.gather`.

        Every rank must call it; only rank 0 gets them.
        """
        return gather(self._engine.optimizer, self.objective.model, self.zero_stage)

    def set_optimizer_moments(self, moments: dict[str, Tensor]) -> None:
        """Take what `optimizer_moments` returned on rank 0 of any world size and ZeRO stage."""
        scatter(self._engine.optimizer, self.objective.model, self.zero_stage, moments)

    def consolidated_weights(self) -> dict[str, Tensor] | None:
        """Return copies of weights and persistent buffers of the GPT-2 on the CPU; None off rank 0.

        Every rank must call it: in stage 3 each weight is gathered in turn.
        """
        model = self.objective.model
        gathered = _import_deepspeed().zero.GatheredParameters
        weights: dict[str, Tensor] = {}
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                with gathered([parameter], enabled=self.zero_stage == 3):
                    if distributed.is_main():
                        weights[name] = parameter.detach().to("cpu", copy=True)
        if not distributed.is_main():
            return None
        buffers = model.state_dict(keep_vars=True)
        for name, buffer in model.named_buffers():
            if name in buffers:
                weights[name] = buffer.detach().to("cpu", copy=True)
        return weights

    def close(self) -> None:
        """Free what DeepSpeed holds, so that another engine can follow in this process."""
        self._engine.destroy()


def check_engine(engine: EngineConfig, device: torch.device) -> None:
    """Raise ConfigError for what `device` cannot do."""
    check_precision(engine.precision, device)
    check_offload(engine.offload_optimizer, device)


def compile_blocks(model: GPT2, device: torch.device) -> None:
    """Compile every block for `device`; raises ConfigError if torch.compile does not work here."""
    check_compiler(device)
    for block in model.blocks:
        # few sizes ever come: each gets a graph of its own
        block.compile(dynamic=False)


def _share_weights(optimizer: Any) -> None:
    """Let AdamW of stages 1 and 2 update the weights themselves.

    DeepSpeed updates an fp32 copy and copies it back, for weights that may be of half precision;
    ours are fp32.
    """
    own = distributed.rank()
    flats = optimizer.single_partition_of_fp32_groups
    for flat, parts in zip(flats, optimizer.parallel_partitioned_bit16_groups, strict=True):
        flat.data = parts[own].data
    # what remembered the copies lets go of them
    optimizer._link_all_hp_params()


def _import_deepspeed() -> Any:
    """Import deepspeed quietly, without the extension it would compile for minutes on a CPU."""
    # otherwise it warns of its guess
    os.environ["DS_ACCELERATOR"] = distributed.device().type
    # it calls collectives of torch by names that torch has begun to replace
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    deepspeed = importlib.import_module("deepspeed")
    # `import deepspeed.comm.torch as name` would bind the real torch
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    if distributed.device().type == "cpu":
        # it would copy every gradient to fp64 for the norm, which takes longer than AdamW
        deepspeed.accelerator.get_accelerator().is_fp64_supported = lambda: False
    return deepspeed
