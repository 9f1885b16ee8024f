"""How much time a rollout leaves for training a head."""

import time


class TimeBudget:
    """Seconds that may be spent on training: a share of those that pass otherwise. What is left is kept.

    Args:
      share: of the other time.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._left = self._last = 0.0  # seconds; the last piece of work is what the next one is taken to need
        self._since = time.perf_counter()

    def resume(self) -> None:
        """What has passed until now does not count."""
        self._since = time.perf_counter()

    def allows(self) -> bool:
        """Whether there is time for another piece of work."""
        now = time.perf_counter()
        self._left += self._share * (now - self._since)
        self._since = now
        return self._left >= self._last

    def expect(self, seconds: float) -> None:
        """What the next piece of work is taken to need, before any was done."""
        self._last = seconds

    def spend(self, seconds: float) -> None:
        """A piece of work is over."""
        self._left -= seconds
        self._last = seconds
        self._since = time.perf_counter()
