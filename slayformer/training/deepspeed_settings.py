"""What DeepSpeed is told: our settings, the user's in them, and whether it looks at all of them."""

from __future__ import annotations

import difflib
import sys
from typing import Any

from slayformer.config import TrainConfig
from slayformer.config_checks import OWN_DEEPSPEED_SETTINGS
from slayformer.errors import ConfigError
from slayformer.training import distributed
from slayformer.training.memory import REDUCE_BUCKET_ELEMENTS

# parameters smaller than this many elements stay whole on every device in stage 3
STAGE3_WHOLE_BELOW = 100_000


# what DeepSpeed has given up
REFUSED = {"sparse_attention"}


class Settings(dict[str, Any]):
    """A dictionary that remembers which of its own keys, not of those inside, were asked for."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(settings)
        self._asked_for: set[str] = set()

    def __contains__(self, key: object) -> bool:
        self._asked_for.add(str(key))
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self._asked_for.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of `key`, else `default`."""
        self._asked_for.add(key)
        return super().get(key, default)

    def keys(self) -> Any:
        """Return this itself, so that `key in settings.keys()` counts as well."""
        return self

    def check_all_read(self, given: dict[str, Any], *, again: bool) -> None:
        """Raise ConfigError for a key of `given`, the user's part, that nobody has asked for.

        `again`: a run goes on, and these may be its options from when they were ignored.
        """
        for key, value in given.items():
            if key not in self._asked_for:
                # others it asks for to refuse them
                known = self._asked_for - REFUSED
                close = difflib.get_close_matches(key, known, n=1, cutoff=0.75)
                meant = f"did you mean {close[0]}?" if close else "its documentation lists them"
                if close and close[0] in OWN_DEEPSPEED_SETTINGS:
                    meant = OWN_DEEPSPEED_SETTINGS[close[0]]
                hint = f"DeepSpeed has no such setting and would ignore it; {meant}"
                if again:
                    hint += "; to go on without: engine.deepspeed=null"
                raise ConfigError(f"engine.deepspeed.{key}", value, hint)


def deepspeed_settings(config: TrainConfig, parameters: int) -> Settings:
    """Return DeepSpeed's configuration: fp32 weights and reductions, nothing scheduled by it.

    `engine.deepspeed` adds to it.
    """
    engine = config.engine
    zero: dict[str, Any] = {"stage": engine.zero_stage}
    if engine.zero_stage > 0:
        # it allocates the whole bucket, however small the model
        zero["reduce_bucket_size"] = min(REDUCE_BUCKET_ELEMENTS, parameters)
    if engine.zero_stage in (1, 2) and distributed.world_size() == 1:
        # nothing is reduced: gradients stay where they are instead of being copied together
        zero |= {"contiguous_gradients": False, "reduce_bucket_size": 1}
    if engine.zero_stage == 3:
        zero["stage3_param_persistence_threshold"] = STAGE3_WHOLE_BELOW
    if engine.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": config.batch.micro_samples,
        "gradient_accumulation_steps": 1,
        "steps_per_print": sys.maxsize,
        "zero_optimization": zero,
        # torch's AdamW is no optimizer of DeepSpeed's own, on a GPU or offloaded to the CPU, where
        # its fused form needs no extension compiled
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "communication_data_type": "fp32",
        # its default is 1; without ZeRO `step` clips
        "gradient_clipping": config.optimizer.gradient_clipping if engine.zero_stage > 0 else 0.0,
    }
    return Settings(_merged(settings, engine.deepspeed or {}))


def _merged(settings: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Return `settings` with `more` in it, dictionaries inside merged too."""
    both = dict(settings)
    for key, value in more.items():
        inner = both.get(key)
        if isinstance(inner, dict):
            if not isinstance(value, dict):
                hint = "must be a mapping: the settings in it are added to ours"
                raise ConfigError(f"engine.deepspeed.{key}", value, hint)
            value = _merged(inner, value)
        both[key] = value
    return both
