"""Models named as on the Hugging Face hub, `owner/model`, wherever a folder of one can be given."""

from __future__ import annotations

import re
from pathlib import Path

from slayformer.errors import ConfigError

# no pickles, no code
WANTED = ["*.json", "*.safetensors", "merges.txt", "training.yaml"]


def is_hub_name(given: str) -> bool:
    """Return whether `given` names a model of the hub: `owner/model`, and no folder `owner` here.

    So a mistyped `runs/NAME` stays a mistyped path.
    """
    owner = Path(given).parent
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", given) is not None and not owner.exists()


def model_folder(field: str, given: str) -> Path:
    """Return the folder of a model: `given`, or what was downloaded of that name on the hub.

    Raises ConfigError, naming `field`, if the hub does not give it.
    """
    if not is_hub_name(given):
        return Path(given)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(given, allow_patterns=WANTED))
    # networks, names and permissions fail in many ways, each with an exception of its own
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        hint = f"there is no such folder, and the Hugging Face hub does not give it: {reason}"
        raise ConfigError(field, given, hint) from error
