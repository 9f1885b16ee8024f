"""What everyone did when, as the report gets it."""

import numpy as np

from rljax.cluster.ledger import Ledger
from rljax.cluster.messages import Piece, Pieces
from rljax.cluster.timeline import Timeline, described
from rljax.requests import Completion, DecodeStatistics, Request


def test_spans_follow_the_states_and_go_on_in_the_next_record():
    timeline = Timeline(100.0)
    timeline.observe({"trainer": "waiting", "worker-0": "starting"}, 100.0)
    timeline.observe({"trainer": "waiting", "worker-0": "starting"}, 101.0)
    timeline.observe({"trainer": "waiting", "worker-0": "decoding", "worker-1": "idle"}, 102.0)
    timeline.observe({"trainer": "training", "worker-1": "idle"}, 103.5)  # worker-0 is lost
    record = timeline.take(104.0)
    assert (record["seconds"], record["moved"]) == (4.0, 0)
    assert list(record["rows"]) == ["trainer", "worker-0", "worker-1"]
    assert record["rows"]["trainer"] == {"spans": [[0.0, 3.5, "waiting"], [3.5, 4.0, "training"]]}
    assert record["rows"]["worker-0"]["spans"] == [[0.0, 2.0, "starting"], [2.0, 3.5, "decoding"]]
    timeline.observe({"trainer": "waiting", "worker-1": "decoding"}, 106.0)
    rows = timeline.take(107.0)["rows"]
    assert rows["worker-1"]["spans"] == [[0.0, 2.0, "idle"], [2.0, 3.0, "decoding"]]
    assert "worker-0" not in rows


def test_flickering_is_one_span():
    timeline = Timeline(0.0)
    timeline.observe({"worker-0": "decoding"}, 0.0)
    for tick in range(1, 100):
        timeline.observe({"worker-0": "idle"}, tick + 0.001)
        timeline.observe({"worker-0": "decoding"}, tick + 0.002)
    assert timeline.take(100.0)["rows"]["worker-0"]["spans"] == [[0.0, 100.0, "decoding"]]


def test_tokens_are_of_those_that_sampled_them():
    ledger, timeline = Ledger(), Timeline(0.0)
    ledger.open([0, 1], 0)
    ledger.add("worker-0", Piece(0, 0, 0, (1, 2, 3), (-1.0,) * 3))
    ledger.add("worker-1", Piece(0, 0, 2, (3, 4), (-1.0,) * 2, "eos"))
    ledger.add("worker-1", Piece(1, 0, 0, (7,), (-1.0,), "eos"))
    timeline.count(ledger, [0, 1])
    record = timeline.take(1.0)
    assert record["moved"] == 1
    assert record["rows"]["worker-0"] == {"spans": [], "tokens": 3, "responses": 0}
    assert record["rows"]["worker-1"] == {"spans": [], "tokens": 2, "responses": 2}


def reported(timeline, worker, rollout, busy, **counts):
    timeline.passes(Pieces(worker, rollout, (), DecodeStatistics(**counts), busy, 2 * busy))


def test_passes_are_those_between_two_reports():
    timeline = Timeline(0.0)
    timeline.observe({"w": "decoding"}, 0.0)
    reported(timeline, "w", 1, 3.0, host_syncs=1, steps=4, rows=32, prefilled_tokens=20)
    reported(timeline, "w", 1, 5.0, host_syncs=2, steps=8, rows=64, prefilled_tokens=20)
    reported(timeline, "w", 1, 3.0, host_syncs=1, steps=4, rows=32, prefilled_tokens=20)  # late
    reported(timeline, "w", 1, 6.0, host_syncs=3, steps=10, rows=68, prefilled_tokens=20)
    reported(timeline, "w", 1, 9.0, host_syncs=5, steps=13, rows=75, prefilled_tokens=20)  # one was lost
    row = timeline.take(10.0)["rows"]["w"]
    assert (row["passes"], row["cpu"]) == ([[2, 2, 1.0, 0], [8, 4, 2.0, 0], [8, 4, 3.0, 20]], 18.0)
    reported(timeline, "w", 2, 1.0, host_syncs=1, steps=2, rows=16)  # another rollout counts from nothing
    timeline.observe({"w": "idle"}, 11.0)
    assert timeline.take(12.0)["rows"]["w"]["passes"] == [[8, 2, 1.0, 0]]


def test_lengths_are_in_the_order_in_which_they_were_handed_out():
    timeline = Timeline(0.0)
    requests = [Request(prompt, np.zeros(2, np.uint32), 9) for prompt in ((7, 7), (7, 7), (8,))]
    completions = [Completion(np.zeros(n, np.int32), np.zeros(n, np.float32), "eos") for n in (3, 5, 4)]
    timeline.handed_out(requests, completions)
    assert timeline.take(1.0)["groups"] == [(2, [3, 5]), (1, [4])]
    assert "groups" not in timeline.take(2.0)


def test_the_displays_phrase():
    states = {"trainer": "waiting", "worker-0": "decoding", "worker-1": "decoding", "worker-2": "starting"}
    assert described(states) == "3 workers: 2 decoding, 1 starting"
    assert described({"worker-0": "idle"}) == "1 worker: 1 idle"
    assert described({}) == "0 workers"
