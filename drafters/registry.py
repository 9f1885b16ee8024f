"""Makes the drafters that a config names, and checks their arguments before anything is compiled."""

from collections.abc import Callable, Mapping
from typing import Any

from drafters.arguments import Arguments, checked
from drafters.base import Drafter
from drafters.decoupled import DecoupledEagle, DecoupledSmallModel
from drafters.device import DeviceDrafter, SelfDrafter
from drafters.eagle.arguments import EagleArguments
from drafters.eagle.drafter import EagleDrafter
from drafters.histospec import HistoSpec, HistoSpecArguments
from drafters.loading import load_drafter
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
from rljax.config.decoding import SpeculationConfig
from rljax.errors import ConfigError, known_names
from rljax.models.config import ModelConfig
from rljax.models.tokenizer import Tokenizer

_Entry = tuple[type[Arguments], Callable[[Any], Drafter]]

# By name: the arguments that `speculation.args` may hold, and the function that makes the drafter from them.
HOST_DRAFTERS: dict[str, _Entry] = {
    "histospec": (HistoSpecArguments, HistoSpec),
    "prompt_lookup": (PromptLookupArguments, prompt_lookup),
    "srt": (SrtArguments, srt),
    "suffix_decoding": (SuffixDecodingArguments, suffix_decoding),
}
DEVICE_DRAFTERS: dict[str, _Entry] = {
    "eagle": (EagleArguments, EagleDrafter),
    "quantized": (QuantizedArguments, QuantizedDrafter),
    "small_model": (SmallModelArguments, SmallModelDrafter),
}
# Those whose weights are trained in the run, by measured times.
TRAINED_DRAFTERS = frozenset({"eagle"})
# Those that can draft ahead of the policy, on devices of their own (`speculation.decoupled`).
_AHEAD: dict[str, tuple[type[Arguments], Callable[..., Drafter]]] = {
    "eagle": (EagleArguments, DecoupledEagle),
    "small_model": (SmallModelArguments, DecoupledSmallModel),
}
DRAFTERS = dict(sorted((HOST_DRAFTERS | DEVICE_DRAFTERS).items()))


def make_drafter(name: str, **args: Any) -> Drafter:
    """Builds a drafter.

    Args:
      name: a key of `DRAFTERS`, or an import path, `module:Class` (`drafters/loading.py`).
      **args: the drafter's arguments (`speculation.args` of a config).

    Raises:
      ConfigError: an unknown name or argument (with the nearest known one), an invalid value, or a class that
        cannot be loaded.
    """
    return _make("speculation.drafter", "speculation.args", name, args)


def make_drafters(config: SpeculationConfig) -> dict[str, Drafter]:
    """Builds all drafters of a run, by name, `speculation.drafter` first.

    Raises:
      ConfigError: as `make_drafter`, or run-ahead has no drafter on the host that could propose its tokens.
    """
    if config.drafter is None:
        return {}
    if config.decoupled.window:
        arguments, ahead = _AHEAD[config.drafter]
        given = checked("speculation.args", config.drafter, arguments, config.args)
        return {config.drafter: ahead(given, config.decoupled)}
    drafters = {config.drafter: make_drafter(config.drafter, **config.args)}
    kinds, arguments = config.kinds, config.arguments
    for name, given in config.others.items():
        args_key = f"speculation.others.{name}"
        key = f"{args_key}.kind" if "kind" in given else "speculation.others"
        drafters[name] = _make(key, args_key, kinds[name], arguments[name])
    for name, drafter in drafters.items():
        if isinstance(drafter, HistoSpec) and (drafter.max_window or 0) > config.max_drafts:
            key = "speculation.args" if name == config.drafter else f"speculation.others.{name}"
            raise ConfigError(
                f"{key}.max_window: {drafter.max_window} is more than speculation.max_drafts"
                f" {config.max_drafts}, so no window gets that wide; raise the latter, or set null"
            )
    on_device = [isinstance(drafter, SelfDrafter | DeviceDrafter) for drafter in drafters.values()]
    if config.run_ahead_below and all(on_device):
        raise ConfigError(
            f"speculation.run_ahead_below: must be 0 with speculation.drafter: {config.drafter}, unless"
            " speculation.others holds a drafter on the host, such as srt, that proposes what was sampled"
        )
    return drafters


def rehearse_drafters(config: SpeculationConfig) -> None:
    """Compiles the loops of the drafters on the host (`drafters/rehearsal.py`)."""
    kinds = config.kinds
    for name, args in config.arguments.items():
        if kinds[name] in HOST_DRAFTERS:
            args = {key: value for key, value in args.items() if key != "spill_dir"}  # no files
            rehearse(make_drafter(kinds[name], **args), config.max_drafts)


def states_read(
    drafters: Mapping[str, Drafter], policy: ModelConfig, tokenizer: Tokenizer | None = None
) -> tuple[int, ...] | None:
    """Returns `hidden_layers` of the engine that these drafters draft for: the layers whose features they
    read. Raises a UserError where a drafter cannot draft for the policy, or two read different layers.
    """
    on_device = {name: drafter for name, drafter in drafters.items() if isinstance(drafter, DeviceDrafter)}
    read = {name: drafter.reads(policy, tokenizer) for name, drafter in on_device.items()}
    read = {name: layers for name, layers in read.items() if layers is not None}
    first = next(iter(read), None)
    for name, layers in read.items():
        if layers != read[first]:
            raise ConfigError(
                f"speculation.others: {name} reads the features behind layers {list(layers)}, but {first}"
                f" those behind {list(read[first])}; several heads must read the same"
            )
    return None if first is None else read[first]


def _make(key: str, args_key: str, name: str, args: dict[str, Any]) -> Drafter:
    if ":" in name:
        return load_drafter(key, args_key, name, args)
    if name not in DRAFTERS:
        raise ConfigError(
            f"{key}: unknown drafter {name!r}; {known_names(name, DRAFTERS)},"
            " or a class of yours as module:Class"
        )
    arguments, make = DRAFTERS[name]
    return make(checked(args_key, name, arguments, args))
