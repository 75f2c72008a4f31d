"""The command line: launcher arguments, and one line instead of a traceback for a user's mistake."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from typing import Any

from slayformer.errors import UserError, nearest

EXIT_USER_ERROR = 2


def strip_launcher_arguments(arguments: list[str]) -> list[str]:
    """Drop `--local_rank=N` and `--local-rank N`, which launchers append and Hydra rejects."""
    kept, skip = [], False
    for argument in arguments:
        if skip:
            skip = False
        elif re.fullmatch(r"--local[-_]rank", argument):
            skip = True
        elif not re.match(r"--local[-_]rank=", argument):
            kept.append(argument)
    return kept


def entry_point(main: Callable[[], Any]) -> None:
    """Run a Hydra `main`; a user's mistake ends it with one line on stderr and exit code 2.

    HYDRA_FULL_ERROR=1 in the environment shows the traceback instead. Under a launcher only
    rank 0 prints.
    """
    sys.argv[1:] = strip_launcher_arguments(sys.argv[1:])
    show_traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
    # Hydra would print its own errors and exit with 1; this hands them to us
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        main()
    except Exception as error:
        message = user_message(error)
        if message is None or show_traceback:
            raise
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {message}", file=sys.stderr, flush=True)
        sys.exit(EXIT_USER_ERROR)


def user_message(error: BaseException) -> str | None:
    """Return the one line to show for `error`, or None if it is not a user's mistake."""
    if isinstance(error, UserError):
        return " ".join(str(error).split())
    from hydra.errors import HydraException, MissingConfigException
    from omegaconf.errors import OmegaConfBaseException

    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.rpartition("/")
        if not group or not error.options:
            return f"no configuration named {error.missing_cfg_file}"
        return f"{group}={name}: {nearest(name, error.options)}"
    if isinstance(error, HydraException | OmegaConfBaseException):
        text = " ".join(str(error).split())
        unknown = re.search(r"Could not override '([^']+)'.*?(?:Key '([^']+)' is not in struct)", text)
        if unknown:
            return f"{unknown.group(1)}: unknown key; {_known_keys_hint(unknown.group(1))}"
        return text
    return None


def _known_keys_hint(path: str) -> str:
    """Return the hint for an unknown dotted `path`: the nearest of all keys in configs/train.yaml."""
    from hydra import compose
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import DictConfig, OmegaConf

    if not GlobalHydra.instance().is_initialized():
        return "see --help for every key"
    name = "eval" if os.path.basename(sys.argv[0]).startswith("eval") else "train"
    known: list[str] = []

    def collect(node: DictConfig, prefix: str) -> None:
        for key in node:
            known.append(f"{prefix}{key}")
            child = OmegaConf.select(node, str(key), throw_on_missing=False)
            if isinstance(child, DictConfig):
                collect(child, f"{prefix}{key}.")

    collect(compose(config_name=name), "")
    import difflib

    close = difflib.get_close_matches(path, known, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(close)}?" if close else "see --help for every key"
