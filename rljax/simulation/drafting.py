"""How far is drafted at which batch, and how many tokens it brings.

A draft is accepted, behind accepted ones, with a probability of its request and drafter. Windows are chosen
as managers choose them (`rljax/speculation/managers`): the most tokens per second at the mean acceptance.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

from rljax.simulation.costs import PassCosts
from rljax.speculation.draft_length import expected_tokens, expected_tokens_decoupled
from rljax.speculation.window_costs import Mode

LEVELS = 20  # acceptance is rounded to twentieths, so that requests of a level advance together

NO_DRAFTS = ""

Way = tuple[Mode, int]
"""How a worker decodes: kind of speculation, and window."""

PLAIN: Way = ("plain", 0)


@dataclasses.dataclass(frozen=True)
class SimulatedDrafter:
    """A drafter, of which only acceptance and times are known.

    Attributes:
      acceptance: probability that a draft is accepted behind accepted ones, on average over requests.
      spread: its standard deviation over requests.
      base, each: seconds of a drafted token of all requests, and of each request.
    """

    acceptance: float
    spread: float = 0.0
    base: float = 0.0
    each: float = 0.0


class Drafting:
    """Chooses ways to decode.

    Args:
      costs: seconds of the policy's passes.
      drafters: drafters by name; workers begin with the first one.
      windows: windows to choose among; 0 is plain decoding. One alone is always used.
      modes: "coupled", and "decoupled" where drafters have devices of their own.
      below: batches of at most so many requests draft; None for all.
    """

    def __init__(
        self,
        costs: PassCosts,
        drafters: Mapping[str, SimulatedDrafter] = {},
        windows: Sequence[int] = (0, 1, 2, 3, 4, 6, 8),
        modes: Sequence[Mode] = ("coupled",),
        below: int | None = None,
    ) -> None:
        self._costs, self._drafters = costs, dict(drafters)
        self.names = list(drafters)
        ways: list[Way] = [(mode, window) for mode in modes for window in windows if window]
        self._ways = [*ways, *([PLAIN] if 0 in windows or not ways else [])]
        self._below = below
        self.way = functools.cache(self._way)
        self.seconds = functools.cache(self._seconds)
        self.tokens = functools.cache(self._tokens)

    def _seconds(self, running: int, drafter: str, way: Way, cache_ms: int) -> float:
        """Returns the seconds of a pass over so many requests and its drafting, without those of reading the
        cache, `cache_ms` milliseconds.
        """
        mode, window = way
        verify = self._costs.fixed(running * (window + 1))
        if not window:
            return verify
        draft = window * (running * self._drafters[drafter].each + self._drafters[drafter].base)
        return max(draft - cache_ms / 1000, verify) if mode == "decoupled" else draft + verify

    def _tokens(self, level: int, way: Way) -> float:
        """Returns the tokens that a request of a level of acceptance gets from a pass."""
        mode, window = way
        if not window:
            return 1.0
        expected = expected_tokens_decoupled if mode == "decoupled" else expected_tokens
        return expected(level / LEVELS, window)

    def _way(self, running: int, drafter: str, cache_ms: int) -> Way:
        """Returns the way to decode so many requests, whose cache takes so many milliseconds to read."""
        if not drafter or (self._below is not None and running > self._below):
            return PLAIN
        level = round(self._drafters[drafter].acceptance * LEVELS)

        def speed(way: Way) -> float:
            return self._tokens(level, way) / (
                self._seconds(running, drafter, way, cache_ms) + cache_ms / 1000
            )

        return max(self._ways, key=speed)

    def token_seconds(self, running: int, cached: float) -> float:
        """Returns the seconds of a token of so many requests, whose cache takes so many seconds to read, with
        the drafter that workers begin with.
        """
        drafter, cache_ms = self.names[0] if self.names else NO_DRAFTS, int(1000 * cached)
        way = self.way(running, drafter, cache_ms)
        level = round(self._drafters[drafter].acceptance * LEVELS) if drafter else 0
        return (self.seconds(running, drafter, way, cache_ms) + cached) / self.tokens(level, way)
