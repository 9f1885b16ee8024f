"""When the device works: how long a pass took, and how long the device waited for the host."""

import time

from rljax.requests import DecodeStatistics


class DeviceClock:
    """Follows the device's work as the host sees it.

    Attributes:
      last_end: when the last work ended that the host waited for, by `time.perf_counter`.
    """

    def begin(self, statistics: DecodeStatistics) -> None:
        """A rollout begins; idle time is added to its statistics."""
        self._statistics = statistics
        self.last_end = self._busy_until = time.perf_counter()

    def dispatched(self, seconds: float = 0.0) -> float:
        """The device was given work for about so long. Returns the time of day.

        The time since its earlier work was over counts as idle.
        """
        now = time.perf_counter()
        self._statistics.idle_seconds += max(0.0, now - self._busy_until)
        self._busy_until = max(now, self._busy_until) + seconds
        return now

    def host_waited(self) -> None:
        """Part of the time until now was the device's, for work that goes on."""
        self._busy_until = max(self._busy_until, time.perf_counter())

    def finished(self, still_busy: float = 0.0) -> float:
        """The host saw the end of a work. Returns the time of day.

        Args:
          still_busy: seconds that work behind it will take.
        """
        self.last_end = time.perf_counter()
        self._busy_until = self.last_end + still_busy
        return self.last_end
