"""The schema as a list of dotted keys, and suggestions for misspelt keys."""

import dataclasses
import difflib
import typing
from collections.abc import Iterator
from typing import Any

from pydantic.fields import FieldInfo

from rljax.config.schema import ExperimentConfig
from rljax.config.section import Section
from rljax.config.wing import MISSING


@dataclasses.dataclass(frozen=True)
class Key:
    """One key or section of the config.

    Attributes:
      name: dotted name, as in an override.
      section: class of the section; None for a key that holds a value.
      items: class of the sections in a list of sections, else None.
    """

    name: str
    field: FieldInfo
    section: type[Section] | None
    items: type[Section] | None = None

    @property
    def parent(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def leaf(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def free_form(self) -> bool:
        """Whether the key holds a mapping with arbitrary keys."""
        return typing.get_origin(self.field.annotation) is dict

    @property
    def optional(self) -> bool:
        """Whether null is a valid value."""
        return type(None) in typing.get_args(self.field.annotation)


def _section_of(annotation: Any) -> type[Section] | None:
    for candidate in (annotation, *typing.get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    return None


def _walk(section: type[Section], prefix: str = "") -> Iterator[Key]:
    for name, field in section.model_fields.items():
        inner = _section_of(field.annotation)
        in_list = typing.get_origin(field.annotation) is tuple
        key = Key(prefix + name, field, None if in_list else inner, inner if in_list else None)
        yield key
        if inner is not None:
            yield from _walk(inner, f"{key.name}.")


KEYS: dict[str, Key] = {key.name: key for key in _walk(ExperimentConfig)}


def without_numbers(name: str) -> str:
    """Returns the key of an item in a list of sections: "task.rewards.name" for "task.rewards.0.name"."""
    return ".".join(part for part in name.split(".") if not part.isdigit())


SUCCESSORS = {"engine.decode_steps_per_visit": "engine.decode_steps_per_sync"}
"""Keys of earlier releases -> the keys that took their place."""


def unknown_key(name: str) -> str:
    """Returns one line about an unknown key, with its successor, or the nearest known key."""
    if name in SUCCESSORS:
        return f"{name}: is now {SUCCESSORS[name]}"
    unknown = f"{name}: unknown key; {_hint(without_numbers(name))}"
    return unknown + MISSING if name.startswith(("cluster.", "speculation.")) else unknown


def _hint(name: str) -> str:
    """What to write in the place of an unknown key."""
    parent, _, leaf = name.rpartition(".")
    if parent in KEYS and KEYS[parent].section is None and KEYS[parent].items is None:
        return f"the nearest is {parent}, which holds a value"
    siblings = [key for key in KEYS.values() if key.parent == parent]
    same_leaf = [key.name for key in KEYS.values() if key.leaf == leaf]

    def nearest(candidates: dict[str, str], text: str, cutoff: float) -> str | None:
        matches = difflib.get_close_matches(text, candidates, n=1, cutoff=cutoff)
        return candidates[matches[0]] if matches else None

    # Among siblings only the leaves are compared: their common prefix would make any two of them similar.
    guess = (
        nearest({known: known for known in same_leaf}, name, 0.0)
        or nearest({key.leaf: key.name for key in siblings}, leaf, 0.6)
        or nearest({key.leaf: key.name for key in KEYS.values()}, leaf, 0.75)
        or (None if siblings else nearest({known: known for known in KEYS}, name, 0.6))
    )
    if guess is not None:
        return f"the nearest is {guess}"
    if siblings:
        return f"{parent or 'the config'} has {', '.join(key.leaf for key in siblings)}"
    return "--help lists all keys"
