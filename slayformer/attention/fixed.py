"""What follows from a mechanism's own tensors alone, kept from call to call until one changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from slayformer.attention.projection import Projection


class Prepared:
    """A mechanism's tensors and the normaliser's offset in one dtype, and the map they make."""

    def __init__(
        self,
        tensors: tuple[Tensor, ...],
        offset: Tensor | float,
        project: Callable[..., Projection | None],
    ) -> None:
        self.tensors, self.offset = tensors, offset
        self._project = project
        self._made: tuple[Projection | None] | None = None

    def projection(self, *tensors: Tensor) -> Projection | None:
        """Return the map that `tensors` make as activations of a product, kept if they are ours."""
        if any(given is not own for given, own in zip(tensors, self.tensors, strict=True)):
            return self._project(*tensors)
        if self._made is None:
            self._made = (self._project(*tensors),)
        return self._made[0]


class Fixed:
    """Keeps the last thing made from a module's tensors, where they carry no gradients.

    Buffers are known by address and version. Parameters are compared by value, because optimizers,
    averages of weights and sharding change them without a trace: that pays where they are small
    and on the CPU, and elsewhere everything is made anew.
    """

    def __init__(self) -> None:
        self._key: tuple[Any, ...] = ()
        self._buffers: tuple[Tensor, ...] = ()
        self._values: tuple[Tensor, ...] = ()
        self._made: Any = None

    def __call__(self, module: nn.Module, kind: Any, make: Callable[[], Any]) -> Any:
        """Return what `make` makes of `module` for `kind`, or made before of equal tensors."""
        # a graph compiler follows what is made, and reads neither addresses nor versions
        if torch.compiler.is_compiling():
            return make()
        parameters, buffers = [], []
        for part in module.modules():
            parameters += [x for x in part._parameters.values() if x is not None]
            buffers += [x for x in part._buffers.values() if x is not None]
        learns = any(x.requires_grad for x in parameters) and torch.is_grad_enabled()
        # sharded ones are empty until they are read
        if learns or any(x.device.type != "cpu" or x.numel() == 0 for x in parameters):
            return make()
        if any(x.requires_grad or x.is_inference() for x in buffers):
            return make()
        # what inference mode makes is of no use outside
        key = (kind, torch.is_inference_mode_enabled(), *map(_identity, buffers))
        if key != self._key or not self._holds(parameters, buffers):
            self._made = make()
            self._key, self._buffers = key, tuple(buffers)
            self._values = tuple(x.detach().clone() for x in parameters)
        return self._made

    def _holds(self, parameters: Sequence[Tensor], buffers: Sequence[Tensor]) -> bool:
        """Return whether these tensors are those of the last time."""
        if any(new is not old for new, old in zip(buffers, self._buffers, strict=True)):
            return False
        return len(parameters) == len(self._values) and all(
            new.dtype == old.dtype and torch.equal(new, old)
            for new, old in zip(parameters, self._values, strict=True)
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # copies and pickles of a module begin without anything kept
        return Fixed, ()


def _identity(x: Tensor) -> tuple[int, int]:
    return x.data_ptr(), x._version
