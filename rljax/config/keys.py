"""The schema as a list of dotted keys, and which of them a misspelt one was meant to be."""

import dataclasses
import difflib
import typing
from collections.abc import Iterator
from typing import Any

from pydantic.fields import FieldInfo

from rljax.config.schema import ExperimentConfig
from rljax.config.section import Section


@dataclasses.dataclass(frozen=True)
class Key:
    """One key or section of the config.

    Attributes:
      name: dotted, as in an override.
      field: its pydantic field.
      section: the class of the section, or None for a key that holds a value.
      items: the class of the sections in a list of them, else None.
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
        """Whether it is a mapping whose keys the config does not know."""
        return typing.get_origin(self.field.annotation) is dict

    @property
    def optional(self) -> bool:
        """Whether null is a value of its own."""
        return type(None) in typing.get_args(self.field.annotation)


def _section_of(annotation: Any) -> type[Section] | None:
    for candidate in (annotation, *typing.get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    return None


def _walk(section: type[Section], prefix: str = "") -> Iterator[Key]:
    for name, field in section.model_fields.items():
        found = _section_of(field.annotation)
        in_list = typing.get_origin(field.annotation) is tuple
        key = Key(prefix + name, field, None if in_list else found, found if in_list else None)
        yield key
        if found is not None:
            yield from _walk(found, f"{key.name}.")


KEYS: dict[str, Key] = {key.name: key for key in _walk(ExperimentConfig)}


def without_numbers(name: str) -> str:
    """The key of an item in a list of sections: "task.rewards.name" for "task.rewards.0.name"."""
    return ".".join(part for part in name.split(".") if not part.isdigit())


def unknown_key(name: str) -> str:
    """One line about a key that does not exist, with the nearest one that does."""
    parent, _, leaf = without_numbers(name).rpartition(".")
    if parent in KEYS and KEYS[parent].section is None and KEYS[parent].items is None:
        return f"{name}: unknown key; the nearest is {parent}, which holds a value"
    siblings = [key for key in KEYS.values() if key.parent == parent]
    same_leaf = [key.name for key in KEYS.values() if key.leaf == leaf]

    def nearest(candidates: dict[str, str], text: str, cutoff: float) -> str | None:
        found = difflib.get_close_matches(text, candidates, n=1, cutoff=cutoff)
        return candidates[found[0]] if found else None

    # The leaf alone is compared among siblings: with the prefix they share, any two of them would look close.
    guess = (
        nearest({known: known for known in same_leaf}, name, 0.0)
        or nearest({key.leaf: key.name for key in siblings}, leaf, 0.6)
        or nearest({key.leaf: key.name for key in KEYS.values()}, leaf, 0.75)
        or (None if siblings else nearest({known: known for known in KEYS}, name, 0.6))
    )
    if guess is not None:
        return f"{name}: unknown key; the nearest is {guess}"
    if siblings:
        return f"{name}: unknown key; {parent or 'the config'} has {', '.join(key.leaf for key in siblings)}"
    return f"{name}: unknown key; --help lists all keys"
