"""Finds a drafter by the name a config gives it, and checks its arguments before anything is compiled."""

from collections.abc import Callable
from typing import Any

from drafters.arguments import Arguments, checked
from drafters.base import Drafter
from drafters.histospec import HistoSpec, HistoSpecArguments
from drafters.quantized import QuantizedArguments, QuantizedDrafter
from drafters.suffix import (
    PromptLookupArguments,
    SrtArguments,
    SuffixDecodingArguments,
    prompt_lookup,
    srt,
    suffix_decoding,
)
from rljax.errors import ConfigError, known_names

# By name: what `speculation.args` may hold, and what makes the drafter from it.
DRAFTERS: dict[str, tuple[type[Arguments], Callable[[Any], Drafter]]] = {
    "histospec": (HistoSpecArguments, HistoSpec),
    "prompt_lookup": (PromptLookupArguments, prompt_lookup),
    "quantized": (QuantizedArguments, QuantizedDrafter),
    "srt": (SrtArguments, srt),
    "suffix_decoding": (SuffixDecodingArguments, suffix_decoding),
}


def make_drafter(name: str, **args: Any) -> Drafter:
    """Builds a drafter.

    Args:
      name: a key of `DRAFTERS`.
      **args: the drafter's own arguments (`speculation.args` of a config).

    Raises:
      ConfigError: an unknown name or argument (with the nearest known one), or a value that cannot be.
    """
    if name not in DRAFTERS:
        raise ConfigError(f"speculation.drafter: unknown drafter {name!r}; {known_names(name, DRAFTERS)}")
    arguments, make = DRAFTERS[name]
    return make(checked(name, arguments, args))
