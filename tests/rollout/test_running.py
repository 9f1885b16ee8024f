"""Running requests over time: short, and with the area it had."""

import numpy as np
import pytest

from rljax.rollout.running import RunningRequests


def area(points):
    times = np.asarray([0.0, *(until for until, _ in points)])
    return float(np.sum(np.diff(times) * [running for _, running in points]))


def test_equal_counts_are_one_point_and_time_counts_from_the_beginning():
    running = RunningRequests()
    for until, count in ((1.0, 4), (2.0, 4), (2.5, 3), (4.0, 3), (4.5, 1)):
        running._add(until, count)
    assert running.points() == [(2.0, 4), (4.0, 3), (4.5, 1)]
    running = RunningRequests()
    running.add(3)
    ((until, count),) = running.points()
    assert 0 <= until < 5 and count == 3


@pytest.mark.parametrize("host_syncs", [8, 9, 10, 1000, 1001])
def test_however_many_host_syncs_the_points_are_few_and_the_area_is_right(host_syncs):
    running, random = RunningRequests(most_points=8), np.random.default_rng(host_syncs)
    ends, counts = np.cumsum(random.random(host_syncs)), random.permutation(host_syncs)
    for end, count in zip(ends, counts, strict=True):
        running._add(float(end), int(count))
    points = running.points()
    assert len(points) <= 8
    assert points[-1][0] == pytest.approx(ends[-1], abs=1e-4)
    expected = area(list(zip(ends, counts, strict=True)))
    assert area(points) == pytest.approx(expected, rel=1e-2, abs=1e-2)  # what is kept is rounded
