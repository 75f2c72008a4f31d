"""`import slayformer` makes transformers know its models, without importing transformers.

Where transformers' Auto classes are loaded already, ours are registered at once; otherwise as soon
as they are.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

# module of transformers → ours that registers itself with it
REGISTERS = {
    "transformers.models.auto.configuration_auto": "slayformer.huggingface.configuration",
    "transformers.models.auto.modeling_auto": "slayformer.huggingface.modeling",
}


def register_when_loaded() -> None:
    """Register with each Auto module of transformers now or when it is imported."""
    for theirs, ours in REGISTERS.items():
        if theirs in sys.modules:
            importlib.import_module(ours)
    if not REGISTERS.keys() <= sys.modules.keys():
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds the Auto modules where they are, with a loader that then registers ours."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in REGISTERS:
            return None
        # the search below must not come back here
        sys.meta_path.remove(self)
        try:
            spec = find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            spec.loader = _RegisteringLoader(spec.loader, REGISTERS[name])
        return spec


class _RegisteringLoader(Loader):
    """Loads a module as `loader` would, then imports module `then`."""

    def __init__(self, loader: Loader, then: str) -> None:
        self.loader, self.then = loader, then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # what asks a module for its loader gets the real one, as without us
        assert module.__spec__ is not None
        module.__loader__ = module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        importlib.import_module(self.then)
