"""How far is drafted at which batch, and how many tokens it brings.

A draft is accepted, behind accepted ones, with a probability of its request and drafter. Windows are chosen
as managers choose them (`rljax/speculation/managers`): the most tokens per second at the mean acceptance.
"""

import functools
from collections.abc import Mapping, Sequence

from rljax.cluster.planner import Affine, Mode, accepted_coupled, accepted_decoupled
from rljax.simulation.costs import PassCosts

LEVELS = 20  # acceptance is rounded to twentieths, so that requests of a level advance together

NO_DRAFTS = ""


class Drafting:
    """Chooses windows.

    Args:
      costs: seconds of the policy's passes.
      drafters: seconds of a drafted token of all requests, by the drafter's name; of one that costs nothing,
        `Affine(0, 0)`.
      means: mean acceptance by drafter, as history tells.
      windows: windows to choose among, besides 0; one alone is always used.
      mode: "coupled", or "decoupled" where drafters have devices of their own.
      below: batches of at most so many requests draft; None for all.
    """

    def __init__(
        self,
        costs: PassCosts,
        drafters: Mapping[str, Affine] = {},
        means: Mapping[str, float] = {},
        windows: Sequence[int] = (0, 1, 2, 3, 4, 6, 8),
        mode: Mode = "coupled",
        below: int | None = None,
    ) -> None:
        self._costs, self._drafters, self._means = costs, dict(drafters), dict(means)
        self._windows, self._mode, self._below = tuple(windows), mode, below
        self.window = functools.cache(self._window)
        self.seconds = functools.cache(self._seconds)
        self.tokens = functools.cache(self._tokens)

    @property
    def names(self) -> list[str]:
        """Names of the drafters; the first one is what workers begin with."""
        return list(self._drafters)

    def _seconds(self, running: int, drafter: str, window: int, cache_ms: int) -> float:
        """Returns the seconds of a pass and its drafting, without those of reading the cache.

        Args:
          running: requests.
          drafter: name of the drafter.
          window: drafts of each request.
          cache_ms: milliseconds of reading the cache.
        """
        verify = self._costs.fixed(running, running * (window + 1))
        if not window:
            return verify
        draft = window * self._drafters[drafter](running)
        return max(draft - cache_ms / 1000, verify) if self._mode == "decoupled" else draft + verify

    def _tokens(self, level: int, window: int) -> float:
        """Returns the tokens that a request of a level of acceptance gets from a pass."""
        if not window:
            return 1.0
        if self._mode == "decoupled":
            return accepted_decoupled(level / LEVELS, window)
        return accepted_coupled(level / LEVELS, window)

    def _window(self, running: int, drafter: str, cache_ms: int) -> int:
        """Returns the window for so many requests, whose cache takes so many milliseconds to read."""
        if not drafter or (self._below is not None and running > self._below):
            return 0
        level = round(self._means[drafter] * LEVELS)

        def speed(window: int) -> float:
            seconds = self._seconds(running, drafter, window, cache_ms) + cache_ms / 1000
            return self._tokens(level, window) / seconds

        return max(self._windows, key=speed)
