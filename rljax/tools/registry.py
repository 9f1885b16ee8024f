"""Tools by their names in a config."""

from collections.abc import Callable, Sequence

from rljax.errors import ConfigError, known_names
from rljax.tools.base import Tool
from rljax.tools.calculator import Calculator
from rljax.tools.python import Python

TOOLS: dict[str, Callable[[float], Tool]] = {"calculator": lambda seconds: Calculator(), "python": Python}
"""Functions that make a tool from the time limit of a call in seconds, by name."""


def make_tools(names: Sequence[str], seconds: float) -> dict[str, Tool]:
    """Makes tools by name, with a time limit per call in seconds.

    Raises:
      ConfigError: an unknown name, or a tool that cannot work on this machine.
    """
    for name in names:
        if name not in TOOLS:
            raise ConfigError(f"tools.names: unknown tool {name!r}; {known_names(name, TOOLS)}")
    return {name: TOOLS[name](seconds) for name in names}
