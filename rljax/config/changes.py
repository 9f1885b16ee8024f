"""Compares the config of a run with the config that it is resumed with, and classifies the differences.

A resumed run may have more steps, other intervals of saving, evaluation and tracking, another directory, and
other batches or drafts where these change no token. Any other difference makes it another experiment.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rljax.config import ExperimentConfig

_HARMLESS = (
    "run_dir",
    "training.steps",
    "algorithm.dynamic_sampling_max_rounds",  # changes no numbers of a run that did not fail
    "checkpoint",
    "evaluation",
    "tracking",
    "distributed",
    "cluster",
    "agents.host",
    "agents.port",
    "agents.api_key",
    "agents.parallel",
    "agents.time_limit",
    "engine.compilation_cache",
    "engine.compile",
    "engine.weight_blocks",
    "engine.overlap",
    "speculation.calibration_dir",
    "warm_start.cache_dir",
)
_IF_COUPLED = ("speculation",)
_IF_ROW_INVARIANT = (
    "engine.max_slots",
    "engine.batch_buckets",
    "engine.cache_buckets",
    "engine.decode_steps_per_sync",
    "engine.decode_loop",
)
_IF_ROW_INVARIANT_IN_FLOAT32 = ("policy.outline_layers",)  # bfloat16 is rounded between layers, or not


@dataclasses.dataclass(frozen=True)
class Change:
    """A key that differs.

    Attributes:
      name: the dotted key.
      old, new: values of the key; None also where the key is missing.
      harmless: whether the run stays the same experiment.
    """

    name: str
    old: Any
    new: Any
    harmless: bool

    def __str__(self) -> str:
        return f"{self.name}: {self.old!r} -> {self.new!r}"


def config_changes(old: ExperimentConfig, new: ExperimentConfig) -> list[Change]:
    """Returns all keys that differ, in the order of the config."""
    harmless: tuple[str, ...] = _HARMLESS
    if new.engine.row_invariant:
        harmless += _IF_ROW_INVARIANT
        if old.engine.row_invariant:  # true, warn and auto compute the same
            harmless += ("engine.row_invariant",)
        if new.policy.compute_dtype == "float32":
            harmless += _IF_ROW_INVARIANT_IN_FLOAT32
        if new.engine.verification == "coupled":  # otherwise a pass with more rows may flip near-ties
            harmless += _IF_COUPLED
    before, after = dict(flattened(old.model_dump())), dict(flattened(new.model_dump()))
    return [
        Change(name, before.get(name), after.get(name), is_one_of(name, harmless))
        for name in [*after, *(before.keys() - after.keys())]
        if before.get(name) != after.get(name)
    ]


def flattened(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the dotted name and the value of every key of a nested mapping."""
    for name, value in node.items():
        if isinstance(value, Mapping):
            yield from flattened(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def is_one_of(name: str, keys: Iterable[str]) -> bool:
    """Whether a dotted name is one of these keys, or is in one that is a section."""
    return any(name == key or name.startswith(f"{key}.") for key in keys)
