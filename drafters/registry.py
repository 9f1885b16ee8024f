"""Makes the drafters that a config names; `drafters/names.py` has their arguments.

A drafter that is not in this package has its import path in the place of a name:

    speculation.drafter=my_module:MyDrafter
    speculation.drafter=./my_file.py:MyDrafter

`MyDrafter` derives from `Drafter` (`drafters/base.py`), or is a `SimpleDrafter` (`drafters/simple.py`).
"""

import pkgutil
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from drafters.base import Drafter, DraftRequest, Outcome, Queries, Sampled
from drafters.eagle.drafter import EagleDrafter
from drafters.histospec import HistoSpec
from drafters.names import check_drafters, checked_arguments, is_own, keys_of
from drafters.quantized import QuantizedDrafter
from drafters.simple import SimpleDrafterAdapter
from drafters.small_model import SmallModelDrafter
from drafters.suffix import prompt_lookup, srt, suffix_decoding
from rljax.config.speculation import POLICIES, SpeculationConfig
from rljax.errors import ConfigError
from rljax.importing import LoadError, called, load
from rljax.models.config import ModelConfig
from rljax.models.tokenizer import Tokenizer

# By name: what makes the drafter from its arguments.
HOST_DRAFTERS: dict[str, Callable[[Any], Drafter]] = {
    "histospec": HistoSpec,
    "prompt_lookup": prompt_lookup,
    "srt": srt,
    "suffix_decoding": suffix_decoding,
}
DEVICE_DRAFTERS: dict[str, Callable[[Any], Drafter]] = {
    "block": EagleDrafter,
    "eagle": EagleDrafter,
    "quantized": QuantizedDrafter,
    "small_model": SmallModelDrafter,
}
# Those whose weights are trained in the run, by measured times.
TRAINED_DRAFTERS = frozenset({"block", "eagle"})
DRAFTERS = dict(sorted((HOST_DRAFTERS | DEVICE_DRAFTERS).items()))


def make_drafter(name: str, **args: Any) -> Drafter:
    """Builds a drafter.

    Args:
      name: a key of `DRAFTERS`, or an import path, `module:Class` or `file.py:Class`.
      **args: the drafter's arguments (`speculation.args` of a config).

    Raises:
      ConfigError: an unknown name or argument (with the nearest known one), an invalid value, or a class that
        cannot be loaded.
    """
    return _make("speculation.drafter", "speculation.args", name, args)


def make_drafters(config: SpeculationConfig) -> dict[str, Drafter]:
    """Builds all drafters of a run, by name, `speculation.drafter` first.

    Raises:
      ConfigError: as `make_drafter`, or none on the host could propose what idle slots have decoded.
    """
    if config.drafter is None:
        return {}
    check_drafters(config)
    of_policy = POLICIES[config.policy].drafters
    made: dict[str, Drafter] = pkgutil.resolve_name(of_policy)(config) if of_policy else {}
    drafters = {
        name: made.get(name) or _make(*keys_of(config, name), kind, config.arguments[name])
        for name, kind in config.kinds.items()
    }
    idle = config.fills_idle_slots
    if idle and not any(drafter.on_host for drafter in drafters.values()):
        raise ConfigError(
            f"{idle}: must be 0 with speculation.drafter: {config.drafter}, unless"
            " speculation.others holds a drafter on the host, such as srt, that proposes what was sampled"
        )
    return drafters


def rehearse_drafters(config: SpeculationConfig) -> None:
    """Compiles the loops of the drafters on the host before the first rollout: SRT's take some 15 s. numba
    keeps the result on disk, beside the files, where it can.
    """
    kinds = config.kinds
    for name, args in config.arguments.items():
        if kinds[name] in HOST_DRAFTERS:
            args = {key: value for key, value in args.items() if key != "spill_dir"}  # no files
            _rehearse(make_drafter(kinds[name], **args), config.max_drafts)


def _rehearse(drafter: Drafter, nodes: int) -> None:
    """Drafts for two requests in two small artificial rollouts, up to `nodes` at a time."""
    prompt, response = (1, 2, 3, 1, 2), np.asarray((3, 1, 2, 4, 1, 2, 3), np.int32)
    both = np.arange(2, dtype=np.int32)
    none, ended = np.zeros(2, np.int32), np.zeros(2, bool)
    for _ in range(2):  # the second one has a history
        drafter.begin([DraftRequest(prompt, np.full(2, i, np.uint32)) for i in range(2)])
        for known, token in enumerate(response):
            positions = np.full(2, len(prompt) + known, np.int32)
            drafter.propose(Queries(both, positions, np.full(2, nodes, np.int32), nodes))
            tokens = np.full((2, 3), token, np.int32)
            drafter.observe(Sampled(both, tokens, np.ones(2, np.int32), none, none, ended))
        drafter.learn([Outcome(prompt, response, float(i)) for i in range(2)])


def states_read(
    drafters: Mapping[str, Drafter], policy: ModelConfig, tokenizer: Tokenizer | None = None
) -> tuple[int, ...] | None:
    """Returns `hidden_layers` of the engine that these drafters draft for: the layers whose features they
    read. Raises a UserError where a drafter cannot draft for the policy, or two read different layers.
    """
    read = {name: drafter.reads(policy, tokenizer) for name, drafter in drafters.items()}
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
    """As `make_drafter`; the keys that hold name and arguments are for errors."""
    if not is_own(name):
        given = checked_arguments(key, args_key, name, args)
        return DRAFTERS[name](given)
    try:
        drafter = called(load(name, key), args, name, key)
    except LoadError as error:
        raise ConfigError(str(error)) from error
    if isinstance(drafter, Drafter):
        return drafter
    kind = type(drafter).__name__
    if not callable(getattr(drafter, "propose", None)):
        raise ConfigError(f"{key}: {name}: {kind} has no method propose")
    if hasattr(drafter, "begin") or hasattr(drafter, "observe"):
        raise ConfigError(
            f"{key}: {name}: {kind} has more methods than propose; derive it from drafters.base.Drafter,"
            " which has defaults"
        )
    return SimpleDrafterAdapter(drafter)
