"""What the runs of these tests share: a directory, the run without workers that all must equal, and a choice
of passes that no time decides.
"""

import itertools
import sys

import pytest

from rljax.speculation.device_proposers import DeviceProposer, SelfProposer
from rljax.speculation.draft_length import WorthStarting
from rljax.speculation.managers import expected as expected_manager
from rljax.speculation.pass_times import PassTimes
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


@pytest.fixture
def verifies_always(monkeypatch):
    """Every pass verifies, whatever was measured."""

    def choose(candidates, buckets, times, batch, length):
        sizes = [rows for rows, _ in buckets.passes(batch) if rows > len(candidates.current)]
        return sizes[-1]

    monkeypatch.setattr(expected_manager, "best_rows", choose)


@pytest.fixture
def drafts_always(monkeypatch):
    """Every second pass verifies, and drafters on the device take turns with those on the host: no measured
    time has a say in who is where, and when.
    """
    turns = itertools.cycle((True, False, True))

    def choose(candidates, buckets, times, batch, length):
        sizes = [rows for rows, _ in buckets.passes(batch) if rows > len(candidates.current)]
        return sizes[-1] if next(turns) else 0

    rates = itertools.cycle((1e9, 0.0))
    monkeypatch.setattr(expected_manager, "best_rows", choose)
    monkeypatch.setattr(PassTimes, "plain_is_old", lambda self, *_: False)
    monkeypatch.setattr(SelfProposer, "choose_length", lambda self, *_: (3, next(rates)))
    monkeypatch.setattr(WorthStarting, "allows", lambda self, *_: True)
    monkeypatch.setattr(DeviceProposer, "expected_rate", lambda self, *_: next(rates))
