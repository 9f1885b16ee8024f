"""The number of running requests over a rollout, as a curve of few points that shows its long tail."""

import time

_MOST_POINTS = 256


class RunningRequests:
    """Counts running requests over time. Merging points keeps the area under the curve exact.

    Args:
      most_points: even number of points beyond which neighbours are merged.
    """

    def __init__(self, most_points: int = _MOST_POINTS) -> None:
        self._most = most_points
        self._began = time.perf_counter()
        self._points: list[tuple[float, float]] = []

    def add(self, running: int) -> None:
        """Records the number of requests that ran since the last call, or since the beginning."""
        self._add(time.perf_counter() - self._began, running)

    def _add(self, until: float, running: float) -> None:
        points = self._points
        if points and points[-1][1] == running:
            points[-1] = (until, running)
            return
        points.append((until, running))
        if len(points) > self._most:
            began, merged = 0.0, []
            for first, second in zip(points[::2], points[1::2], strict=False):
                area = (first[0] - began) * first[1] + (second[0] - first[0]) * second[1]
                seconds = second[0] - began
                merged.append((second[0], area / seconds if seconds else second[1]))
                began = second[0]
            self._points = merged + points[2 * len(merged) :]

    def points(self) -> list[tuple[float, float]]:
        """Returns (seconds since the beginning, requests that ran since the previous point), in order."""
        return [(round(seconds, 4), round(running, 2)) for seconds, running in self._points]
