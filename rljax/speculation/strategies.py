"""Strategies of speculation: who drafts, trees of which shape, and how many of their nodes are verified."""

import dataclasses
from collections.abc import Collection
from typing import Any

from rljax.engine.draft_tree import MAX_NODES, DraftStrategy, most_nodes
from rljax.errors import ConfigError, known_names

MIXED = "+"
"""Stands between the names of drafters whose trees are mixed."""

_NUMBERS = ("depth", "top_k", "nodes")


@dataclasses.dataclass(frozen=True)
class Strategy(DraftStrategy):
    """The trees that a drafter drafts, and how many of their nodes are verified.

    Of a mixture, depth and top_k are for the drafters on the device, and nodes is for the mixture: it may be
    more than a tree of that depth and width has.

    Attributes:
      drafter: a drafter's name; or several names, with "+" between them, whose trees are verified as one.

    Raises:
      ValueError: a number out of range; the message begins with its name.
    """

    drafter: str

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            value = getattr(self, name)
            if not 1 <= value < MAX_NODES:
                raise ValueError(f"{name}: should be from 1 to {MAX_NODES - 1}, got {value}")
        most = most_nodes(self.depth, self.top_k)
        if self.nodes > most and len(self.drafters) == 1:
            raise ValueError(
                f"nodes: {self.nodes} is more than the {most} that a tree of depth {self.depth} and top_k"
                f" {self.top_k} can have to verify"
            )

    @property
    def drafters(self) -> tuple[str, ...]:
        """Names of the drafters."""
        return tuple(self.drafter.split(MIXED))

    def __str__(self) -> str:
        return f"{self.drafter} {self.depth}/{self.top_k}/{self.nodes}"


Arm = Strategy | None
"""One way to decode: a strategy, or None for a plain step."""


def arm_name(arm: Arm) -> str:
    """The arm as logs name it."""
    return "plain" if arm is None else str(arm)


_KEY = "speculation.strategies"
_FIELDS = {"drafter": str} | dict.fromkeys(_NUMBERS, int)
_EXAMPLE = "{drafter: srt, depth: 15, top_k: 4, nodes: 15}"


def parse_strategies(value: Any, drafters: Collection[str], max_drafts: int) -> tuple[Strategy, ...]:
    """The strategies of a config, in its order.

    Args:
      value: the value of `speculation.strategies`, a list of mappings.
      drafters: names of the configured drafters.
      max_drafts: most draft nodes of a slot in a pass (`speculation.max_drafts`).

    Raises:
      ConfigError: one line that names the key and what would be right.
    """
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{_KEY}: should be a list such as [{_EXAMPLE}], got {value!r}")
    strategies: list[Strategy] = []
    for i, section in enumerate(value):
        key = f"{_KEY}[{i}]"
        strategy = _parse_strategy(section, key, drafters)
        if strategy.nodes > max_drafts:
            raise ConfigError(
                f"{key}.nodes: {strategy.nodes} is more than speculation.max_drafts {max_drafts}"
            )
        if strategy in strategies:
            raise ConfigError(f"{key}: is the same as {_KEY}[{strategies.index(strategy)}]; leave one out")
        strategies.append(strategy)
    return tuple(strategies)


def _parse_strategy(section: Any, key: str, drafters: Collection[str]) -> Strategy:
    """One strategy of a config; raises a ConfigError for anything else."""
    if not isinstance(section, dict):
        raise ConfigError(f"{key}: should be a section of keys such as {_EXAMPLE}, got {section!r}")
    for name in section:
        if name not in _FIELDS:
            raise ConfigError(f"{key}.{name}: unknown key; {known_names(str(name), _FIELDS)}")
    for name, kind in _FIELDS.items():
        if name not in section:
            raise ConfigError(f"{key}.{name}: is missing; a strategy has all of {', '.join(_FIELDS)}")
        value = section[name]
        if kind is int and (not isinstance(value, int) or isinstance(value, bool)):
            raise ConfigError(f"{key}.{name}: should be a whole number, got {value!r}")
        if kind is str and not isinstance(value, str):
            raise ConfigError(
                f"{key}.{name}: should be a drafter's name, got {value!r}; the plain step needs no strategy"
            )
    names = section["drafter"].split(MIXED)
    for name in names:
        if name not in drafters:
            raise ConfigError(f"{key}.drafter: unknown drafter {name!r}; {known_names(name, drafters)}")
    if len(set(names)) < len(names):
        raise ConfigError(f"{key}.drafter: {section['drafter']} names a drafter twice")
    try:
        return Strategy(**section)
    except ValueError as error:  # its message begins with the field
        raise ConfigError(f"{key}.{error}") from error
