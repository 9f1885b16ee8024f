"""The wing of the papers, as far as a config goes: the only import from `rljax/papers`.

Without the wing its names and keys are unknown.
"""

import pkgutil
from typing import Any

from rljax.config.cluster_keys import Mechanism
from rljax.config.speculation_keys import Policy
from rljax.errors import ConfigError

try:
    from rljax.papers import registry
except ModuleNotFoundError as error:
    if error.name != "rljax.papers":
        raise
    registry = None  # type: ignore[assignment]

POLICIES: dict[str, Policy] = {} if registry is None else registry.POLICIES
"""How much is drafted (`speculation.py`), by name."""
MECHANISMS: dict[str, Mechanism] = {} if registry is None else registry.MECHANISMS
"""What else is added to rollouts (`speculation.py`, `cluster.py`), by paper."""
PARTS: dict[str, str] = {} if registry is None else registry.PARTS
"""What the simulator and scripts take of them, as `module:name`."""
ABSENT = "rljax/papers, which is not here"
MISSING = "" if registry is not None else f"; the papers' mechanisms and their keys need {ABSENT}"
"""The end of errors about what may be missing."""


def part(name: str) -> Any:
    """Returns what the simulator or a script takes of the papers by its name.

    Raises:
      ConfigError: the wing is not here.
    """
    if name not in PARTS:
        raise ConfigError(f"{name} needs {ABSENT}")
    return pkgutil.resolve_name(PARTS[name])
