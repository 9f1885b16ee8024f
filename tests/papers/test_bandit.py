"""Which strategy is chosen: by hand, and against simulated passes whose speed changes."""

import dataclasses

import numpy as np
import pytest

from rljax.papers.tlt import TltKeys
from rljax.papers.tlt.bandit import BegMab
from rljax.speculation.strategies import Strategy
from tests.speculation.test_saved_state import through_a_file

HEAD, HEAD_SMALL = Strategy(4, 4, 15, "eagle"), Strategy(3, 2, 6, "eagle")
HISTORY = Strategy(15, 1, 15, "srt")
ARMS = {2: (None, HEAD, HISTORY), 8: (None, HEAD, HEAD_SMALL, HISTORY)}


def bandit(epsilon=0.0, window=8, seed=0, arms=ARMS):
    return BegMab(arms, epsilon, window, seed)


def fill(one, batch, rewards, times=3):
    """So many tokens per second, for every arm."""
    for arm, rate in rewards.items():
        for _ in range(times):
            one.record(batch, arm, 100, 100 / rate)


# -- by hand -------------------------------------------------------------------------------------------------


def play(one, batch, steps, seconds=lambda arm: 1.0):
    """The arms of so many steps, of 8 tokens each in the seconds that the arm takes."""
    chosen = []
    for _ in range(steps):
        chosen.append(one.choose(batch))
        one.record(batch, chosen[-1], 8, seconds(chosen[-1]))
    return chosen


def test_every_arm_is_tried_three_times_before_any_median_counts():
    head_is_best = lambda arm: 0.1 if arm is HEAD else 1.0  # noqa: E731
    one = bandit(epsilon=0.5)
    assert play(one, 8, 12, head_is_best) == [None, HEAD, HEAD_SMALL, HISTORY] * 3
    assert one.explain(8).reason == "try 3 of 3 before any median counts"
    # As many as are kept.
    assert play(bandit(window=1), 2, 4, head_is_best) == [None, HEAD, HISTORY, HEAD]


def test_without_exploration_the_best_median_wins_whatever_the_outliers():
    one = bandit()
    for seconds in (1.0, 1.0, 1.0, 1.0, 100.0):  # something held up one step; the mean is 1 / 20
        one.record(2, HEAD, 100, seconds)
    for seconds in (1.25, 1.25, 1.25, 1.25, 1e-3):  # a clock that jumped: the mean is 20,000
        one.record(2, HISTORY, 100, seconds)
    fill(one, 2, {None: 50})
    assert {one.choose(2) for _ in range(50)} == {HEAD}
    strategy, reason, medians = one.explain(2)
    assert strategy == HEAD
    assert medians == {None: pytest.approx(50), HEAD: pytest.approx(100), HISTORY: pytest.approx(80)}
    assert reason == "the largest median, 100 tokens/s against 50 plain"


def test_the_plain_step_wins_where_speculation_does_not_pay():
    """Rewards are those of line 9: three tokens accepted of four responses, in a quarter of a second. Only
    responses get tokens, no idle slots; which arm is best does not depend on how many there are.
    """
    one = bandit()
    one.record(4, None, 3 + 4, 0.25)
    one.choose(4)
    assert one.explain(4).medians == {None: pytest.approx((3 / 4 + 1) * 4 / 0.25)}
    for rates, responses, best, reason in (
        ((100, 90, 99, 100), 8, None, "the largest median, 100 tokens/s"),
        ((40, 80, 16, 16), 2, HEAD, "the largest median, 20 tokens/s against 10 plain"),
    ):
        one = bandit()
        fill(one, 8, dict(zip(ARMS[8], rates, strict=True)))
        assert one.choose(8, responses=responses) == best
        assert one.explain(8).reason == reason


def test_batches_of_a_bucket_share_its_arms_and_buckets_share_nothing():
    one = bandit()
    fill(one, 8, {None: 1, HEAD: 2, HEAD_SMALL: 3, HISTORY: 2})
    assert [one.choose(batch) for batch in (3, 5, 8)] == [HEAD_SMALL] * 3
    assert one.choose(1) is None and one.choose(2) is None  # still to be tried
    fill(one, 1, {None: 3, HEAD: 1, HISTORY: 2})
    assert one.choose(2) is None and "median" in one.explain(1).reason
    for batch in (0, -1, 9):
        with pytest.raises(ValueError, match=f"a batch of {batch} is in no bucket; the largest is 8"):
            one.choose(batch)


def test_a_shrinking_batch_makes_no_arm_look_better():
    """Steps of a bucket take as long over 5 responses as over 8: an arm tried over 8 got more tokens. Nor
    where the bucket is computed whole, and some of its slots are empty.
    """
    rates = {None: 1.0, HEAD: 3.0, HEAD_SMALL: 2.0, HISTORY: 1.5}  # per response
    one, two = bandit(window=3), bandit(window=3)
    for arm, rate in rates.items():
        for _ in range(3):
            one.record(8, arm, round(8 * rate), 1.0)
            two.record(8, arm, round(4 * rate), 1.0, responses=4)
    for _ in range(3):
        one.record(5, HEAD, 15, 1.0)  # 15 tokens/s, where HEAD_SMALL once had 16
    assert one.choose(5) == HEAD
    assert one.explain(5).medians == pytest.approx({arm: 5 * rate for arm, rate in rates.items()})
    assert two.choose(8) == HEAD and two.explain(8).medians[HEAD] == pytest.approx(24)


def test_explores_as_often_as_it_should_and_evenly():
    """And depends on the seed, and on nothing global."""
    one = bandit(epsilon=0.4)
    fill(one, 8, {None: 1, HEAD: 2, HEAD_SMALL: 4, HISTORY: 3})
    chosen = []
    for _ in range(4000):
        chosen.append(one.choose(8))
        explored = one.explain(8).reason == "explores (epsilon 0.4)"
        assert explored or chosen[-1] == HEAD_SMALL
    for arm in (None, HEAD, HISTORY):  # each an own quarter of 4 in 10; five standard deviations
        assert abs(chosen.count(arm) - 400) < 5 * np.sqrt(4000 * 0.1 * 0.9)

    def run(seed, elsewhere):
        one = bandit(epsilon=1.0, seed=seed)
        fill(one, 8, dict.fromkeys(ARMS[8], 1))
        np.random.seed(elsewhere)
        return [one.choose(8) for _ in range(40)]

    assert run(0, elsewhere=0) == run(0, elsewhere=1) != run(1, elsewhere=1)


def test_a_drafter_that_is_not_available_leaves_its_place_to_the_others():
    one = bandit()
    one.set_available("eagle", False)
    assert play(one, 8, 6, lambda arm: 2.0 if arm is None else 1.0) == [None, HISTORY] * 3
    assert one.choose(8) == HISTORY
    assert one.explain(8).reason == "the largest median, 8 tokens/s against 4 plain; not available: eagle"
    assert set(one.explain(8).medians) == {None, HISTORY}
    one.set_available("eagle", True)
    assert one.choose(8) == HEAD
    fill(one, 8, {HEAD: 100, HEAD_SMALL: 50})
    assert one.choose(8) == HEAD and one.explain(8).reason.endswith("plain")
    fill(one, 8, {HEAD: 7, HEAD_SMALL: 6}, times=8)  # a head that loses
    assert one.choose(8) == HISTORY
    alone = bandit(arms={4: (None, HEAD)})
    alone.set_available("eagle", False)
    assert alone.choose(4) is None
    assert alone.explain(4).reason == "there is nothing else; not available: eagle"


def test_what_makes_no_sense_is_refused():
    one = bandit()
    with pytest.raises(ValueError, match="nothing was chosen for a batch of 2 yet"):
        one.explain(2)
    with pytest.raises(ValueError, match="eagle 3/2/6 is no arm of a batch of 2"):
        one.record(2, HEAD_SMALL, 1, 1.0)
    for tokens, seconds in ((1, 0.0), (1, -1.0), (1, float("nan")), (-1, 1.0)):
        with pytest.raises(ValueError, match="tokens of 2 responses in"):
            one.record(2, HEAD, tokens, seconds)
    for epsilon in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="epsilon"):
            TltKeys(epsilon=epsilon)
    with pytest.raises(ValueError, match="window"):
        TltKeys(window=0)
    with pytest.raises(ValueError, match="batch 4: the plain step is not among its arms"):
        bandit(arms={4: (HEAD,)})


# -- checkpoints ---------------------------------------------------------------------------------------------


def played(one, steps, seed=0):
    rng = np.random.default_rng(seed)
    chosen = []
    for _ in range(steps):
        batch = int(rng.integers(1, 9))
        chosen.append(one.choose(batch))
        one.record(batch, chosen[-1], int(rng.integers(1, 50)), float(rng.random() + 0.1))
    return chosen


def test_a_resumed_bandit_goes_on_as_before():
    one, two = bandit(epsilon=0.3), bandit(epsilon=0.3)
    played(one, 200)
    played(two, 30, seed=7)  # what it knew is replaced
    other = {"mixture": np.arange(3)}
    assert two.load_state(through_a_file(one.state() | other)).keys() == other.keys()
    assert {name: array.tolist() for name, array in two.state().items()} == {
        name: array.tolist() for name, array in one.state().items()
    }
    assert played(one, 300, seed=1) == played(two, 300, seed=1)
    # Nothing learned yet is a state, too, and a checkpoint without one changes nothing.
    three = bandit(epsilon=0.3)
    three.load_state(through_a_file(bandit().state()))
    assert three.choose(8) is None
    before = one.state()
    assert one.load_state(other).keys() == other.keys()
    assert all(np.array_equal(before[name], array) for name, array in one.state().items())


def test_other_strategies_keep_what_still_fits():
    one = bandit()
    fill(one, 2, {None: 1, HEAD: 2, HISTORY: 3})
    fill(one, 8, {None: 10, HEAD: 20, HEAD_SMALL: 30, HISTORY: 40}, times=6)
    new = dataclasses.replace(HEAD, nodes=12)
    two = BegMab({4: (None, HEAD), 8: (None, new, HISTORY, HEAD_SMALL)}, 0.0, 4, 0)
    two.load_state(through_a_file(one.state()))
    assert two.choose(8) == new  # to be tried
    assert two.explain(8).medians == pytest.approx({None: 10, HEAD_SMALL: 30, HISTORY: 40})
    assert two.choose(4) is None and two.explain(4).medians == {}
    one.record(8, HISTORY, 8, 1.0)
    two.load_state(through_a_file(one.state()))
    state = two.state()
    last = [tuple(numbers) for numbers in state["bandit_numbers"].tolist()].index((15, 1, 15))
    end = state["bandit_counts"][: last + 1].sum()
    assert state["bandit_counts"][last] == 4  # the newest of the window
    assert state["bandit_rates"][end - 4 : end].tolist() == [5.0, 5.0, 5.0, 1.0]


# -- simulated -----------------------------------------------------------------------------------------------


def simulate(choose, record, steps, seed):
    """Passes that bring 8 responses a token each; some are held up.

    Returns:
      The regret: seconds more than with the best arm of each phase, but for the noise; and the choices.
    """
    rng, regret, chosen = np.random.default_rng(seed), 0.0, []
    for step in range(steps):
        rates = PHASES[step * len(PHASES) // steps]
        arm = choose()
        held_up = 20.0 if rng.random() < 0.03 else 1.0
        record(arm, 8 / rates[arm] * held_up * rng.lognormal(0, 0.15))
        regret += 8 / rates[arm] - 8 / max(rates.values())
        chosen.append(arm)
    return regret, chosen


# Tokens per second, one phase of training after the other.
PHASES = [
    {None: 100, HEAD: 60, HEAD_SMALL: 80, HISTORY: 50},  # untrained, and nothing to remember
    {None: 100, HEAD: 90, HEAD_SMALL: 120, HISTORY: 250},  # prompts come back
    {None: 100, HEAD: 400, HEAD_SMALL: 200, HISTORY: 150},  # trained
]


@pytest.mark.parametrize("seed", range(2))
def test_learns_which_arm_is_best_while_that_changes(seed):
    one = bandit(epsilon=0.1, window=16, seed=seed)
    steps = 6000
    regret, chosen = simulate(
        lambda: one.choose(8), lambda arm, seconds: one.record(8, arm, 8, seconds), steps, seed
    )
    fixed = [simulate(lambda arm=arm: arm, lambda arm, seconds: None, steps, seed)[0] for arm in ARMS[8]]
    assert regret < min(fixed) < max(fixed)  # better than any arm alone, not only than the worst
    # At the end of each phase, whoever is best is chosen, but for the exploration.
    for phase, rates in enumerate(PHASES):
        last = chosen[steps * phase // 3 : steps * (phase + 1) // 3][-500:]
        best = max(rates, key=rates.get)
        assert last.count(best) / len(last) > 0.85, (phase, best)


@pytest.mark.parametrize("window", [1, 5, 16])
def test_an_arm_that_gets_worse_is_left_within_a_window(window):
    one = bandit(window=window)
    fill(one, 8, {None: 100, HEAD: 300, HEAD_SMALL: 120, HISTORY: 200}, times=window)
    used = 0
    while one.choose(8) == HEAD:
        one.record(8, HEAD, 8, 8 / 50)
        used += 1
    assert 0 < used <= window
    assert one.explain(8).strategy == HISTORY
    assert one.explain(8).medians[HISTORY] == pytest.approx(200)
