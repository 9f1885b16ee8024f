"""The window protocol of decoupled speculation, without a model."""

import numpy as np
import pytest

from rljax.papers.specactor.draft_windows import DraftWindows

VOCAB = 50


class Oracle:
    """Tokens of one request: the true ones, and a drafter that is right as often as `acceptance` says, and
    wrong behind every wrong token of its own.
    """

    def __init__(self, rng, acceptance, length=400):
        self.true = rng.integers(0, VOCAB, length)
        self.right = rng.random(length) < acceptance

    def draft(self, position, agrees):
        return self.true[position] if agrees and self.right[position] else VOCAB + position


def drafted(oracle, known, chain, count):
    """`count` tokens behind `known` true ones and a chain."""
    tokens = list(chain)
    for position in range(known + len(chain), known + len(chain) + count):
        agrees = all(token == oracle.true[known + i] for i, token in enumerate(tokens))
        tokens.append(oracle.draft(position, agrees))
    return tokens[len(chain) :]


@pytest.mark.parametrize("seed", range(6))
def test_a_rejection_wastes_at_most_two_windows_less_one(seed):
    """Random windows, acceptances, rooms of passes and plain steps; every token comes out in order."""
    rng = np.random.default_rng(seed)
    window, slots = int(rng.integers(2, 9)), 6
    windows = DraftWindows(slots, window)
    windows.windows[:] = rng.integers(0, window + 1, slots)
    windows.windows[0] = window
    windows.ahead[:] = rng.random(slots) < 0.7
    windows.ahead[0] = True
    oracles = [Oracle(rng, acceptance) for acceptance in np.linspace(0.0, 1.0, slots)]
    known, wasted_in_all, offered = np.zeros(slots, int), 0, 0

    def draft_ahead():
        nonlocal offered
        room = windows.room()
        assert (room <= windows.windows).all()
        tokens = np.full((slots, window), -1, np.int32)
        for slot, oracle in enumerate(oracles):
            chain = windows.chains[slot][windows.chains[slot] >= 0]
            assert room[slot] == 0 or windows.ahead[slot] or not len(chain)
            assert len(chain) + room[slot] <= max(2 * windows.windows[slot] - 1, 0)
            tokens[slot, : room[slot]] = drafted(oracle, known[slot], chain, room[slot])
        offered += int(room.sum())
        windows.extend(tokens, np.where(tokens >= 0, tokens, 0).astype(np.float32))

    used = 0
    for _ in range(40):
        sent = [int(rng.integers(0, count + 1)) for count in windows.unanswered]  # room of a pass
        verified = [windows.chains[slot, :count].copy() for slot, count in enumerate(sent)]
        if rng.random() < 0.9:
            draft_ahead()  # while the pass is in progress
        tokens, counts = np.full((slots, window * 2), -1, np.int32), np.zeros(slots, int)
        for slot, oracle in enumerate(oracles):
            truth = oracle.true[known[slot] :]
            matches = np.cumprod(verified[slot] == truth[: sent[slot]]).sum()
            counts[slot] = matches + 1
            tokens[slot, : counts[slot]] = truth[: counts[slot]]
        before = windows.unanswered.copy()
        foretold, wasted = windows.answer(np.arange(slots), tokens, counts)
        known += counts
        assert (wasted <= 2 * window - 1).all()
        assert (wasted[~windows.ahead] <= np.maximum(windows.windows[~windows.ahead], 0)).all()
        assert (windows.unanswered == before - foretold - wasted).all()
        for slot in range(slots):  # what is left stands behind tokens that were foretold
            if windows.unanswered[slot]:
                assert foretold[slot] == counts[slot]
                assert (windows.scores[slot] == np.maximum(windows.chains[slot], 0)).all()
        used, wasted_in_all = used + int(foretold.sum()), wasted_in_all + int(wasted.sum())
    assert offered == used + wasted_in_all + int(windows.unanswered.sum())
    assert wasted_in_all > 0 and used > 0


def test_the_most_is_wasted_where_the_first_draft_of_a_full_chain_is_rejected():
    windows = DraftWindows(1, 3)
    windows.extend(np.array([[5, 6, 7]], np.int32), np.zeros((1, 3), np.float32))
    assert windows.room() == 2
    windows.extend(np.array([[8, 9]], np.int32), np.zeros((1, 2), np.float32))
    assert windows.room() == 0
    with pytest.raises(ValueError, match="6 drafts are unanswered with a window of 3"):
        windows.extend(np.array([[1]], np.int32), np.zeros((1, 1), np.float32))
    foretold, wasted = windows.answer(np.array([0]), np.array([[4]], np.int32), np.array([1]))
    assert (foretold, wasted) == (0, 5) and windows.room() == 3


def test_an_accepted_window_leaves_the_next_one_ready():
    windows = DraftWindows(2, 3)
    windows.extend(np.array([[1, 2], [1, 2]], np.int32), np.zeros((2, 2), np.float32))
    windows.extend(np.array([[3, 4, 5], [3, 4, 5]], np.int32), np.zeros((2, 3), np.float32))
    windows.answer(np.array([1]), np.array([[1, 2, 3]], np.int32), np.array([3]))
    assert windows.chains.tolist() == [[1, 2, 3, 4, 5], [4, 5, -1, -1, -1]]
    windows.keep(np.array([1]), 2)
    assert windows.chains.tolist() == [[4, 5, -1, -1, -1], [-1] * 5]
    # A token that was foretold as the last of the chain leaves nothing, and wastes nothing.
    foretold, wasted = windows.answer(np.array([0]), np.array([[4, 5, 6]], np.int32), np.array([3]))
    assert (foretold, wasted) == (2, 0) and not windows.unanswered.any()
