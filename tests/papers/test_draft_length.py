"""The draft length over steps, against sequences worked out by hand."""

import numpy as np
import pytest

from rljax.papers.efficient_rollout import ToggleConfig
from rljax.papers.efficient_rollout.draft_length import DraftLengthSchedule, StepAcceptance
from tests.configs import experiment

HIGH, BETWEEN, LOW = 0.95, 0.90, 0.80


def schedule(**keys):
    return DraftLengthSchedule(ToggleConfig(**keys))


def lengths(ladder, *acceptances):
    return [ladder.update(acceptance) for acceptance in acceptances]


def test_up_and_down_after_two_steps_in_a_row():
    ladder = schedule()
    assert ladder.length == 5
    assert lengths(ladder, HIGH, HIGH, HIGH, HIGH) == [5, 7, 7, 9]
    assert lengths(ladder, LOW, LOW, LOW, LOW) == [9, 7, 7, 5]


def test_the_papers_block_efficiencies():
    """Appendix G.3: Qwen2.5-7B rises at 5.73, 7.60 and 9.48 tokens a pass; Llama stays at 5 with 5.5."""
    ladder = schedule(patience=1)
    assert [ladder.update((tau - 1) / ladder.length) for tau in (5.73, 7.60, 9.48)] == [7, 9, 11]
    assert schedule(patience=1).update((5.5 - 1) / 5) == 5
    # 1 + 5 * 0.94 = 5.70 is where it rises.
    assert schedule(patience=1).update((5.69 - 1) / 5) == 5


def test_thresholds_belong_to_the_rungs_beyond():
    assert schedule(patience=1).update(0.94) == 7
    assert schedule(first=7, patience=1).update(0.85) == 5
    assert schedule(first=7, patience=1).update(0.8501) == 7
    assert schedule(patience=1).update(0.9399) == 5


def test_between_the_thresholds_nothing_moves_however_long():
    ladder = schedule(first=7)
    assert lengths(ladder, *[BETWEEN] * 10) == [7] * 10


def test_anything_else_in_between_begins_patience_anew():
    ladder = schedule(first=7)
    assert lengths(ladder, HIGH, BETWEEN, HIGH, LOW, HIGH, LOW, BETWEEN, LOW) == [7] * 8
    assert lengths(ladder, LOW) == [5]
    three = schedule(patience=3)
    assert lengths(three, HIGH, HIGH, LOW, HIGH, HIGH, HIGH) == [5, 5, 5, 5, 5, 7]


def test_a_new_length_is_given_its_own_patience():
    """The steps that led to it were drafted at another length and do not count again."""
    ladder = schedule(patience=3)
    assert lengths(ladder, *[HIGH] * 8) == [5, 5, 7, 7, 7, 9, 9, 9]
    # As printed, max(5.73, 6.9) <= 1 + 7 * 0.85 would go back after one step at 7.
    ladder = schedule()
    lengths(ladder, (5.73 - 1) / 5, (5.73 - 1) / 5)
    assert ladder.length == 7
    assert ladder.update((6.9 - 1) / 7) == 7
    assert ladder.update((6.9 - 1) / 7) == 5


def test_the_ends_hold():
    ladder = schedule(lengths=(2, 4))
    assert lengths(ladder, LOW, LOW, LOW, HIGH, HIGH, HIGH, HIGH) == [2, 2, 2, 2, 4, 4, 4]
    assert lengths(ladder, LOW, LOW) == [4, 2]  # what could not lead on is no debt
    only = schedule(lengths=(3,), patience=1)
    assert lengths(only, HIGH, LOW) == [3, 3]


def test_a_step_without_drafts_says_nothing():
    ladder = schedule()
    assert lengths(ladder, HIGH, None, None, HIGH) == [5, 5, 5, 7]


@pytest.mark.parametrize("acceptance", [-0.1, 1.1, float("nan")])
def test_acceptance_is_a_share(acceptance):
    with pytest.raises(ValueError, match="expected a share"):
        schedule().update(acceptance)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"lengths": ()}, "lengths"),
        ({"lengths": (0, 1)}, "lengths"),
        ({"lengths": (5, 5)}, "lengths"),
        ({"first": 6}, "first: 6"),
        ({"alpha_up": 0.8}, "alpha_up"),
        ({"alpha_up": 1.2}, "alpha_up"),
        ({"patience": 0}, "patience"),
    ],
)
def test_what_cannot_be_is_refused(arguments, named):
    speculation = {"drafter": "quantized", "choice": "roofline", "toggle": arguments}
    with pytest.raises(ValueError, match=named):
        experiment(speculation=speculation)


@pytest.mark.parametrize("at", range(9))
def test_a_restored_ladder_goes_on_as_before(at):
    steps = [HIGH, HIGH, HIGH, LOW, HIGH, HIGH, LOW, LOW, LOW]
    through, before, after = schedule(), schedule(), schedule()
    expected = lengths(through, *steps)
    lengths(before, *steps[:at])
    state = before.state()
    assert all(isinstance(value, np.ndarray) for value in state.values())
    after.load_state(state)
    assert lengths(after, *steps[at:]) == expected[at:]


def test_a_state_of_other_lengths_or_none():
    ladder = schedule(first=9)
    ladder.update(HIGH)
    other = schedule(lengths=(4, 8, 12))
    other.load_state(ladder.state())
    assert other.length == 8
    assert lengths(other, HIGH, HIGH) == [8, 12]  # it has seen no step of this length yet
    short = schedule(lengths=(20, 30), first=30)
    short.load_state(ladder.state())
    assert short.length == 20
    fresh = schedule(first=7)
    fresh.load_state({})
    assert fresh.length == 7


# -- the acceptance of a step ------------------------------------------------------------------------------


def test_of_whole_chains_the_share_is_that_of_accepted_drafts():
    rng = np.random.default_rng(0)
    accepted = rng.integers(0, 8, 50)
    step = StepAcceptance()
    assert step.share(7) is None
    for part in np.split(accepted, 5):  # five passes
        step.add(np.minimum(part + 1, 7), part)
    assert step.share(7) == pytest.approx(accepted.sum() / (50 * 7))


@pytest.mark.parametrize("rate", [0.6, 0.95])
def test_cut_chains_give_the_share_of_whole_ones(rate):
    """Drafts are right with a known probability, and every chain is cut at a depth of its own."""
    rng = np.random.default_rng(1)
    length, chains = 7, 20_000
    right = np.minimum(rng.geometric(1 - rate, chains) - 1, length)
    offered = rng.integers(1, length + 1, chains)
    accepted = np.minimum(right, offered)
    step = StepAcceptance()
    step.add(np.minimum(accepted + 1, offered), accepted)
    assert step.share(length) == pytest.approx(right.sum() / (chains * length), abs=0.01)
    assert accepted.sum() / offered.sum() > step.share(length) + 0.03  # what shorter chains suggest
    # No chain of a step may have been as long as the ladder's.
    assert step.share(11) == pytest.approx(np.mean(rate ** np.arange(1, 12)), abs=0.02)


def test_a_restored_step_goes_on_as_before():
    step, again = StepAcceptance(), StepAcceptance()
    step.add(np.asarray([3, 2]), np.asarray([2, 2]))
    again.load_state(step.state())
    assert again.share(5) == step.share(5) is not None
    again.load_state(np.zeros((2, 3), np.int64))
    assert again.share(5) == step.share(5)
