"""AdamW's moments by parameter, out of whatever pieces ZeRO has cut them into, and back.

Whole moments under their parameters' names mean the same in every ZeRO stage and world size, and a
file of named tensors executes nothing when it is read, unlike DeepSpeed's own checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from slayformer.errors import CheckpointError
from slayformer.training import distributed

MOMENTS = ("exp_avg", "exp_avg_sq")
# updates done, as the bias correction counts them
STEP = "step"


def gather(optimizer: Any, model: nn.Module, zero_stage: int) -> dict[str, Tensor]:
    """Return `name.exp_avg` and `name.exp_avg_sq` of every parameter and `step`, fp32 on the CPU.

    They are copies. `optimizer` is DeepSpeed's. Every rank must call it; the tensors are whole on
    rank 0 and the others get nothing. Before the first update there are none.
    """
    pieces = _pieces(optimizer, zero_stage)
    states = _torch_optimizer(optimizer, zero_stage).state
    if not all(states.get(piece) for piece in pieces):
        return {}
    if zero_stage in (1, 2):
        _link(optimizer)
    moments: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        for key in MOMENTS:
            if zero_stage == 0:
                whole = states[parameter][key]
            elif zero_stage == 3:
                whole = optimizer.get_full_hp_param(parameter, key)
            else:
                whole = parameter.get_full_hp_param(key)  # type: ignore[attr-defined]
            if distributed.is_main():
                copy = whole.detach().to("cpu", torch.float32, copy=True)
                moments[f"{name}.{key}"] = copy
    if distributed.is_main():
        moments[STEP] = torch.tensor([float(states[pieces[0]][STEP])])
    return moments


def scatter(optimizer: Any, model: nn.Module, zero_stage: int, moments: dict[str, Tensor]) -> None:
    """Give `optimizer` the `moments` that `gather` returned, each rank its part.

    Raises CheckpointError if they are not those of this model.
    """
    if not moments:
        return
    _check(model, moments)
    inner = _torch_optimizer(optimizer, zero_stage)
    fused = any(group.get("fused") for group in inner.param_groups)
    for piece in _pieces(optimizer, zero_stage):
        state = inner.state[piece]
        state[STEP] = moments[STEP][0].clone().to(piece.device if fused else "cpu")
        for key in MOMENTS:
            state[key] = torch.zeros_like(piece, memory_format=torch.preserve_format)
    if zero_stage in (1, 2):
        _link(optimizer)
    for name, parameter in model.named_parameters():
        for key in MOMENTS:
            whole = moments[f"{name}.{key}"]
            if zero_stage == 0:
                inner.state[parameter][key].copy_(whole)
            elif zero_stage == 3:
                _own_part(optimizer, inner, parameter, key).copy_(_cut(whole, parameter))
            else:
                parameter.set_full_hp_param(whole, key)  # type: ignore[attr-defined]


def _pieces(optimizer: Any, zero_stage: int) -> list[Tensor]:
    """Return the tensors this rank's AdamW works on: parameters, or flat parts of many."""
    if zero_stage == 0:
        return [p for group in optimizer.param_groups for p in group["params"]]
    if zero_stage == 3:
        return list(optimizer.fp32_partitioned_groups_flat)
    return list(optimizer.single_partition_of_fp32_groups)


def _link(optimizer: Any) -> None:
    """Let each parameter find its part of the moments, in stages 1 and 2.

    DeepSpeed does so itself, but after the first group's first step: the others have none then.
    """
    optimizer._hp_optimizer_states_linked = False
    optimizer._lazy_init_hp_params_optimizer_state()


def _torch_optimizer(optimizer: Any, zero_stage: int) -> torch.optim.Optimizer:
    return optimizer if zero_stage == 0 else optimizer.optimizer


def _own_part(optimizer: Any, inner: Any, parameter: Any, key: str) -> Tensor:
    """Return the view of this rank's part of a parameter's moment, in stage 3."""
    group, start, length = optimizer.grad_position[optimizer.get_param_id(parameter)]
    piece = optimizer.fp32_partitioned_groups_flat[group]
    return inner.state[piece][key].narrow(0, start, length)


def _cut(whole: Tensor, parameter: Any) -> Tensor:
    """Return this rank's part of `whole`, zeros beyond its end, as stage 3 cuts parameters."""
    length = parameter.partition_numel()
    start = length * distributed.rank()
    part = whole.flatten()[start : start + length]
    return torch.nn.functional.pad(part, (0, length - part.numel()))


def _check(model: nn.Module, moments: dict[str, Tensor]) -> None:
    wanted = {f"{name}.{key}": shape for name, shape in _shapes(model) for key in MOMENTS}
    wanted[STEP] = (1,)
    for name in sorted(wanted.keys() | moments.keys()):
        found = tuple(moments[name].shape) if name in moments else None
        if found != wanted.get(name):
            raise CheckpointError(
                f"the optimizer state does not fit the model: {name} has the shape {found}, "
                f"not {wanted.get(name)}"
            )


def _shapes(model: nn.Module) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, parameter in model.named_parameters():
        # stage 3 leaves an empty tensor and remembers the shape
        yield name, tuple(getattr(parameter, "ds_shape", parameter.shape))
