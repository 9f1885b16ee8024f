"""Tools by the names that a config gives them."""

from collections.abc import Callable, Sequence

from rljax.errors import ConfigError, known_names
from rljax.tools.base import Tool
from rljax.tools.calculator import Calculator
from rljax.tools.python import Python

TOOLS: dict[str, Callable[[float], Tool]] = {
    "calculator": lambda seconds: Calculator(),
    "python": Python,
}
"""By name: what makes a tool that has so many seconds for a call."""


def make_tools(names: Sequence[str], seconds: float) -> dict[str, Tool]:
    """The tools of these names, with so many seconds for a call.

    Raises:
      ConfigError: a name that is unknown, or a tool that cannot work on this machine.
    """
    for name in names:
        if name not in TOOLS:
            raise ConfigError(f"tools.names: unknown tool {name!r}; {known_names(name, TOOLS)}")
    return {name: TOOLS[name](seconds) for name in names}
