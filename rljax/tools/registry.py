"""Tools by the names that a config gives them."""

from collections.abc import Callable, Sequence

from rljax.errors import ConfigError, known_names
from rljax.tools.base import Tool
from rljax.tools.calculator import Calculator

TOOLS: dict[str, Callable[[], Tool]] = {
    "calculator": Calculator,
}


def make_tools(names: Sequence[str]) -> dict[str, Tool]:
    """The tools of these names; a ConfigError for one that is unknown."""
    for name in names:
        if name not in TOOLS:
            raise ConfigError(f"tools.names: unknown tool {name!r}; {known_names(name, TOOLS)}")
    return {name: TOOLS[name]() for name in names}
