"""What the runs of these tests share: a directory, and the run without workers that all must equal."""

import sys

import pytest

from tests.cluster.same_run import lucky_world, run


@pytest.fixture(scope="package")
def world(tmp_path_factory):
    with lucky_world(tmp_path_factory) as world:
        yield world


@pytest.fixture(scope="package")
def alone(world):
    """The run without workers, which needs no Ray."""
    before = "ray" in sys.modules
    alone = run(world, "alone")
    assert before or "ray" not in sys.modules
    return alone


@pytest.fixture(scope="package")
def stale_alone(world):
    """The run with staleness of one process, which every other one must equal."""
    return run(world, "stale_alone", "rollout.staleness=1", steps=3)
