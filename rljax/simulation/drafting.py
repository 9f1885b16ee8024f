"""How far is drafted at which batch, and how many tokens it brings.

A draft is accepted, behind accepted ones, with a probability of its request and drafter. Windows are chosen
as managers choose them (`rljax/speculation/managers`): the most tokens per second at the mean acceptance.
With "aimd" they are RhymeRL's, a window of each request's own (section 5.4; `aimd`).
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from drafters.arguments import HistoSpecArguments
from drafters.histospec import WIDEST
from rljax.simulation.costs import PassCosts
from rljax.speculation.draft_length import expected_tokens, window_seconds, window_tokens
from rljax.speculation.window_costs import Mode

LEVELS = 40  # acceptance is rounded to fortieths, so that requests of a level advance together

NO_DRAFTS = ""

Kind = Mode | Literal["aimd"]
Way = tuple[Kind, int]
"""How a worker decodes: kind of speculation, and window; of "aimd" the widest."""

PLAIN: Way = ("plain", 0)


@dataclasses.dataclass(frozen=True)
class SimulatedDrafter:
    """A drafter, of which only acceptance and times are known.

    Attributes:
      acceptance: probability that a draft is accepted after accepted ones, on average over requests.
      spread: its standard deviation over requests.
      base, each: seconds of a drafted token of all requests, and of each request.
    """

    acceptance: float
    spread: float = 0.0
    base: float = 0.0
    each: float = 0.0


@functools.cache
def aimd(acceptance: float, misses: float = 0.0, widest: int = WIDEST) -> tuple[float, float]:
    """Returns the tokens and the drafts of a pass under HistoSpec: its automaton drafts what history has
    after the last tokens, in a window that grows by 2 where all of it was accepted, and falls back to 2
    where not (RhymeRL, sections 5.3 and 5.4; `drafters/histospec.py`). They are means over the stationary
    distribution of windows.

    Args:
      acceptance: probability that a draft is accepted, after accepted ones.
      misses: passes without drafts after a rejection, until the last tokens are found in history again.
      widest: the widest window.
    """
    arguments = HistoSpecArguments()
    windows = np.arange(arguments.first_window, widest + 1, arguments.window_step)
    whole = acceptance**windows
    reached = np.concatenate([[1.0], np.cumprod(whole[:-1])])  # how often, of the times a window is the first
    if whole[-1] < 1:
        reached[-1] /= 1 - whole[-1]  # the widest one stays
    else:
        reached = np.eye(len(windows))[-1]
    share = reached / reached.sum()
    tokens = float(share @ [expected_tokens(acceptance, int(window)) for window in windows])
    without = misses * float(share @ (1 - whole))
    return (tokens + without) / (1 + without), float(share @ windows) / (1 + without)


class Drafting:
    """Chooses ways to decode.

    Args:
      costs: seconds of the policy's passes.
      drafters: drafters by name; workers begin with the first one.
      windows: windows to choose among; 0 is plain decoding. One alone is always used.
      modes: "coupled", and "decoupled" where drafters have devices of their own; or "aimd".
      below: batches of at most so many requests draft; None for all.
      breadth: rows that are verified for each drafted token; more than one of trees.
      misses: see `aimd`.
    """

    def __init__(
        self,
        costs: PassCosts,
        drafters: Mapping[str, SimulatedDrafter] = {},
        windows: Sequence[int] = (0, 1, 2, 3, 4, 6, 8),
        modes: Sequence[Kind] = ("coupled",),
        below: int | None = None,
        breadth: float = 1.0,
        misses: float = 0.0,
    ) -> None:
        self._costs, self._drafters = costs, dict(drafters)
        self.names = list(drafters)
        self._breadth, self._misses = breadth, misses
        widths = {mode: [WIDEST] if mode == "aimd" else list(filter(None, windows)) for mode in modes}
        ways: list[Way] = [(mode, window) for mode in modes for window in widths[mode]]
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
        if not window:
            return self._costs.fixed(running)
        cache, drafts = cache_ms / 1000, float(window)
        if mode == "aimd":
            _, drafts = aimd(self._level(drafter) / LEVELS, self._misses)
        verify = self._costs.fixed(math.ceil(running * (1 + drafts * self._breadth)))
        draft = drafts * (running * self._drafters[drafter].each + self._drafters[drafter].base)
        return window_seconds(draft, verify + cache, mode == "decoupled") - cache

    def _tokens(self, level: int, way: Way) -> float:
        """Returns the tokens that a request of a level of acceptance gets from a pass."""
        mode, window = way
        if not window:
            return 1.0
        if mode == "aimd":
            return aimd(level / LEVELS, self._misses)[0]
        return window_tokens(level / LEVELS, window, mode == "decoupled")

    def _level(self, drafter: str) -> int:
        """Returns the level of a drafter's mean acceptance."""
        return round(self._drafters[drafter].acceptance * LEVELS)

    def _way(self, running: int, drafter: str, cache_ms: int) -> Way:
        """Returns the way to decode so many requests, whose cache takes so many milliseconds to read."""
        if not drafter or (self._below is not None and running > self._below):
            return PLAIN
        level = self._level(drafter)

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
        level = self._level(drafter) if drafter else 0
        return (self.seconds(running, drafter, way, cache_ms) + cached) / self.tokens(level, way)
