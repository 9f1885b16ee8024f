"""The drafters' names and arguments, checked without the drafters themselves, which import JAX or numba."""

from typing import Any

from drafters.arguments import (
    Arguments,
    HistoSpecArguments,
    PromptLookupArguments,
    QuantizedArguments,
    SmallModelArguments,
    SrtArguments,
    SuffixDecodingArguments,
    checked,
)
from drafters.eagle.arguments import BlockArguments, EagleArguments
from rljax.config.speculation import SpeculationConfig
from rljax.errors import ConfigError, known_names

# By name: the arguments that `speculation.args` may hold.
ARGUMENTS: dict[str, type[Arguments]] = {
    "block": BlockArguments,
    "eagle": EagleArguments,
    "histospec": HistoSpecArguments,
    "prompt_lookup": PromptLookupArguments,
    "quantized": QuantizedArguments,
    "small_model": SmallModelArguments,
    "srt": SrtArguments,
    "suffix_decoding": SuffixDecodingArguments,
}


def check_drafters(config: SpeculationConfig) -> None:
    """Checks the names of a run's drafters and their arguments: a command does so before it imports JAX. A
    class of the user's own, `module:Class`, is checked when it is imported.

    Raises:
      ConfigError: an unknown name or argument (with the nearest known one), or an invalid value.
    """
    for name, kind in config.kinds.items():
        if is_own(kind):
            continue
        key, args_key = keys_of(config, name)
        arguments = checked_arguments(key, args_key, kind, config.arguments[name])
        if isinstance(arguments, HistoSpecArguments) and (arguments.max_window or 0) > config.max_drafts:
            raise ConfigError(
                f"{args_key}.max_window: {arguments.max_window} is more than speculation.max_drafts"
                f" {config.max_drafts}, so no window gets that wide; raise the latter, or set null"
            )


def is_own(kind: str) -> bool:
    """Returns whether a drafter is a class of the user's, by its import path."""
    return ":" in kind


def check_name(key: str, name: str, *others: str) -> None:
    """Raises a ConfigError about `key` unless `name` is a drafter's, an import path, or one of `others`."""
    if not is_own(name) and name not in ARGUMENTS and name not in others:
        known = known_names(name, [*ARGUMENTS, *others])
        raise ConfigError(f"{key}: unknown drafter {name!r}; {known}, or a class of yours as module:Class")


def checked_arguments(key: str, args_key: str, name: str, args: dict[str, Any]) -> Arguments:
    """Returns the arguments of the drafter `name`; the keys that hold name and arguments are for errors."""
    check_name(key, name)
    return checked(args_key, name, ARGUMENTS[name], args)


def keys_of(config: SpeculationConfig, name: str) -> tuple[str, str]:
    """Returns the keys that hold a drafter's kind and its arguments."""
    if name == config.drafter:
        return "speculation.drafter", "speculation.args"
    args_key = f"speculation.others.{name}"
    return (f"{args_key}.kind" if "kind" in config.others[name] else "speculation.others"), args_key
