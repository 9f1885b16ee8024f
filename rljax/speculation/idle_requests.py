"""Requests of later rollouts, which idle slots may decode as drafts. `IdleRequests` is the default: none.

Keys say what decodes them (`Mechanism` in `rljax/config/cluster_keys.py`). `IdleSlots`
(`rljax/rollout/sources/idle.py`) are those of one rollout.
"""

import pkgutil
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from drafters.base import Drafter
from rljax.config.speculation_keys import SpeculationKeys
from rljax.config.wing import MECHANISMS
from rljax.requests import DecodeStatistics, Request
from rljax.response_lengths import ResponseLengths


class IdleRequests:
    """Nothing is decoded but the requests of the rollout.

    Attributes:
      late_inserts: whether requests enter slots while others are decoded, which takes further programs.
    """

    late_inserts = False

    def drafting(self, drafters: Mapping[str, Drafter], lengths: ResponseLengths) -> dict[str, Drafter]:
        """Returns the drafters of a run with what proposes the tokens that are known; `lengths` has those of
        the responses so far.
        """
        return dict(drafters)

    def plan(self, requests: Sequence[Request]) -> None:
        """Sets the requests that the rollout that begins may decode."""

    def in_slots(self, speculator: Any, takes_over: bool) -> Any:
        """Returns the `IdleSlots` of the rollout that begins; None where idle slots stay idle.

        Args:
          speculator: the `Speculator` whose requests these are.
          takes_over: whether every response ends on the device, so that one that is known whole is right.
        """
        return None

    def recall(self, noise_key: np.ndarray) -> np.ndarray | None:
        """Returns the tokens that are known of the request of this noise, int32 [n]; None for none."""
        return None

    def report(self, statistics: DecodeStatistics) -> None:
        """Drafters have observed tokens: adds what came of those that were known to a rollout's counts."""

    def metrics(self, statistics: DecodeStatistics, waited: float) -> dict[str, float]:
        """Returns metrics of the rollouts of `statistics`, whose decoding took `waited` seconds."""
        return {}

    def state(self) -> dict[str, np.ndarray]:
        """Checkpoint content. Names hold no slash."""
        return {}

    def load_state(self, state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Restores its part of `state`, and returns the rest."""
        return dict(state)


def make_idle_requests(config: SpeculationKeys) -> IdleRequests:
    """Returns those that the keys ask for."""
    places = [each.idle_requests for each in MECHANISMS.values() if each.idle_requests]
    made = (pkgutil.resolve_name(place)(config) for place in places)
    return next((each for each in made if each is not None), IdleRequests())
