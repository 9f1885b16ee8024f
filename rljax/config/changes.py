"""What differs between the config of a run and the one that it is to go on with, and which of it matters.

A run may go on for longer, be saved, evaluated or shown on another rhythm, have been moved, and decode in
other batches or with other drafts, where these change no token. Everything else is another experiment.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rljax.config import ExperimentConfig

_HARMLESS = (
    "run_dir",
    "training.steps",
    "algorithm.dynamic_sampling_max_rounds",  # a run that got through has the same numbers with more
    "checkpoint",
    "evaluation",
    "tracking",
    "engine.compilation_cache",
    "engine.compile",
    "speculation.calibration_dir",
    "warm_start.cache_dir",
)
_IF_COUPLED = ("speculation",)
_IF_ROW_INVARIANT = (
    "engine.max_slots",
    "engine.batch_buckets",
    "engine.cache_buckets",
    "engine.decode_steps_per_visit",
)


@dataclasses.dataclass(frozen=True)
class Change:
    """A key that differs.

    Attributes:
      name: the dotted key.
      old, new: its values; None also where the key is not there.
      harmless: whether the run stays the same experiment.
    """

    name: str
    old: Any
    new: Any
    harmless: bool

    def __str__(self) -> str:
        return f"{self.name}: {self.old!r} -> {self.new!r}"


def config_changes(old: ExperimentConfig, new: ExperimentConfig) -> list[Change]:
    """All keys that differ, in the order of the config."""
    harmless = _HARMLESS
    if new.engine.row_invariant:
        harmless += _IF_ROW_INVARIANT
        if new.engine.verification == "coupled":  # else a pass of more rows may flip near-ties
            harmless += _IF_COUPLED
    before, after = dict(_flat(old.model_dump())), dict(_flat(new.model_dump()))
    return [
        Change(name, before.get(name), after.get(name), _is_one_of(name, harmless))
        for name in [*after, *(before.keys() - after.keys())]
        if before.get(name) != after.get(name)
    ]


def _flat(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in node.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _is_one_of(name: str, keys: Iterable[str]) -> bool:
    return any(name == key or name.startswith(f"{key}.") for key in keys)
