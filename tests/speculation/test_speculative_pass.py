"""Speculative rollouts: whoever drafts, and whatever, every request gets the tokens of plain decoding."""

import dataclasses
import itertools
import time
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from drafters.base import Drafter, Drafts, Queries
from drafters.device import SlotDrafter
from drafters.registry import DRAFTERS, make_drafter
from rljax.engine.buckets import Buckets
from rljax.engine.draft_tree import DraftStrategy
from rljax.engine.shapes import warm_up_plain
from rljax.errors import DrafterError, UserError
from rljax.rollout.collector import Scheduler
from rljax.rollout.stop_strings import StopStrings
from rljax.speculation import pass_times
from rljax.speculation.managers.selection import StrategyChoice
from rljax.speculation.speculative_pass import HostProposer
from rljax.speculation.speculator import Speculator
from tests.engine.test_speculative_decoding import score
from tests.tiny_policy import (
    ALL_ROWS,
    BUCKETS,
    EOS,
    SLOTS,
    VOCAB,
    FavouriteRows,
    FixedTimes,
    assert_same,
    make_engine,
    outcomes,
    spell,
)


@pytest.fixture(scope="module")
def engine(params):
    """Every program is compiled here; no test may compile another one."""
    engine = make_engine()
    warm_up_plain(engine, params, SLOTS, prompt_length=64)
    Speculator(engine, {"silent": Silent()}, SLOTS).warm_up(params)
    compiled = len(engine.pool)
    yield engine
    assert len(engine.pool) == compiled


def speculate(
    engine, params, requests, drafter, times=None, stop=None, max_batch=SLOTS, name="mine", overlap=False
):
    """Completions, statistics and the speculator after one rollout."""
    times = FavouriteRows(ALL_ROWS) if times is None else times
    choice = times.choice if isinstance(times, FavouriteRows) else StrategyChoice()
    speculator = Speculator(engine, {name: drafter}, max_batch, times=times, strategies=choice)
    completions, statistics = Scheduler(engine, SLOTS, stop, speculator, overlap).run(params, requests)
    return completions, statistics, speculator


@pytest.fixture
def trees(engine, monkeypatch):
    """Every tree that is verified."""
    seen, verify = [], engine.verify

    def spy(params, state, tree, rows):
        seen.append(tree)
        return verify(params, state, tree, rows)

    monkeypatch.setattr(engine, "verify", spy)
    return seen


# -- drafters for the worst ------------------------------------------------------------------------------


class Silent(Drafter):
    """Proposes nothing."""

    def begin(self, requests):
        self.requests = requests
        self.tokens = [[] for _ in requests]

    def propose(self, queries):
        shape = (len(queries.requests), queries.nodes)
        drafts = Drafts(
            np.zeros(shape, np.int32),
            np.full(shape, -1, np.int32),
            np.zeros(shape, np.float32),
            np.zeros(len(queries.requests), np.int32),
        )
        return self.fill(drafts, queries)

    def fill(self, drafts, queries):
        return drafts

    def observe(self, sampled):
        for request, row, count in zip(sampled.requests, sampled.tokens, sampled.counts, strict=True):
            self.tokens[request] += row[:count].tolist()


class Knowing(Silent):
    """Proposes what will be sampled, moved by `lie` tokens, as one chain, and is quite sure of it."""

    def __init__(self, expected, lie=0):
        self.expected, self.lie = expected, lie

    def fill(self, drafts, queries):
        drafts.parents[:] = np.arange(-1, queries.nodes - 1)
        for row, request in enumerate(queries.requests):
            known = len(self.tokens[request])
            assert queries.positions[row] == len(self.requests[request].prompt_ids) + known
            ahead = self.expected[request].response_ids[known:][: queries.nodes]
            drafts.tokens[row, : len(ahead)] = (ahead + self.lie) % VOCAB
            drafts.counts[row] = len(ahead)
        return drafts


class Garbage(Silent):
    """Any numbers at all, of any size of integer."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)

    def fill(self, drafts, queries):
        shape = drafts.tokens.shape
        wild = lambda: self.rng.choice([-(2**62), -2, -1, 0, 1, 5, 63, 64, 2**31, 2**62], shape)  # noqa: E731
        scores = self.rng.choice(np.asarray([np.nan, np.inf, -np.inf, 3.0, -0.5], np.float32), shape)
        return Drafts(wild(), wild(), scores, self.rng.integers(-3, 20, shape[0]))


# -- the tokens of plain decoding --------------------------------------------------------------------------


def check_statistics(completions, statistics):
    assert statistics.tokens == sum(len(completion.response_ids) for completion in completions)
    assert statistics.drafted == sum(completion.drafted for completion in completions)
    assert statistics.accepted == sum(completion.accepted for completion in completions)
    for completion in completions:
        assert 0 <= completion.accepted <= completion.drafted
        assert completion.accepted < max(len(completion.response_ids), 1)
    assert statistics.verified <= min(statistics.steps, statistics.verified_slots)
    assert statistics.verified_rows <= statistics.rows
    assert statistics.drafted <= statistics.verified_rows
    assert 1 <= statistics.accept_length <= 1 + BUCKETS.max_drafts
    assert statistics.host_seconds > 0 and statistics.device_seconds > 0


# In test_self_drafting.py, test_head_drafting.py and tests/drafters/eagle/test_block.py.
ON_DEVICE = {"quantized", "eagle", "block", "small_model"}


@pytest.mark.parametrize("name", sorted(DRAFTERS.keys() - ON_DEVICE))
def test_every_drafter_leaves_the_tokens_alone(engine, params, requests, expected, trees, name):
    """In a first rollout, and in a second one with the history of the first."""
    drafter, batches = make_drafter(name), set()
    for rollout in range(2):
        completions, statistics, _ = speculate(engine, params, requests, drafter)
        assert_same(completions, expected)
        check_statistics(completions, statistics)
        batches |= {len(tree.tokens) for tree in trees}
        assert statistics.verified == len(trees) < statistics.steps
        assert statistics.unusable == 0
        trees.clear()
        drafter.learn(outcomes(requests, completions))
        if rollout and name != "prompt_lookup":
            assert statistics.accepted > 50  # the same tokens as before
    assert batches == set(BUCKETS.batch)


def test_the_worst_drafters_leave_the_tokens_alone(engine, params, requests, expected):
    for drafter in (Knowing(expected, lie=1), Garbage(0)):
        completions, statistics, _ = speculate(engine, params, requests, drafter)
        assert_same(completions, expected)
        check_statistics(completions, statistics)
        assert statistics.verified > 10


@pytest.mark.parametrize(("rows", "overlap"), [(8, False), (16, True), (32, False)])
def test_what_is_right_is_accepted_and_what_is_wrong_is_not(
    engine, params, requests, expected, trees, rows, overlap, monkeypatch
):
    times, refused, record = FavouriteRows([rows]), [], HostProposer.record_outcome

    def spy(proposer, proposal, verified, accepted):
        refused.append(int((verified & ~accepted).sum()))
        record(proposer, proposal, verified, accepted)

    monkeypatch.setattr(HostProposer, "record_outcome", spy)
    completions, statistics, _ = speculate(
        engine, params, requests, Knowing(expected), times, overlap=overlap
    )
    assert_same(completions, expected)
    check_statistics(completions, statistics)
    assert statistics.verified == statistics.steps == statistics.host_syncs == len(trees)
    assert statistics.tokens == statistics.verified_slots + statistics.accepted
    assert statistics.accepted == sum(e - b for each in completions for b, e in each.accepted_spans)
    assert statistics.drafted == sum(tree.valid.sum() for tree in trees)
    # All that was drafted came, but for the very last token of a response: it comes by itself.
    assert statistics.drafted - len(requests) <= statistics.accepted < statistics.drafted
    assert not any(refused)  # that token was foretold all the same
    wrong = Knowing(expected, 1)
    completions, statistics, _ = speculate(
        engine, params, requests, wrong, FavouriteRows([rows]), overlap=overlap
    )
    assert statistics.accepted == 0 < statistics.drafted
    assert not any(each.accepted_spans for each in completions)
    assert statistics.tokens == statistics.verified_slots


def test_a_drafter_hears_what_is_kept_where_stop_strings_end_responses(engine, params, requests, expected):
    """Up to the stop string, in pieces that add up to the response, with what was accepted. The response ends
    inside an accepted run as in plain decoding.
    """
    heard = []

    class Listening(Knowing):
        def propose(self, queries):
            assert isinstance(queries, Queries) and queries.nodes == BUCKETS.max_drafts
            assert len(set(queries.requests.tolist())) == len(queries.requests) <= SLOTS
            assert (queries.budgets == queries.nodes).all()
            return super().propose(queries)

        def observe(self, sampled):
            super().observe(sampled)
            assert len(set(sampled.requests.tolist())) == len(sampled.requests)
            heard.append((sampled.drafted.sum(), sampled.accepted.sum()))
            assert (sampled.accepted <= sampled.drafted).all()

    drafter, stop = Listening(expected), StopStrings(("abc", "cab", "ba"), spell)
    completions, statistics, _ = speculate(engine, params, requests, drafter, stop=stop)
    assert_same(completions, Scheduler(engine, SLOTS, stop).run(params, requests)[0])
    assert sum(completion.finish_reason == "stop" for completion in completions) >= 3
    assert statistics.tokens == sum(len(completion.response_ids) for completion in completions)
    assert drafter.tokens == [completion.response_ids.tolist() for completion in completions]
    assert [request.prompt_ids for request in drafter.requests] == [each.prompt_ids for each in requests]
    for mine, request in zip(drafter.requests, requests, strict=True):
        np.testing.assert_array_equal(mine.noise_key, request.noise_key)
    assert len(heard) == statistics.host_syncs
    assert np.sum(heard, axis=0).tolist() == [statistics.drafted, statistics.accepted]


def test_large_batches_decode_plainly(engine, params, requests, expected, trees):
    drafter, times = Knowing(expected), FavouriteRows([32])
    completions, statistics, _ = speculate(engine, params, requests, drafter, times, max_batch=2)
    assert_same(completions, expected)
    check_statistics(completions, statistics)
    assert {len(tree.tokens) for tree in trees} == {2}


# -- drafters that break the protocol ----------------------------------------------------------------------


def error_of(call, *arguments):
    with pytest.raises(DrafterError) as error:
        call(*arguments)
    assert "\n" not in str(error.value)
    return str(error.value)


# Those beside drafting, and every kind of what is no drafts: in test_drafter_errors.py and
# tests/drafters/test_validation.py.
@pytest.mark.parametrize("method", ["begin", "propose", "observe"])
def test_what_a_drafter_raises_is_one_error_that_names_it(engine, params, requests, method):
    class Broken(Silent):
        pass

    def raises(self, *arguments):
        raise IndexError("out of\nideas")

    setattr(Broken, method, raises)
    message = error_of(speculate, engine, params, requests, Broken())
    assert message.startswith(f"speculation.drafter mine: {method} raised IndexError(")


def test_an_error_for_the_user_stays_as_it_is_and_a_rollout_of_nothing_is_none(engine, params, requests):
    class Full(Silent):
        def propose(self, queries):
            raise UserError("the disk is full")

    with pytest.raises(UserError, match=r"^the disk is full$"):
        speculate(engine, params, requests, Full())
    completions, statistics, speculator = speculate(engine, params, [], Full())
    assert completions == [] and statistics.steps == 0
    assert speculator.metrics(statistics)["speculation/acceptance"] == 0.0


def test_what_are_no_drafts_is_one_error_that_names_the_drafter(engine, params, requests):
    class Wrong(Silent):
        def fill(self, drafts, queries):
            return dataclasses.replace(drafts, counts=drafts.counts[:-1])

    found = error_of(speculate, engine, params, requests, Wrong())
    message = "propose returned no drafts: counts should be an array [4], got (3,)"
    assert found == f"speculation.drafter mine: {message}"


def test_nodes_that_are_none_are_counted(engine, params, requests, expected):
    """A token outside the vocabulary in front of each chain, which takes the chain with it."""

    class HalfWrong(Silent):
        def fill(self, drafts, queries):
            drafts.tokens[:, 0] = VOCAB
            drafts.parents[:, 1] = 0
            drafts.counts[:] = 4  # two of them right
            asked.append(len(queries.requests))
            return drafts

    asked = []
    completions, statistics, _ = speculate(engine, params, requests, HalfWrong())
    assert_same(completions, expected)
    assert statistics.unusable == 2 * sum(asked)


# -- how much is verified ----------------------------------------------------------------------------------


TIMES = FixedTimes({0: 1.0, 8: 1.1, 16: 1.2, 32: 1.4})


@pytest.fixture
def steps(engine, monkeypatch):
    """What is asked of the engine: steps of plain decoding, 'v' for a verifying pass."""
    seen, verify, generate = [], engine.verify, engine.generate

    def spy_verify(params, state, tree, rows):
        seen.append("v")
        return verify(params, state, tree, rows)

    def spy_generate(params, state, max_steps=None, until_active=0):
        seen.append(max_steps)
        return generate(params, state, max_steps, until_active)

    monkeypatch.setattr(engine, "verify", spy_verify)
    monkeypatch.setattr(engine, "generate", spy_generate)
    return seen


class RecordingTimes(FixedTimes):
    """What is measured, by kind."""

    def __init__(self):
        super().__init__(TIMES.by_rows)
        self.measured = {"plain": [], "verify": []}

    def has_plain(self, batch, length):
        return True

    def _add(self, seconds, kind, *shape):
        self.measured[kind].append(seconds)


def test_a_useless_drafter_ends_in_plain_decoding(engine, params, requests, expected, steps):
    """It is believed for a few passes; then it is asked ever more seldom. Plain steps that were cut short for
    a question are not measured.
    """
    times = RecordingTimes()
    completions, statistics, _ = speculate(engine, params, requests, Knowing(expected, 1), times)
    assert_same(completions, expected)
    assert steps[:5] == ["v", "v", "v", 1, 2] and statistics.verified < 0.1 * statistics.steps
    in_vain = 0
    for before, step in itertools.pairwise(steps):  # new requests are asked about ever less soon
        in_vain = 0 if before == "v" else in_vain + 1
        again = min(2 ** (in_vain // 4), 16)
        assert step in (("v", again) if before == "v" else ("v", again, min(2 * before, 16)))
    assert 16 in steps
    assert 0 < len(times.measured["plain"]) < len([step for step in steps if step != "v"])


def test_a_good_drafter_is_always_verified(engine, params, requests, expected, steps):
    """A pass is measured with the host's work before it."""

    class Slow(Knowing):
        def fill(self, drafts, queries):
            time.sleep(0.02)
            return super().fill(drafts, queries)

    times = RecordingTimes()
    completions, statistics, _ = speculate(engine, params, requests, Slow(expected), times)
    assert_same(completions, expected)
    assert steps.count("v") > 0.9 * len(steps) and statistics.accept_length > 4
    assert times.measured["verify"] and min(times.measured["verify"]) >= 0.02


def test_a_plain_step_that_was_measured_too_slow_is_measured_anew(engine, params, requests, expected, steps):
    """Else nothing but verifying passes would ever follow, however few drafts are right."""
    times = pass_times.PassTimes()
    for batch, length in itertools.product(BUCKETS.batch, BUCKETS.cache):
        for _ in range(3):
            times.add_plain(batch, length, 100.0)
    completions, _, _ = speculate(engine, params, requests, Knowing(expected, 1), times)
    assert_same(completions, expected)
    first = steps.index(16)
    assert 32 <= steps[:first].count("v") < 80 and set(steps[:first]) == {"v"}
    assert times.plain(SLOTS, 128) < 1


def test_patience_ends_where_drafts_pay_again(engine, params, requests, expected, steps):
    """Silent at first, then right: asked again after 1, 2, 4 plain steps; and anew after a plain one."""

    class Late(Knowing):
        calls = 0

        def fill(self, drafts, queries):
            self.calls += 1
            return drafts if self.calls in (1, 2, 3, 5, 6) else super().fill(drafts, queries)

    completions, _, _ = speculate(engine, params, requests, Late(expected), TIMES)
    assert_same(completions, expected)
    assert steps[:6] == [1, 2, 4, "v", 1, 2] and steps[6] == "v"


def test_what_speculation_did_is_reported(engine, params, requests, expected):
    class Telling(Knowing):
        def metrics(self):
            return {"books": 3}

    _, statistics, speculator = speculate(engine, params, requests, Telling(expected), FavouriteRows([32]))
    metrics = speculator.metrics(statistics)
    assert 0 < metrics.pop("speculation/host_share") < 1 and 0 < metrics.pop("speculation/idle_share") < 1
    assert statistics.accept_length > 4 and statistics.rows > statistics.tokens
    assert min(statistics.accepted, statistics.drafted) > 0
    assert metrics == {
        "speculation/books": 3,
        "speculation/accept_length": statistics.accept_length,
        "speculation/verified_per_token": statistics.rows / statistics.tokens,
        "speculation/acceptance": statistics.accepted / statistics.drafted,
        "speculation/drafted": statistics.drafted,
        "speculation/accepted": statistics.accepted,
        "speculation/speculated_share": 1.0,
        "speculation/unusable": 0,
    }


def test_the_device_is_not_idle_while_it_prefills(engine, params, requests, expected, monkeypatch):
    """A drafter that wants the policy's states waits for them, and that is no work of the host."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(pass_times, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    slots = Mock(spec=SlotDrafter, strategies=(DraftStrategy(7, 1, 7),), ahead=None)
    slots.prefill.side_effect = lambda *_: setattr(clock, "now", clock.now + 5.0)
    drafter = Drafter()
    drafter.on_host, drafter.attach = False, lambda engine: slots
    speculator = Speculator(engine, {"mine": drafter}, max_batch=0)
    completions, statistics = Scheduler(engine, SLOTS, speculator=speculator).run(params, requests)
    assert_same(completions, expected)
    assert clock.now >= 5.0 and statistics.idle_seconds == 0.0


# -- the other rules ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["rejection", "target_only"])
def test_the_other_rules_sample_from_the_policy_too(params, requests, expected, rule):
    """Other tokens, but the same contract; and a drafter hears nothing of the noise."""
    engine = make_engine(buckets=Buckets((4,), (128,), (32,), 7), verification=rule)
    parents, verify = [], engine.verify

    def spy(params, state, tree, rows):
        parents.append(np.where(tree.valid, tree.parents - np.arange(-1, tree.nodes - 1), 0))
        return verify(params, state, tree, rows)

    engine.verify = spy

    class Branching(Silent):
        """The response of plain decoding, each of its tokens with another one beside it."""

        def fill(self, drafts, queries):
            assert all(request.noise_key is None for request in self.requests)
            drafts.parents[:] = [-1, -1, 0, 0, 2, 2, 4]
            for row, request in enumerate(queries.requests):
                known = len(self.tokens[request])
                ahead = expected[request].response_ids[known:][:4]
                if len(ahead) == 4:
                    drafts.tokens[row] = np.repeat(ahead, 2)[:7]
                    drafts.tokens[row, 1::2] = (drafts.tokens[row, 1::2] + 1) % VOCAB
                    drafts.counts[row] = 7
            return drafts

    for drafter in (Branching(), make_drafter("srt")):
        times = FavouriteRows([32, 0, 32])
        completions, statistics, _ = speculate(engine, params, requests, drafter, times)
        check_statistics(completions, statistics)
        assert statistics.accepted > 0
        for request, completion in zip(requests, completions, strict=True):
            ids = completion.response_ids
            assert (ids[-1] == EOS) == (completion.finish_reason == "eos") and EOS not in ids[:-1]
            assert len(ids) == request.max_response or completion.finish_reason == "eos"
            assert np.isfinite(completion.logprobs).all()
            assert completion.logprobs.tolist() == score(engine, params, request.prompt_ids, ids)
    branches = any((each != 0).any() for each in parents)
    assert branches == (rule == "target_only")
