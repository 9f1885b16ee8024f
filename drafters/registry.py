"""Finds a drafter by the name a config gives it, and checks its arguments before anything is compiled."""

from collections.abc import Callable, Mapping
from typing import Any

from drafters.arguments import Arguments, checked
from drafters.base import DeviceDrafter, Drafter
from drafters.eagle.drafter import EagleArguments, EagleDrafter
from drafters.histospec import HistoSpec, HistoSpecArguments
from drafters.quantized import QuantizedArguments, QuantizedDrafter
from drafters.rehearsal import rehearse
from drafters.small_model import SmallModelArguments, SmallModelDrafter
from drafters.suffix import (
    PromptLookupArguments,
    SrtArguments,
    SuffixDecodingArguments,
    prompt_lookup,
    srt,
    suffix_decoding,
)
from rljax.config.decoding import DEVICE_DRAFTERS, SpeculationConfig
from rljax.errors import ConfigError, known_names
from rljax.models.config import ModelConfig
from rljax.models.tokenizer import Tokenizer

# By name: what `speculation.args` may hold, and what makes the drafter from it.
DRAFTERS: dict[str, tuple[type[Arguments], Callable[[Any], Drafter]]] = {
    "eagle": (EagleArguments, EagleDrafter),
    "histospec": (HistoSpecArguments, HistoSpec),
    "prompt_lookup": (PromptLookupArguments, prompt_lookup),
    "quantized": (QuantizedArguments, QuantizedDrafter),
    "small_model": (SmallModelArguments, SmallModelDrafter),
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
    return _make("speculation.drafter", "speculation.args", name, args)


def make_drafters(config: SpeculationConfig) -> dict[str, Drafter]:
    """All drafters of a run, by name, `speculation.drafter` first; raises as `make_drafter` does."""
    if config.drafter is None:
        return {}
    drafters = {config.drafter: make_drafter(config.drafter, **config.args)}
    for name, args in config.others.items():
        drafters[name] = _make("speculation.others", f"speculation.others.{name}", name, args)
    return drafters


def rehearse_drafters(config: SpeculationConfig) -> None:
    """Compiles what the drafters on the host run (`drafters/rehearsal.py`)."""
    names = {} if config.drafter is None else {config.drafter: config.args, **config.others}
    for name, args in names.items():
        if name not in DEVICE_DRAFTERS:
            args = {key: value for key, value in args.items() if key != "spill_dir"}  # files are for rollouts
            rehearse(make_drafter(name, **args), config.max_drafts)


def states_read(
    drafters: Mapping[str, Drafter], policy: ModelConfig, tokenizer: Tokenizer | None = None
) -> tuple[int, ...] | None:
    """`hidden_layers` of the engine that these drafters draft for; raises a UserError where one cannot."""
    read = [each.reads(policy, tokenizer) for each in drafters.values() if isinstance(each, DeviceDrafter)]
    return next((layers for layers in read if layers is not None), None)


def _make(key: str, args_key: str, name: str, args: dict[str, Any]) -> Drafter:
    if name not in DRAFTERS:
        raise ConfigError(f"{key}: unknown drafter {name!r}; {known_names(name, DRAFTERS)}")
    arguments, make = DRAFTERS[name]
    return make(checked(args_key, name, arguments, args))
