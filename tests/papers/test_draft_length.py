"""The draft length over steps, against sequences worked out by hand."""

import numpy as np
import pytest

from rljax.papers.efficient_rollout import ToggleConfig
from rljax.papers.efficient_rollout.draft_length import DraftLengthSchedule, StepAcceptance

HIGH, BETWEEN, LOW = 0.95, 0.90, 0.80


def schedule(**keys):
    return DraftLengthSchedule(ToggleConfig(**keys))


def lengths(ladder, *acceptances):
    return [ladder.update(acceptance) for acceptance in acceptances]


H, B, L, N = HIGH, BETWEEN, LOW, None  # N: a step without drafts, which says nothing
SEQUENCES = {
    "up after two steps in a row": ({}, [H, H, H, H], [5, 7, 7, 9]),
    "and down": ({"first": 9}, [L, L, L, L], [9, 7, 7, 5]),
    "between the thresholds nothing moves": ({"first": 7}, [B] * 10, [7] * 10),
    "anything else begins patience anew": ({"first": 7}, [H, B, H, L, H, L, B, L, L], [7] * 8 + [5]),
    "also of three": ({"patience": 3}, [H, H, L, H, H, H], [5, 5, 5, 5, 5, 7]),
    "a new length has its own patience": ({"patience": 3}, [H] * 8, [5, 5, 7, 7, 7, 9, 9, 9]),
    "a step without drafts": ({}, [H, N, N, H], [5, 5, 5, 7]),
    "the ends hold": ({"lengths": (2, 4)}, [L, L, L, H, H, H, H, L, L], [2, 2, 2, 2, 4, 4, 4, 4, 2]),
    "one length": ({"lengths": (3,), "patience": 1}, [H, L], [3, 3]),
    # Thresholds belong to the rungs beyond.
    "from 0.94 on": ({"patience": 1}, [0.9399, 0.94], [5, 7]),
    "to 0.85": ({"first": 7, "patience": 1}, [0.8501, 0.85], [7, 5]),
    # Appendix G.3: Qwen2.5-7B rises at 5.73, 7.60 and 9.48 tokens a pass; Llama stays at 5 with 5.5. It rises
    # from 1 + 5 * 0.94 = 5.70 on.
    "Qwen": ({"patience": 1}, [4.73 / 5, 6.60 / 7, 8.48 / 9], [7, 9, 11]),
    "Llama": ({"patience": 1}, [4.5 / 5, 4.69 / 5], [5, 5]),
    # As printed, max(5.73, 6.9) <= 1 + 7 * 0.85 would go back after one step at 7.
    "not as printed": ({}, [4.73 / 5, 4.73 / 5, 5.9 / 7, 5.9 / 7], [5, 7, 7, 5]),
}


def test_up_and_down_after_two_steps_in_a_row():
    for name, (keys, acceptances, expected) in SEQUENCES.items():
        assert lengths(schedule(**keys), *acceptances) == expected, name
    for acceptance in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="expected a share"):
            schedule().update(acceptance)


def test_a_restored_ladder_goes_on_as_before():
    steps = [HIGH, HIGH, HIGH, LOW, HIGH, HIGH, LOW, LOW, LOW]
    for at in range(9):
        before, after = schedule(), schedule()
        lengths(before, *steps[:at])
        after.load_state(before.state())
        assert lengths(after, *steps[at:]) == lengths(schedule(), *steps)[at:]
    # Other lengths than those of the state, or none.
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


@pytest.mark.parametrize("rate", [0.6, 0.95])
def test_cut_chains_give_the_share_of_whole_ones(rate):
    """Drafts are right with a known probability, and every chain is cut at a depth of its own."""
    rng = np.random.default_rng(1)
    length, chains = 7, 20_000
    right = np.minimum(rng.geometric(1 - rate, chains) - 1, length)
    offered = rng.integers(1, length + 1, chains)
    accepted = np.minimum(right, offered)
    step = StepAcceptance()
    assert step.share(length) is None
    step.add(np.minimum(accepted + 1, offered), accepted)
    assert step.share(length) == pytest.approx(right.sum() / (chains * length), abs=0.01)
    assert accepted.sum() / offered.sum() > step.share(length) + 0.03  # what shorter chains suggest
    # No chain of a step may have been as long as the ladder's.
    assert step.share(11) == pytest.approx(np.mean(rate ** np.arange(1, 12)), abs=0.02)
    # A state with another number of depths is not taken.
    before = step.share(length)
    step.load_state(np.zeros((2, 3), np.int64))
    assert step.share(length) == before
