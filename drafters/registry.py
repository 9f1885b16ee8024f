"""Finds a drafter by the name a config gives it, and checks its arguments before anything is compiled."""

import inspect
from collections.abc import Callable
from typing import Any

from drafters.base import Drafter
from drafters.history import RolloutHistory
from drafters.histospec import HistoSpec
from drafters.suffix import SuffixDrafter
from rljax.errors import ConfigError, known_names


def prompt_lookup(min_match: int = 2, max_match: int = 16, noise_ranking: bool = False) -> Drafter:
    """Continues what stands in the request's own prompt and response."""
    return SuffixDrafter("request", None, True, min_match, max_match, noise_ranking=noise_ranking)


def srt(
    rollouts: int = 2,
    max_tokens: int = 50_000_000,
    spill_dir: str | None = None,
    live: bool = True,
    min_match: int = 1,
    max_match: int = 48,
    budget_per_match: float = 4.0,
    novelty: float = 0.5,
    noise_ranking: bool = False,
    noise_temperature: float = 1.0,
) -> Drafter:
    """Continues what was answered to the same prompt, in earlier rollouts and in this one."""
    return SuffixDrafter(
        "prompt",
        RolloutHistory(rollouts, max_tokens, spill_dir),
        live,
        min_match,
        max_match,
        budget_per_match,
        novelty,
        noise_ranking,
        noise_temperature,
    )


def suffix_decoding(
    rollouts: int = 2,
    max_tokens: int = 50_000_000,
    live: bool = True,
    min_match: int = 2,
    max_match: int = 48,
    budget_per_match: float = 4.0,
    novelty: float = 0.5,
    noise_ranking: bool = False,
    noise_temperature: float = 1.0,
) -> Drafter:
    """Continues what was answered to any prompt."""
    return SuffixDrafter(
        "all",
        RolloutHistory(rollouts, max_tokens),
        live,
        min_match,
        max_match,
        budget_per_match,
        novelty,
        noise_ranking,
        noise_temperature,
    )


def histospec(
    max_tokens: int = 50_000_000,
    spill_dir: str | None = None,
    min_match: int = 3,
    max_match: int = 7,
    first_window: int = 2,
    window_step: int = 2,
    max_window: int = 32,
) -> Drafter:
    """Continues the best-rewarded branch of the prompt's last rollout, in an adaptive window."""
    history = RolloutHistory(1, max_tokens, spill_dir)
    return HistoSpec(history, min_match, max_match, first_window, window_step, max_window)


DRAFTERS: dict[str, Callable[..., Drafter]] = {
    "histospec": histospec,
    "prompt_lookup": prompt_lookup,
    "srt": srt,
    "suffix_decoding": suffix_decoding,
}


def make_drafter(name: str, **args: Any) -> Drafter:
    """Builds a drafter.

    Args:
      name: a key of `DRAFTERS`.
      **args: the drafter's own arguments (`speculation.args` of a config).

    Raises:
      ConfigError: an unknown name or argument (with the nearest known one), or a value of the wrong type.
    """
    if name not in DRAFTERS:
        raise ConfigError(f"speculation.drafter: unknown drafter {name!r}; {known_names(name, DRAFTERS)}")
    factory = DRAFTERS[name]
    known = inspect.signature(factory).parameters
    for argument, value in args.items():
        if argument not in known:
            raise ConfigError(
                f"speculation.args.{argument}: {name} has no such argument; {known_names(argument, known)}"
            )
        _check_type(argument, value, known[argument].annotation)
    match = {key: args.get(key, known[key].default) for key in ("min_match", "max_match") if key in known}
    if len(match) == 2 and match["min_match"] > match["max_match"]:
        raise ConfigError(
            f"speculation.args.min_match: {match['min_match']} is more than max_match {match['max_match']}"
        )
    try:
        return factory(**args)
    except ValueError as error:
        raise ConfigError(f"speculation.args: {name}: {error}") from error


def _check_type(argument: str, value: Any, wanted: Any) -> None:
    allowed = {int: int, float: (int, float), bool: bool}.get(wanted, (str, type(None)))
    is_flag = isinstance(value, bool)
    if not isinstance(value, allowed) or (is_flag and wanted is not bool):
        kind = {int: "a whole number", float: "a number", bool: "true or false"}.get(wanted, "text or null")
        raise ConfigError(f"speculation.args.{argument}: should be {kind}, got {value!r}")
    if wanted in (int, float) and value < 0:
        raise ConfigError(f"speculation.args.{argument}: should not be negative, got {value!r}")
