"""Base class and types of the config's sections, and rules for keys that contradict each other."""

import os
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field


class Section(BaseModel):
    """Base of sections: immutable, without unknown keys or silent conversions (except 1 for 1.0)."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def _on_or_off(value: object) -> object:
    """YAML reads `on` and `off` without quotes as booleans."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


AutoOnOff = Annotated[Literal["auto", "on", "off"], BeforeValidator(_on_or_off)]
PathText = Annotated[str, AfterValidator(os.path.expanduser)]  # no shell expands ~ in key=~/directory
Count = Annotated[int, Field(ge=1)]
CountOrOff = Annotated[int, Field(ge=0)]
Buckets = Annotated[tuple[Count, ...], Field(strict=False)]  # YAML has lists only; the items stay strict


class Rule(NamedTuple):
    """Keys that contradict each other.

    Attributes:
      keys: dotted names of keys and sections, or of what a section says of its keys.
      broken: called with their values in this order, None where a section on the way is left out. Returns
        whether they contradict each other; what is no bool stands in the error as `{found}`.
      error: the error in one line; `{0}` is the value of the first key.
    """

    keys: tuple[str, ...]
    broken: Callable[..., Any]
    error: str


def both(first: Any, second: Any) -> bool:
    """Two keys are set."""
    return bool(first and second)


def first_alone(first: Any, second: Any) -> bool:
    """A key is set, and the one that it needs is not."""
    return bool(first and not second)


def broken_rule(config: Section, rules: Iterable[Rule]) -> str | None:
    """Returns the error of the first rule that a config breaks; None if it breaks none."""
    for rule in rules:
        values = [_value(config, key) for key in rule.keys]
        found = rule.broken(*values)
        if found:
            return rule.error.format(*values, found=found)
    return None


def _value(config: Section, key: str) -> Any:
    """The value of a dotted key."""
    node: Any = config
    for name in key.split("."):
        node = None if node is None else getattr(node, name)
    return node
