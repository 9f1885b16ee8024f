"""Limits the time that training a head takes from rollouts."""

import time

from rljax.processes import agree


class TimeBudget:
    """A budget of seconds for training: a share of the time that passes otherwise. Unspent time is kept.

    Args:
      share: seconds of training for each other second.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._left = self._last = 0.0  # seconds; the next slice is expected to take as long as the last
        self._since = time.perf_counter()

    def resume(self) -> None:
        """Starts counting anew: the time since the last call adds nothing to the budget."""
        self._since = time.perf_counter()

    def earn(self, seconds: float) -> None:
        """Adds the share of time that passed in other processes."""
        self._left += self._share * seconds
        self.resume()

    def allows(self) -> bool:
        """Returns whether the budget covers another slice."""
        now = time.perf_counter()
        self._left += self._share * (now - self._since)
        self._since = now
        left, last = agree(self._left, self._last)
        return left >= last

    def expect(self, seconds: float) -> None:
        """Sets the expected seconds of the next slice, before the first one."""
        self._last = seconds

    def spend(self, seconds: float) -> None:
        """Takes the seconds of a finished slice from the budget."""
        self._left -= seconds
        self._last = seconds
        self._since = time.perf_counter()
