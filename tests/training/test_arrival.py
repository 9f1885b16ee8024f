"""Batches in the order of arrival: the lag is bounded whatever the times; schedules are read as written."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljax.errors import ConfigError
from rljax.training.arrival import ArrivingBatches, GroupBuffer, ScheduledGroup, read_schedule
from rljax.training.batches import Batches


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(1, 3), st.integers(1, 8), st.booleans())
def test_no_lag_is_larger_and_every_group_is_in_one_batch(seed, size, lag, steps, resumes):
    rng = random.Random(seed)
    buffer, ended, batches = GroupBuffer(size, lag, steps * size), [], []
    for step in range(steps):
        while buffer.free_places(step):
            buffer.create(problem=buffer.created, step=step)
        while (batch := buffer.batch(step, ended)) is None:
            ended.append(rng.choice([number for number in buffer.open if number not in ended]))
        assert len(batch) == size
        assert all(step - buffer.open[number].version <= lag for number in batch)
        buffer.take(batch)
        ended = [number for number in ended if number not in batch]
        batches += batch
        if resumes:  # what had ended is decoded again
            state = json.loads(json.dumps(buffer.state()))
            buffer, ended = GroupBuffer(size, lag, steps * size), []
            buffer.load_state(state)
    assert sorted(batches) == list(range(steps * size))
    assert not buffer.open


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(1, 8), st.floats(0, 1))
def test_parked_groups_are_in_the_next_batch(seed, size, steps, share):
    """Or in that behind it; prompts are created one step ahead, and what is no outlier keeps its order."""
    rng = random.Random(seed)
    buffer, parked, batches = GroupBuffer(size, 2, steps * size, ahead=1), set(), []
    for step in range(steps):
        while buffer.free_places(step):
            buffer.create(problem=buffer.created, step=step)
        outliers = {number for number in buffer.open if rng.random() < share}
        ended = [number for number in buffer.open if number not in outliers or number in parked]
        while (batch := buffer.in_order(step, ended, outliers)) is None:
            late = rng.choice([number for number in buffer.open if number not in ended])
            ended.append(late)
            outliers.discard(late)
        assert len(batch) == size
        assert batch == sorted(batch)
        assert all(step - buffer.open[number].version <= 2 for number in batch)
        parked = {number for number in buffer.open if number < max(batch) and number not in batch}
        assert parked <= outliers
        buffer.take(batch)
        batches += batch
    assert sorted(batches) == list(range(steps * size))


def test_those_that_end_first_come_first_unless_others_are_due():
    buffer = GroupBuffer(size=2, lag=1, total=8)
    assert [buffer.create(problem, 0) for problem in range(buffer.free_places(0))] == [0, 1, 2, 3]
    assert buffer.batch(0, [3]) is None
    assert buffer.batch(0, [3, 1, 2]) == [3, 1]
    buffer.take([3, 1])
    assert [buffer.create(problem, 1) for problem in range(buffer.free_places(1))] == [4, 5]
    assert buffer.batch(1, [4, 5, 2]) is None  # 0 and 2 are of step 0
    assert buffer.batch(1, [4, 5, 0]) is None
    assert buffer.batch(1, [4, 5, 2, 0]) == [2, 0]


def test_a_schedule_is_read_as_it_was_written(tmp_path):
    group = ScheduledGroup(1, 7, 0, (((0, 0), (5, 1)), ((0, 1),)))
    line = json.dumps({"step": 2, "groups": [group.record()]})
    (tmp_path / "schedule.jsonl").write_text(line + "\n")
    assert read_schedule(str(tmp_path)) == read_schedule(str(tmp_path / "schedule.jsonl")) == {1: [group]}
    with pytest.raises(ConfigError, match=r"^cluster.replay: .*nowhere cannot be read \(No such file"):
        read_schedule(str(tmp_path / "nowhere"))
    (tmp_path / "schedule.jsonl").write_text('{"step": 2}\n')
    with pytest.raises(ConfigError, match="is no schedule of a run with max_staleness"):
        read_schedule(str(tmp_path))


def test_checkpoints_of_earlier_versions_say_which_groups_are_open(monkeypatch):
    """Under the name that these have in the checkpoints of all versions so far."""
    monkeypatch.setattr(Batches, "state", lambda self: ({}, {}))
    monkeypatch.setattr(Batches, "load_state", lambda self, host_state, held: None)
    buffer = GroupBuffer(2, 1, 4)
    buffer.create(problem=7, step=0)
    saved, batches = {"under_way": json.loads(json.dumps(buffer.state()))}, object.__new__(ArrivingBatches)
    batches._buffer = GroupBuffer(2, 1, 4)
    batches.load_state(saved, {})
    assert batches._buffer.state() == buffer.state()
    assert batches.state()[0] == {"under_way": buffer.state()}
