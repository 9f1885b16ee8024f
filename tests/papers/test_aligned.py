"""Drafts sampled ahead are followed for as long as they agree, and only then."""

from unittest import mock

import numpy as np
import pytest

from drafters.base import Drafter, DraftRequest, Drafts, Queries, Sampled
from drafters.simple import SimpleDrafterAdapter
from drafters.training import Training
from rljax.papers.srt.aligned import AlignedDrafter
from rljax.papers.srt.run_ahead import RunAhead
from rljax.rollout.collector import Scheduler
from rljax.speculation.speculator import Speculator
from tests.speculation.speculators import Silent
from tests.tiny_policy import SLOTS, CheapTimes, assert_same, make_engine

NODES = 3


def one_draft(queries):
    """Token 99 for every request."""
    shape = (len(queries.requests), NODES)
    counts = np.minimum(queries.budgets, 1).astype(np.int32)
    return Drafts(
        np.full(shape, 99, np.int32), np.full(shape, -1, np.int32), np.zeros(shape, np.float32), counts
    )


def requests(*ahead):
    return [
        DraftRequest((1,), None, None if tokens is None else np.asarray(tokens, np.int32)) for tokens in ahead
    ]


def propose(drafter, rows, budget=NODES):
    rows = np.asarray(rows, np.int32)
    drafts = drafter.propose(Queries(rows, np.zeros_like(rows), np.full_like(rows, budget), NODES))
    return [drafts.tokens[i, : drafts.counts[i]].tolist() for i in range(len(rows))], drafts


def observe(drafter, row, tokens, drafted=0):
    one = lambda value: np.asarray([value], np.int32)  # noqa: E731
    padded = np.full((1, 5), -1, np.int32)
    padded[0, : len(tokens)] = tokens
    drafter.observe(Sampled(one(row), padded, one(len(tokens)), one(drafted), one(drafted), one(0)))


@pytest.fixture
def fallback():
    fallback = mock.Mock(spec=Drafter, state_name=None, training=None)
    fallback.propose.side_effect = one_draft
    fallback.metrics.return_value = {"own": 1.0}
    return fallback


@pytest.fixture
def drafter(fallback):
    drafter = AlignedDrafter(fallback)
    drafter.begin(requests([5, 6, 7, 8, 9], None, [4, 4]))
    return drafter


def test_the_beginning_is_proposed_as_a_chain_in_the_order_of_queries(drafter):
    tokens, drafts = propose(drafter, [2, 1, 0])
    assert tokens == [[4, 4], [99], [5, 6, 7]]
    assert drafts.parents[2].tolist() == [-1, 0, 1]
    assert (np.diff(drafts.log_probability[2]) < 0).all()
    assert propose(drafter, [0], budget=2)[0] == [[5, 6]] and propose(drafter, [0], budget=0)[0] == [[]]


def test_it_goes_on_where_the_request_stands(drafter):
    observe(drafter, 0, [5, 6])
    assert propose(drafter, [0])[0] == [[7, 8, 9]]
    observe(drafter, 0, [7, 8])
    assert propose(drafter, [0])[0] == [[9]]
    observe(drafter, 0, [9])
    assert propose(drafter, [0])[0] == [[99]]  # nothing further was sampled ahead
    assert drafter.metrics() == {"own": 1.0, "ahead_tokens": 7, "ahead_agreed": 5}


def test_a_disagreement_and_tokens_beyond_end_it_for_good(drafter):
    observe(drafter, 0, [5, 1, 7])
    assert propose(drafter, [0, 2])[0] == [[99], [4, 4]]
    observe(drafter, 0, [8, 9])  # the same tokens at their old places again
    assert propose(drafter, [0])[0] == [[99]]
    assert drafter.metrics()["ahead_agreed"] == 1
    observe(drafter, 2, [4, 4, 4])
    assert propose(drafter, [2])[0] == [[99]]
    assert drafter.metrics()["ahead_agreed"] == 1 + 2


def test_the_rest_is_the_fallbacks(drafter, fallback):
    observe(drafter, 1, [3])
    assert fallback.observe.call_count == 1 and len(fallback.begin.call_args.args[0]) == 3
    drafter.learn(["outcome"])
    fallback.learn.assert_called_once_with(["outcome"])
    drafter.load_state(drafter.state())
    fallback.load_state.assert_called_once_with(fallback.state.return_value)
    drafter.begin(requests(None, None))  # nothing ahead
    observe(drafter, 0, [1, 2])
    assert propose(drafter, [0, 1])[0] == [[99], [99]]
    assert drafter.metrics()["ahead_tokens"] == 0


def test_the_fallback_does_not_learn_from_drafts_that_are_not_its_own(drafter, fallback):
    """RhymeRL's window would widen by them."""

    def heard():
        sampled = fallback.observe.call_args.args[0]
        return sampled.drafted.tolist(), sampled.accepted.tolist()

    propose(drafter, [0, 1])
    observe(drafter, 0, [5, 6], drafted=2)
    assert heard() == ([0], [0])
    observe(drafter, 1, [99], drafted=1)
    assert heard() == ([1], [1])
    observe(drafter, 0, [1], drafted=1)  # it has left them
    propose(drafter, [0])
    observe(drafter, 0, [99], drafted=1)
    assert heard() == ([1], [1])


class Slices(Training):
    below, trained, slices = 2, False, 0

    def train(self):
        self.slices += 1
        self.trained = self.slices == 3
        return not self.trained

    def freeze(self):
        self.below = 0


def test_a_trained_drafter_is_trained_behind_what_was_sampled_ahead(params, requests, expected):
    """Wrappers hand out the training."""
    drafter = Silent()
    drafter.training = Slices()
    training = AlignedDrafter(drafter).training
    assert (training.below, training.trained) == (2, False)
    assert AlignedDrafter(SimpleDrafterAdapter(None)).training is None
    engine = make_engine()
    speculator = Speculator(engine, {"mine": drafter}, SLOTS, idle=RunAhead(1, 0.5), times=CheapTimes())
    completions, _ = Scheduler(engine, SLOTS, speculator=speculator).run(params, requests)
    assert_same(completions, expected)
    assert drafter.training.slices > 0
