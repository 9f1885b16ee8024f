"""How much a pass verifies: which nodes of which slots."""

import numpy as np
import pytest

from drafters.registry import make_drafter
from rljax.engine.buckets import Buckets
from rljax.engine.draft_tree import empty_tree, pack_rows
from rljax.rollout.collector import Scheduler
from rljax.speculation import acceptance, pass_times, warm_up
from rljax.speculation.acceptance import NodeCalibration
from rljax.speculation.pass_choice import Candidates, best_rows
from rljax.speculation.pass_times import PassTimes
from rljax.speculation.speculator import Speculator
from tests.tiny_policy import BUCKETS, SLOTS, FixedTimes, assert_same, by_rows, make_engine, outcomes

ROWS = (0, *BUCKETS.verify)


def found(probability, wanted=None, inactive=0, spent=0.0):
    probability = np.asarray(probability, float)
    wanted = np.ones(len(probability), bool) if wanted is None else np.asarray(wanted)
    return Candidates.from_nodes(probability > 0, probability, wanted, inactive, spent)


def choose(probability, times, **others):
    times = FixedTimes(dict(zip(ROWS, times, strict=True)))
    return best_rows(found(probability, **others), BUCKETS, times, 4, 64)


def test_passes_have_room_for_a_draft_and_no_more_than_there_can_be():
    assert BUCKETS.passes(4) == [(8, 3), (16, 7), (32, 7)]
    assert BUCKETS.passes(2) == [(8, 7), (16, 7)]
    many = Buckets((4, 16), (64,), (8, 16, 24, 64, 512), 15)
    assert many.passes(16) == [(24, 2), (64, 7), (256, 15)]
    assert many.passes(4) == [(8, 3), (16, 7), (24, 11), (64, 15)]
    assert Buckets((4,), (64,)).passes(4) == []


SURE, USELESS = [[1.0] * 7] * 4, [[0.0] * 7] * 4
FALLING = [[0.9, 0.8, 0.7, 0.1, 0.1, 0.1, 0.1]] * 4
ONE = [*USELESS[:3], SURE[0]]


@pytest.mark.parametrize(
    ("probability", "seconds", "spent", "rows"),
    [
        (SURE, [1, 1.1, 1.2, 1.4], 0, 32),
        (SURE, [1, 1.1, 1.2, 9], 0, 16),
        (SURE, [1, 1.1, 9, 99], 0, 8),
        (SURE, [1, 9, 99, 999], 0, 0),
        (USELESS, [1, 1.1, 1.2, 1.4], 0, 0),
        (FALLING, [1, 1.1, 1.2, 1.8], 0, 16),  # (4 + 9.6) / 1.2 against (4 + 11.2) / 1.8
        (FALLING, [1, 1.1, 1.2, 1.3], 0, 32),
        # What took long to draft is not left out for a pass that is only faster by itself.
        (SURE, [1, 1.1, 1.2, 3], 0, 16),
        (SURE, [1, 1.1, 1.2, 3], 2.0, 32),  # (4 + 28) / 5 against (4 + 12) / 3.2
        (SURE, [1, 1.1, 1.2, 1.4], 99.0, 32),
        (USELESS, [1, 1.1, 1.2, 1.4], 99.0, 0),
        # One slot in four is sure, and takes more than its share of a small pass: 4 + 3 tokens, or 4 + 7.
        (ONE, [1, 1.3, 2.1, 2.6], 0, 8),
        (ONE, [1, 1.3, 2.0, 2.6], 0, 16),
        (ONE, [1, 1.8, 2.8, 9], 0, 0),
        # Where nothing is gained, nothing is verified, whatever the clock says.
        (USELESS, [1, 0.9, 0.8, 0.7], 0, 0),
        (SURE, [1, 2, 4, 8], 0, 0),
        (np.zeros((0, 7)), [1, 1, 1, 1], 0, 0),
    ],
)
def test_the_pass_of_the_most_tokens_per_second_is_chosen(probability, seconds, spent, rows):
    assert choose(probability, seconds, spent=spent) == rows


def test_what_is_sampled_ahead_does_not_choose():
    only_first = np.arange(4) < 1
    # (1 + 7) / 1.2: all that the first may have
    assert choose(SURE, [1, 1.1, 1.2, 1.4], wanted=only_first) == 16
    assert choose(SURE, [1, 9, 9, 9], wanted=only_first) == 0
    assert choose(SURE, [1, 0.1, 0.1, 0.1], wanted=np.zeros(4, bool)) == 0


def test_a_pass_over_half_of_the_slots_competes_with_a_plain_step_of_all():
    half = [[1.0, 0, 0, 0, 0, 0, 0]] * 2
    assert choose(half, [1, 1.5, 9, 9]) == 8  # 4 tokens in 1.5, against 2 in 1
    assert choose(half, [1, 1.5, 9, 9], inactive=2) == 0  # against 4 in 1


def test_rows_go_to_the_most_likely_nodes_of_all_slots():
    rng = np.random.default_rng(0)
    for _ in range(300):
        slots, width = rng.integers(1, 6), 7
        usable = rng.random((slots, width)) < 0.8
        probability = np.round(rng.random((slots, width)), 1)
        wanted = rng.random(slots) < 0.7
        one = Candidates.from_nodes(usable, probability, wanted)
        for row in range(slots):
            own = one.probability[row, usable[row]]
            assert (np.diff(own) <= 0).all() and (own <= probability[row, usable[row]]).all()
        rows, nodes = int(rng.integers(1, 40)), int(rng.integers(1, width + 1))
        taken = one.take(rows, nodes)
        room = max(rows - slots, 0)
        possible = usable & (one.probability > 0)
        possible[:, nodes:] = False
        assert taken.sum() == min(room, possible.sum()) and not (taken & ~possible).any()
        for row in range(slots):  # a prefix of what is usable
            own = taken[row, possible[row]]
            assert (own == (np.arange(len(own)) < own.sum())).all()
        left = one.probability[wanted] * (possible & ~taken)[wanted]
        if taken.any() and left.size and left.any():
            assert one.probability[wanted][taken[wanted]].min(initial=1.0) >= left.max()
            assert not taken[~wanted].any()
        expected = wanted.sum() + one.probability[wanted][taken[wanted]].sum()
        assert one.expected(rows, nodes) == pytest.approx(expected if taken[wanted].any() else 0.0)


def test_equally_likely_nodes_are_shared_out():
    taken = found([[1.0] * 7] * 4).take(4 + 6, 7)
    assert taken.sum(axis=1).tolist() == [2, 2, 1, 1]


def test_times_are_medians_of_the_last_few():
    times = PassTimes()
    for seconds in (5.0, 1.0, 3.0):
        times.add_plain(2, 64, seconds)
    times.add_verify(2, 64, 16, 9.0)
    assert times.plain(2, 64) == 3.0 and times.verify(2, 64, 16) == 9.0
    for _ in range(pass_times._TIMES_KEPT):
        times.add_plain(2, 64, 2.0)
    times.add_plain(2, 64, 1e9)
    assert times.plain(2, 64) == 2.0
    (kept,) = (seconds for key, seconds in times._seconds.items() if key[0] == "plain")
    assert len(kept) == pass_times._TIMES_KEPT


def test_calibration_starts_at_the_drafters_word_and_ends_at_what_happened():
    calibration = NodeCalibration()
    bins = calibration.bins(np.log(np.asarray([0.01, 0.5, 0.99, 1.0], np.float32)))
    assert bins.tolist() == [0, 8, 15, 15]
    strange = np.asarray([[np.nan, np.inf, -np.inf, 88.0, -1e30]], np.float32)  # no probabilities
    assert calibration.bins(strange).tolist() == [[0, 15, 0, 15, 0]]
    np.testing.assert_allclose(calibration.rates, (np.arange(16) + 0.5) / 16)
    before = calibration.rates.copy()
    accepted = np.arange(4000) % 10 == 0
    calibration.add(np.full(4000, 15), accepted)
    assert calibration.rates[15] == pytest.approx(0.1, abs=2e-3)
    np.testing.assert_array_equal(calibration.rates[:15], before[:15])
    calibration.add(np.full(400, 3), np.ones(400, bool))
    assert calibration.rates[3] == pytest.approx(1.0, abs=1e-2)
    calibration.add(np.zeros(0, int), np.zeros(0, bool))
    weight = calibration._total[15]
    calibration.forget()
    assert calibration._total[15] == weight * acceptance._FORGET
    assert calibration.rates[15] == pytest.approx(0.1, abs=4e-3)  # believed less, not otherwise
    assert ((calibration.rates >= 0) & (calibration.rates <= 1)).all()


def test_a_pass_that_does_not_fit_into_memory_is_never_run(params, requests, expected, monkeypatch):
    """The device has room for what passes over 16 rows need, and not for one over 32."""
    buckets = Buckets((4,), (128,), (16, 32), 7)
    engine = make_engine(buckets=buckets)
    tree = empty_tree(4, 7)
    packed = {rows: pack_rows(tree, np.arange(4), rows) for rows in (16, 32)}
    state = engine.init_state(4, 128)
    needed = {rows: engine.verify_bytes(params, state, tree, packed[rows]) for rows in packed}
    assert needed[16] < needed[32]
    monkeypatch.setattr(warm_up, "free_bytes", lambda: needed[32] - 1)

    def largest(candidates, buckets, times, batch, length):  # whatever this machine's clock says
        return buckets.passes(batch)[-1][0] if candidates.probability.any() else 0

    choice = by_rows(largest)
    speculator = Speculator(engine, {"srt": make_drafter("srt")}, SLOTS, strategies=choice)
    message = r"a pass over 32 tokens of 4 responses needs \d+ MB where \d+ MB are free: it is left out"
    with pytest.warns(UserWarning, match=message):
        speculator.warm_up(params)
    assert engine.buckets.passes(4) == [(16, 7)]

    for _ in range(2):
        completions, statistics = Scheduler(engine, SLOTS, None, speculator).run(params, requests)
        assert_same(completions, expected)
        speculator.learn(outcomes(requests, completions))
    assert statistics.verified > 0
    assert {each["rows"] for each in speculator.decisions.take()} == {0, 16}
