"""How far is drafted at which batch, and how many tokens it brings.

A draft is accepted, behind accepted ones, with a probability of its request and drafter. Windows are chosen
as managers choose them (`rljax/speculation/managers`): the most tokens per second at the mean acceptance.
"""

import functools
from collections.abc import Mapping, Sequence

from rljax.cluster.window_costs import Affine, Mode, accepted_coupled, accepted_decoupled
from rljax.simulation.costs import PassCosts

LEVELS = 20  # acceptance is rounded to twentieths, so that requests of a level advance together

NO_DRAFTS = ""

Way = tuple[Mode, int]
"""How a worker decodes: kind of speculation, and window."""

PLAIN: Way = ("plain", 0)


class Drafting:
    """Chooses ways to decode.

    Args:
      costs: seconds of the policy's passes.
      drafters: seconds of a drafted token of all requests, by the drafter's name; of one that costs nothing,
        `Affine(0, 0)`.
      means: mean acceptance by drafter, as history tells.
      windows: windows to choose among; 0 is plain decoding. One alone is always used.
      modes: "coupled", and "decoupled" where drafters have devices of their own.
      below: batches of at most so many requests draft; None for all.
    """

    def __init__(
        self,
        costs: PassCosts,
        drafters: Mapping[str, Affine] = {},
        means: Mapping[str, float] = {},
        windows: Sequence[int] = (0, 1, 2, 3, 4, 6, 8),
        modes: Sequence[Mode] = ("coupled",),
        below: int | None = None,
    ) -> None:
        self._costs, self._drafters, self._means = costs, dict(drafters), dict(means)
        ways: list[Way] = [(mode, window) for mode in modes for window in windows if window]
        self._ways = [*ways, *([PLAIN] if 0 in windows or not ways else [])]
        self._below = below
        self.way = functools.cache(self._way)
        self.seconds = functools.cache(self._seconds)
        self.tokens = functools.cache(self._tokens)

    @property
    def names(self) -> list[str]:
        """Names of the drafters; the first one is what workers begin with."""
        return list(self._drafters)

    def _seconds(self, running: int, drafter: str, way: Way, cache_ms: int) -> float:
        """Returns the seconds of a pass and its drafting, without those of reading the cache.

        Args:
          running: requests.
          drafter: name of the drafter.
          way: how they are decoded.
          cache_ms: milliseconds of reading the cache.
        """
        mode, window = way
        verify = self._costs.fixed(running, running * (window + 1))
        if not window:
            return verify
        draft = window * self._drafters[drafter](running)
        return max(draft - cache_ms / 1000, verify) if mode == "decoupled" else draft + verify

    def _tokens(self, level: int, way: Way) -> float:
        """Returns the tokens that a request of a level of acceptance gets from a pass."""
        mode, window = way
        if not window:
            return 1.0
        accepted = accepted_decoupled if mode == "decoupled" else accepted_coupled
        return accepted(level / LEVELS, window)

    def _way(self, running: int, drafter: str, cache_ms: int) -> Way:
        """Returns the way to decode so many requests, whose cache takes so many milliseconds to read."""
        if not drafter or (self._below is not None and running > self._below):
            return PLAIN
        level = round(self._means[drafter] * LEVELS)

        def speed(way: Way) -> float:
            return self._tokens(level, way) / (
                self._seconds(running, drafter, way, cache_ms) + cache_ms / 1000
            )

        return max(self._ways, key=speed)
