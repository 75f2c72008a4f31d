"""What a layer remembers while transformers' `generate` decodes.

`DynamicCache(config=model.config)`, which is what `generate` makes, holds one `StateLayer` a
layer. A linear mechanism's state has the same size after any number of tokens; softmax's and the
exact kernels' keys and values grow.

Shape suffixes: B batch.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from slayformer.attention.states import map_tensors, tensor_bytes
from slayformer.errors import ConfigError
from slayformer.huggingface.configuration import LAYER_TYPE


class StateLayer(CacheLayerMixin):
    """A state of any kind: dataclasses, tuples and lists of tensors whose first axis is the batch.

    Nothing can be taken back out of a sum, so a state cannot be cropped: assisted decoding, which
    would need that, is refused by transformers.
    """

    # transformers makes this class for each layer of that type
    _layer_type = LAYER_TYPE
    supports_early_init = False

    def __init__(self, **_: Any) -> None:
        super().__init__()
        self.state: Any = None
        self.tokens = 0

    def advance(self, state: Any, tokens: int) -> None:
        """Keep `state`, which `tokens` tokens (padding included) have led to from the last one."""
        self.state = state
        self.tokens += tokens

    def state_bytes(self) -> int:
        """Return the bytes of all tensors in the state."""
        return tensor_bytes(self.state)

    def get_seq_length(self) -> int:
        """Return how many tokens have been seen, padding included."""
        return self.tokens

    def get_max_length(self) -> int:
        """Return -1: there is no maximum of the cache's own."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (tokens seen after `query_length` more, 0)."""
        return self.tokens + query_length, 0

    def reset(self) -> None:
        """Forget everything."""
        self.state, self.tokens = None, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Give row i the state of row `beam_idx[i]`."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices`."""
        self.state = map_tensors(self.state, lambda x: x.index_select(0, indices.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Give every row `repeats` times."""
        self.state = map_tensors(self.state, lambda x: x.repeat_interleave(repeats, dim=0))

    def crop(self, tokens_to_remove: int) -> None:
        """Raise: a sum over tokens does not tell what one of them has added."""
        raise ConfigError("cache", "crop", "a state cannot go back to an earlier token")

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: a state comes from its mechanism, whole."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Raise: keys and values are the mechanism's own business."""
        raise ConfigError("cache", LAYER_TYPE, "holds states of SLAYformer's models, not keys")


def state_layers(cache: Cache, count: int) -> list[StateLayer]:
    """Return the layers of `cache`, which must be `count` of ours.

    Raises ConfigError if they are not.
    """
    layers = [layer for layer in cache.layers if isinstance(layer, StateLayer)]
    if len(layers) != count or len(cache.layers) != count:
        hint = "make it with DynamicCache(config=model.config), or let generate() make it"
        raise ConfigError("cache", type(cache).__name__, hint)
    return layers
