"""Checkpoint content of drafters: their arrays, under prefixes that drafters of a kind share."""

from collections.abc import Mapping

import numpy as np

from drafters.base import Drafter
from drafters.spilled_history import FILE_ARRAYS
from drafters.training import SharedTraining
from drafters.validation import usable_state
from rljax.speculation.drafter_calls import drafter_call


def drafter_states(drafters: Mapping[str, Drafter], to_share: bool = False) -> dict[str, np.ndarray]:
    """The state of every drafter, its names behind the drafter's prefix.

    Args:
      drafters: by name.
      to_share: leave out what other processes cannot use or get otherwise: files of a history, and drafters
        that `drafter_weights` is about.
    """
    state: dict[str, np.ndarray] = {}
    for prefix, name in _prefixes(drafters).items():
        if to_share and shared_training(drafters[name]) is not None:
            continue
        with drafter_call(name, "state"):
            arrays = usable_state(drafters[name].state())
        if to_share:
            arrays = {key: array for key, array in arrays.items() if key not in FILE_ARRAYS}
        state |= {prefix + key: array for key, array in arrays.items()}
    return state


def drafter_weights(drafters: Mapping[str, Drafter]) -> dict[str, np.ndarray]:
    """The part of `drafter_states` that frozen drafters in other processes draft with, of those that are
    trained for them.
    """
    weights: dict[str, np.ndarray] = {}
    for prefix, name in _prefixes(drafters).items():
        shared = shared_training(drafters[name])
        if shared is not None:
            with drafter_call(name, "weights"):
                arrays = usable_state(shared.weights())
            weights |= {prefix + key: array for key, array in arrays.items()}
    return weights


def load_drafter_states(
    drafters: Mapping[str, Drafter], state: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Restores `drafter_states`, and returns the rest. A drafter without a state there starts empty."""
    rest = dict(state)
    for prefix, name in _prefixes(drafters).items():
        arrays = {key.removeprefix(prefix): rest.pop(key) for key in list(rest) if key.startswith(prefix)}
        if arrays:
            with drafter_call(name, "load_state"):
                drafters[name].load_state(arrays)
    return rest


def shared_training(drafter: Drafter) -> SharedTraining | None:
    """Returns what trains a drafter for other processes; None where nothing does."""
    return None if drafter.training is None else drafter.training.shared


def _prefixes(drafters: Mapping[str, Drafter]) -> dict[str, str]:
    """From the prefix of each drafter's state to the drafter's name.

    Drafters of a kind (`state_name`) share a prefix, so that one may go on where another left off; with
    several of a kind in a run, the first has it.
    """
    prefixes: dict[str, str] = {}
    for name, drafter in drafters.items():
        prefix = f"{drafter.state_name or name}/"
        prefixes[f"{name}/" if prefix in prefixes else prefix] = name
    return prefixes
