"""The command line: compose the configuration; one line, not a traceback, for a user's mistake."""

from __future__ import annotations

import atexit
import difflib
import errno
import io
import os
import re
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from slayformer.errors import UserError, nearest

if TYPE_CHECKING:
    from omegaconf import DictConfig

EXIT_USER_ERROR = 2
# what the user's disk or permissions say no to, wherever it happens
USERS_ERRNOS = {
    errno.EACCES,
    errno.EDQUOT,
    errno.EFBIG,
    errno.ENAMETOOLONG,
    errno.ENOSPC,
    errno.EPERM,
    errno.EROFS,
}
EXIT_INTERRUPTED = 130
# what launchers tell the processes that they start
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
OTHER_RANKS_WAIT_S = 5
CONFIGURATIONS = Path(__file__).resolve().parent.parent / "configs"
# apart, because there `data` and `attention` are plain options and not groups of train.py
COMMANDS = CONFIGURATIONS / "commands"
# what is registered with atexit and must not be done after an exception has ended the command
only_after_success: list[Callable[[], None]] = []


def entry_point(main: Callable[[], Any]) -> None:
    """Run `main`; a user's mistake ends it with one line on stderr and exit code 2.

    HYDRA_FULL_ERROR=1 in the environment shows the traceback instead. Under a launcher rank 0
    speaks first: what every rank finds is told once, what another rank alone finds a little later.
    """
    # before torch starts its threads: on a shared machine threads that spin while they wait keep
    # the ones they wait for from running (figures in LOG.md)
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    _print_whatever()
    try:
        try:
            main()
        except BaseException:
            for task in only_after_success:
                atexit.unregister(task)
            raise
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # the reader, `head` for example, has seen enough; nothing is left to flush at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (UserError, OSError) as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        if isinstance(error, OSError):
            if error.errno not in USERS_ERRNOS:
                raise
            where_it_failed = [str(error.filename)] if error.filename else []
            error = UserError(": ".join([*where_it_failed, error.strerror or str(error)]))
        rank = os.environ.get("RANK", "0")
        if rank != "0":
            # once rank 0 has told it and ended, the launcher ends this process here
            time.sleep(OTHER_RANKS_WAIT_S)
        where = [] if rank == "0" else [f"rank {rank}:"]
        print("error:", *where, *str(error).split(), file=sys.stderr, flush=True)
        sys.exit(EXIT_USER_ERROR)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        sys.exit(EXIT_INTERRUPTED)


def _print_whatever() -> None:
    """Have letters that the terminal's encoding lacks, in a sample for example, end no command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def compose(
    config_name: str, arguments: list[str] | None = None, folder: Path = CONFIGURATIONS
) -> DictConfig:
    """Return `folder`/`config_name`.yaml with the overrides in `arguments`.

    None takes the arguments of the command line.
    An experiment and attention.backend, which no YAML file repeats, need not have Hydra's plus, nor
    the regular expression of document_start and letters beyond ASCII their quotes.
    Hydra's flags that only show something (`--help`, `--cfg job`) print it and exit with 0.
    Raises UserError for a flag, override, group option or key that does not exist.
    """
    import hydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    arguments = _as_typed(sys.argv[1:] if arguments is None else arguments)
    arguments = [re.sub("^experiment=", "+experiment=", argument) for argument in arguments]
    arguments = [re.sub(r"^attention\.backend=", r"++\g<0>", argument) for argument in arguments]
    arguments = [
        re.sub(r"^([\w.]*document_start)=(?!['\"]|null$)(.+)", _quote_value, argument)
        for argument in arguments
    ]
    _check_flags(arguments)
    composed: list[DictConfig] = []

    @hydra.main(version_base="1.3", config_path=str(folder), config_name=config_name)
    def capture(configuration: DictConfig) -> None:
        composed.append(configuration)

    previous = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    # Hydra reads its arguments here, and prints errors in its own way unless told to raise them
    sys.argv, os.environ["HYDRA_FULL_ERROR"] = [sys.argv[0], *arguments], "1"
    try:
        capture()
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise UserError(_composition_message(error, arguments)) from error
    finally:
        sys.argv = previous[0]
        del os.environ["HYDRA_FULL_ERROR"]
        if previous[1] is not None:
            os.environ["HYDRA_FULL_ERROR"] = previous[1]
    if not composed:
        sys.exit(0)
    _refuse_without_effect(composed[0], arguments)
    return composed[0]


def own_options(arguments: list[str]) -> DictConfig | None:
    """Return the options a run was started with, with the changes in `arguments`.

    That is for `run_directory=FOLDER resume=auto` with a config.yaml in the folder; beside them may
    stand values such as budget.updates=200 and groups such as engine=zero2. None for anything else:
    an experiment and options of the mechanism are composed anew.
    """
    import yaml  # type: ignore[import-untyped]
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException
    from omegaconf import OmegaConf

    try:
        overrides = OverridesParser.create().parse_overrides(_as_typed(arguments))
    except HydraException:
        return None
    given = {one.key_or_group: one for one in overrides}
    if not given.keys() >= {"run_directory", "resume"} or given["resume"].value() != "auto":
        return None
    rooms = {key.partition(".")[0] for key in given}
    if rooms & {"attention", "experiment"} or any(one.is_delete() for one in overrides):
        return None
    file = Path(str(given["run_directory"].value())).expanduser() / "config.yaml"
    if not file.is_file():
        return None
    try:
        own = OmegaConf.load(file)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{file} cannot be read: {error}") from error
    known = _dotted(OmegaConf.to_container(own))  # type: ignore[arg-type]
    if not given.keys() <= known.keys():
        return None
    # what is further in, such as batch.ramp, is a value, and so is what is written {A: 1}
    groups = [
        key
        for key, one in given.items()
        if "." not in key and isinstance(known[key], dict) and not isinstance(one.value(), dict)
    ]
    composed = compose("train", [given[key].input_line or "" for key in groups])
    for key in groups:
        OmegaConf.update(own, key, composed[key], merge=False)
    for key in given.keys() - set(groups):
        OmegaConf.update(own, key, given[key].value())
    return own  # type: ignore[return-value]


def _refuse_without_effect(composed: DictConfig, arguments: list[str]) -> None:
    """Raise ConfigError for an option of the mechanism in `arguments` that it does not use."""
    from omegaconf import OmegaConf

    prefix = "attention."
    given = dict(a.lstrip("+").split("=", 1) for a in arguments if a.lstrip("+").startswith(prefix))
    if not given:
        return
    from slayformer.config_loading import load_attention_config, refuse_without_effect

    config = load_attention_config(OmegaConf.to_container(composed.attention))
    refuse_without_effect(config, {k.removeprefix(prefix): v for k, v in given.items()})


def _quote_value(match: re.Match[str]) -> str:
    return f"{match[1]}={quoted(match[2])}"


def quoted(value: str) -> str:
    """Return `value` as an override can hold it: quoted if Hydra's grammar needs it."""
    if re.fullmatch(r"[\w./:-]+", value, re.ASCII):
        return value
    # in Hydra's grammar a backslash escapes only in front of a quote
    escaped = re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), value)
    return f"'{escaped}'"


def strip_launcher_arguments(arguments: list[str]) -> list[str]:
    """Drop `--local_rank=N` and `--local-rank N`, which launchers add and Hydra rejects."""
    kept, skip = [], False
    for argument in arguments:
        if skip:
            skip = False
        elif re.fullmatch(r"--local[-_]rank", argument):
            skip = True
        elif not re.match(r"--local[-_]rank=", argument):
            kept.append(argument)
    return kept


def _as_typed(arguments: list[str]) -> list[str]:
    """Return what the user typed: without a launcher's arguments, and quoted where Hydra needs it.

    Its grammar knows no letter beyond ASCII outside quotes, as in data.source.path=Bücher.
    """
    letters = r"([\w.+~@/]+)=([\w ./:+%@?|*-]*[^\W\d_a-zA-Z][\w ./:+%@?|*-]*)"
    return [
        re.sub(f"^{letters}$", _quote_value, argument)
        for argument in strip_launcher_arguments(arguments)
    ]


def multirun_arguments(arguments: list[str]) -> tuple[list[str], list[str]] | None:
    """Return the overrides and the other flags of a command with -m or --multirun, else None.

    Raises UserError for a flag that Hydra does not know.
    """
    arguments = _as_typed(arguments)
    flags = _parse_flags(arguments)
    if not flags.multirun:
        return None
    ours = {"-m", "--multirun", *flags.overrides}
    return flags.overrides, [argument for argument in arguments if argument not in ours]


def _parse_flags(arguments: list[str]) -> Any:
    from hydra._internal.utils import get_args_parser

    def refuse(message: str) -> NoReturn:
        raise UserError(f"{message}; options are written key=value, --help lists them")

    parser = get_args_parser()
    parser.error = refuse  # type: ignore[method-assign]
    return parser.parse_args(arguments)


def _check_flags(arguments: list[str]) -> None:
    """Raise UserError for a flag that Hydra does not know or that has no meaning here."""
    flags = _parse_flags(arguments)
    if flags.multirun:
        raise UserError("--multirun: only train.py has it; scripts/compare.py makes several runs")
    if flags.experimental_rerun:
        raise UserError("--experimental-rerun: not supported")
    if flags.config_path:
        raise UserError("--config-path: not supported; --config-dir=FOLDER adds a folder")


def _composition_message(error: Exception, arguments: list[str]) -> str:
    """Return what to tell about an error that Hydra raised while it composed `arguments`."""
    from hydra.errors import MissingConfigException, OverrideParseException
    from omegaconf.errors import ConfigAttributeError, ConfigKeyError

    text = " ".join(str(error).split())
    cause = error.__cause__
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.rpartition("/")
        if group and error.options:
            return f"{group}={name}: {nearest(name, error.options)}"
        return f"no configuration named {error.missing_cfg_file}"
    if isinstance(error, OverrideParseException):
        return f"{error.override}: not understood; {_how_to_write(error.override)}"
    sweep = re.match(r"(?:Ambiguous value for argument|Sweep parameters) '(.*)' ?(?:1\.|req)", text)
    if sweep:
        key, _, value = sweep[1].partition("=")
        hint = f"a list is {key}=[A,B], train.py -m trains with each value"
        return f"{sweep[1]}: one value wanted; {hint}, text is quoted: {_for_a_shell(key, value)}"
    without_default = re.match(r"Could not override .* No match in .* use \+(.*)", text)
    if without_default:
        return f"{without_default[1]}: nothing to replace; write +{without_default[1]}"
    there = re.match(r"Could not append .* Either remove \+ prefix: '(.*)' Or add a second", text)
    if there:
        return f"+{there[1]}: already there; write {there[1]}"
    if isinstance(cause, ConfigAttributeError | ConfigKeyError) and cause.full_key:
        path = re.sub(r"^Could not override '(.*?)'.*", r"\1", text)
        # the key may be inside the value, as in data.source={path: x}
        path = cause.full_key if cause.full_key.startswith(f"{path}.") else path
        return f"{path}: unknown key; {_unknown_key_hint(path, cause.parent_node._get_root())}"
    if isinstance(error, ValueError):
        return f"{text} (in: {' '.join(arguments)})"
    return text


def _how_to_write(override: str) -> str:
    """Return what would make an option of `override`, which Hydra's grammar does not take."""
    key, equals, value = override.partition("=")
    if not key or not equals:
        return "options are written key=value"
    if value[:1] in ("[", "{"):
        written = "key=[A,B]" if value[0] == "[" else "key={A: 1, B: 2}"
        return f"this is written {written}, with quotes around what is not letters and digits"
    return f"text like this is quoted: {_for_a_shell(key, value)}"


def _for_a_shell(key: str, value: str) -> str:
    """Return the option with its text in the quotes that Hydra needs, and those a shell takes."""
    written = f"{key}={quoted(value)}"
    return shlex.quote(written) if re.search(r'["$`\\!]', written) else f'"{written}"'


def _dotted(values: dict[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Return every value of nested dictionaries by its dotted key, inner dictionaries too."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found[f"{prefix}{key}"] = value
        if isinstance(value, dict):
            found |= _dotted(value, f"{prefix}{key}.")
    return found


def _unknown_key_hint(path: str, root: DictConfig) -> str:
    """Return the hint for `path`, which the composed configuration `root` does not have."""
    from omegaconf import OmegaConf

    values = _dotted(OmegaConf.to_container(root, resolve=False))  # type: ignore[arg-type]
    known = [key for key in values if path.startswith("hydra") or not key.startswith("hydra")]
    parent, _, last = path.rpartition(".")
    # the failed override has left an empty group where a null or a single value was
    if values.get(parent) == {}:
        return f'{parent} has no fields; if it is null give all: "{parent}={{{last}: ..., ...}}"'
    close = [key for key in known if key.rpartition(".")[2] == last]
    siblings = [key.removeprefix(f"{parent}.") for key in known if key.rpartition(".")[0] == parent]
    if parent == "attention" and "name" in siblings:
        from slayformer.config_loading import unknown_option_hint

        return unknown_option_hint(last, values[parent])
    if having := _options_with(path):
        return f"it comes with {' or '.join(having)}"
    if parent and siblings and not close:
        return nearest(last, siblings)
    close = close or difflib.get_close_matches(path, known)
    return f"did you mean {' or '.join(close)}?" if close else "--help lists every key"


def _options_with(path: str) -> list[str]:
    """Return the options of the group of `path` whose files have that key: data=text and so on."""
    from omegaconf import OmegaConf

    group, _, key = path.partition(".")
    files = sorted((CONFIGURATIONS / group).glob("*.yaml")) if key else []
    contents = {file.stem: OmegaConf.to_container(OmegaConf.load(file)) for file in files}
    return [f"{group}={name}" for name, own in contents.items() if key in _dotted(own)]  # type: ignore[arg-type]
