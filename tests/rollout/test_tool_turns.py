"""Responses with tools in them: whatever decodes beside them, drafts for them or keeps them waiting, they are
what plain decoding of everything that stood before gives, bit for bit.
"""

import dataclasses
import itertools
import threading
import time
import types

import numpy as np
import pytest

from drafters.base import DraftRequest, Sampled
from drafters.eagle.collecting import FeatureCollector
from drafters.registry import make_drafter, states_read
from rljax.config.speculation import SpeculationConfig
from rljax.engine.appending import WIDTH
from rljax.engine.buckets import Buckets
from rljax.models.huggingface import save_model
from rljax.requests import Request
from rljax.rollout.collector import Scheduler
from rljax.rollout.stop_strings import StopStrings
from rljax.speculation.idle_requests import make_idle_requests
from rljax.speculation.speculator import Speculator
from rljax.tools.base import ToolError
from rljax.tools.markup import Markup
from rljax.tools.use import ToolUse
from rljax.tools.workers import ToolWorkers
from tests.configs import NEEDS_PAPERS
from tests.tiny_policy import (
    ALL_ROWS,
    CONFIG,
    EOS,
    SLOTS,
    CheapTimes,
    FavouriteRows,
    assert_same,
    make_engine,
    make_requests,
    outcomes,
    spell,
)

OPENING, CLOSING, MAX_CALLS = "a", "cb", 3


@pytest.fixture(scope="module")
def engine():
    return make_engine()


@pytest.fixture(scope="module")
def requests():
    return make_requests((3, 20, 64, 8, 1, 30), (60, 90, 64, 7, 100, 98))


class Counter:
    """Answers a call with what it says, and then some; may take its time."""

    def __init__(self, seconds=lambda text: 0.0):
        self.seconds = seconds
        self.texts = []
        self.done = []

    def call(self, text):
        self.texts.append(text)
        time.sleep(self.seconds(text))
        self.done.append(text)
        if text.endswith("d"):
            raise ToolError(text)
        return text + "!" * (len(text) % 23)


def encode(text):
    """Anything, but the same every time: never EOS."""
    return [2 + ord(letter) % 62 for letter in text]


MARKUP = Markup({"counter": (OPENING, CLOSING)}, ("(", ")"), 40, spell, encode, encode)


def make_use(tool):
    return ToolUse({"counter": tool}, MARKUP, MAX_CALLS, ToolWorkers(8, 30.0))


@dataclasses.dataclass
class Found:
    """What a response is by plain decoding: `own` are the tokens that the policy wrote."""

    tokens: list = dataclasses.field(default_factory=list)
    logprobs: list = dataclasses.field(default_factory=list)
    own: list = dataclasses.field(default_factory=list)
    reason: str = ""
    calls: int = 0
    rewards: list = dataclasses.field(default_factory=list)

    def add(self, tokens, logprobs, own):
        self.tokens += tokens
        self.logprobs += logprobs
        self.own += [own] * len(tokens)


def sequentially(engine, params, requests, turn, stop=None):
    """Responses by plain decoding: after every turn, what there is becomes the prompt.

    Args:
      turn: (tokens, the reason for their end, what was found before, the limit of tokens) -> (those of the
        tokens that are kept, what follows them or None, the reason for the end if nothing does).
    """
    found, left = [Found() for _ in requests], dict(enumerate(requests))
    scheduler = Scheduler(engine, SLOTS, stop)
    while left:
        completions, _ = scheduler.run(params, list(left.values()))
        for (index, request), completion in zip(list(left.items()), completions, strict=True):
            own, ids = found[index], completion.response_ids.tolist()
            ids, more, own.reason = turn(ids, completion.finish_reason, own, request.max_response)
            own.add(ids, completion.logprobs[: len(ids)].tolist(), True)
            del left[index]
            if more is not None:
                own.add(more, [0.0] * len(more), False)
                prompt = (*request.prompt_ids, *ids, *more)
                left[index] = Request(prompt, request.noise_key, request.max_response - len(ids) - len(more))
    return found


def tool_turn(ids, reason, own, limit):
    """As `sequentially` has it: a call ends a turn, and its answer follows."""
    ends = range(1, len(ids) + 1) if own.calls < MAX_CALLS else ()
    called = (end for end in ends if is_call(spell(ids[:end])))
    if (end := next(called, None)) is None:
        return ids, None, reason
    ids = ids[:end]
    if limit == end:
        return ids, None, "eos" if ids[-1] == EOS else "length"
    own.calls += 1
    answer = answer_to(spell(ids))
    return ids, answer if len(answer) < limit - end else None, "length"


def is_call(text):
    return text.endswith(CLOSING) and OPENING in text[: -len(CLOSING)]


def answer_to(text):
    text = text[: -len(CLOSING)]
    text = text[text.rindex(OPENING) + 1 :]
    text = f"error: {text}" if text.endswith("d") else text + "!" * (len(text) % 23)
    return encode("(") + encode(text if len(text) <= 40 else text[:30] + " ... (cut)") + encode(")")


@pytest.fixture(scope="module")
def expected(engine, params, requests):
    return sequentially(engine, params, requests, tool_turn)


def assert_as_expected(completions, expected):
    for completion, own in zip(completions, expected, strict=True):
        assert completion.response_ids.tolist() == own.tokens
        np.testing.assert_array_equal(completion.logprobs, np.asarray(own.logprobs, np.float32))
        assert completion.sampled_mask.tolist() == own.own and completion.sampled_tokens == sum(own.own)
        assert completion.finish_reason == own.reason
        rewards = () if completion.episode is None else completion.episode.rewards
        assert list(rewards) == own.rewards


def test_the_requests_say_something(expected, requests):
    calls = [own.calls for own in expected]
    assert max(calls) == MAX_CALLS and min(calls) == 0 and sum(calls) > len(calls)
    ended = {(own.reason, own.calls > 0) for own in expected}
    assert ended == {("eos", True), ("length", True), ("eos", False), ("length", False)}
    answers = [len(list(part)) for own in expected for mine, part in itertools.groupby(own.own) if not mine]
    assert max(answers) > WIDTH  # more than one pass of the engine
    assert all(own.own[-1] for own in expected)  # an answer after which nothing could come is left out
    assert any(len(own.own) + len(r.prompt_ids) > 64 for own, r in zip(expected, requests, strict=True))


@pytest.mark.parametrize("max_slots", [1, 4])
def test_same_bits_whatever_the_number_of_slots(engine, params, requests, expected, max_slots):
    tool, ended = Counter(), []
    scheduler = Scheduler(engine, max_slots, tools=make_use(tool))
    completions, statistics = scheduler.run(params, requests, on_finished=lambda *each: ended.append(each))
    assert_as_expected(completions, expected)
    assert sorted(index for index, _ in ended) == list(range(len(requests)))
    assert_as_expected([completion for _, completion in sorted(ended, key=lambda each: each[0])], expected)
    assert statistics.tool_calls == len(tool.texts) == sum(own.calls for own in expected)
    assert statistics.tool_errors == sum(text.endswith("d") for text in tool.texts) > 0
    own = sum(completion.sampled_tokens for completion in completions)
    assert statistics.tokens == own
    assert statistics.tool_tokens == sum(len(c.response_ids) for c in completions) - own > 0


@pytest.mark.parametrize(("overlap", "slow"), [(False, True), (True, True), (True, False)])
def test_same_bits_with_drafts_and_with_tools_that_answer_in_another_order(
    engine, params, requests, expected, overlap, slow
):
    times = FavouriteRows(ALL_ROWS)
    speculator = Speculator(engine, {"srt": make_drafter("srt")}, SLOTS, times=times, strategies=times.choice)
    turns = itertools.count()
    for _ in range(2):  # the second time with what the first one taught
        tool = Counter((lambda text: next(turns) % 2 * 0.05) if slow else lambda text: 0.0)
        scheduler = Scheduler(engine, SLOTS, None, speculator, overlap, make_use(tool))
        completions, statistics = scheduler.run(params, requests)
        assert_as_expected(completions, expected)
        if slow:
            assert tool.done != tool.texts
        speculator.learn(outcomes(requests, completions))
    assert statistics.accepted > 0.5 * statistics.tokens


def test_others_decode_while_a_tool_works(engine, params, requests, expected):
    """A tool that does not answer before another response has ended."""
    over = threading.Event()

    class Waiting(Counter):
        def call(self, text):
            assert over.wait(30)
            return super().call(text)

    first = next(index for index, own in enumerate(expected) if own.calls)
    other = next(index for index, own in enumerate(expected) if not own.calls)
    chosen = [first, other]
    completions, statistics = Scheduler(engine, 2, tools=make_use(Waiting())).run(
        params, [requests[i] for i in chosen], lambda tokens, finished: finished and over.set()
    )
    assert_as_expected(completions, [expected[i] for i in chosen])
    assert statistics.tool_waiting_seconds < 30


def test_stop_strings_are_looked_for_in_what_the_policy_writes(engine, params, requests):
    """Letters of answers do not complete one, and whichever comes first ends or calls."""
    stop = StopStrings(["ddd"], spell)
    completions, _ = Scheduler(engine, SLOTS, stop, tools=make_use(Counter())).run(params, requests)
    found = sequentially(engine, params, requests, tool_turn, stop)
    assert_as_expected(completions, found)
    assert any(own.calls for own in found if own.reason == "stop")
    for own in found:
        pairs = zip(own.tokens, own.own, strict=True)
        for mine, part in itertools.groupby(pairs, key=lambda pair: pair[1]):
            text = spell([token for token, _ in part])
            assert not mine or "ddd" not in text[:-1]
    assert any("ddd" in spell(own.tokens[: -1 if own.reason == "stop" else None]) for own in found)


def test_without_a_call_nothing_differs(engine, params, requests):
    plain, statistics = Scheduler(engine, SLOTS).run(params, requests)
    other = dataclasses.replace(MARKUP, calls={"x": ("<", ">")})
    use = dataclasses.replace(make_use(Counter()), markup=other)
    completions, same = Scheduler(engine, SLOTS, tools=use).run(params, requests)
    assert_same(completions, plain)
    assert all(completion.sampled_mask.all() for completion in completions)
    assert all(completion.sampled_mask is None for completion in plain)
    assert (same.tokens, same.steps, same.rows) == (statistics.tokens, statistics.steps, statistics.rows)


@NEEDS_PAPERS
def test_what_is_sampled_ahead_ends_at_its_first_call(engine, params, requests, expected):
    """Nobody's tools are called for what is drafts only; the next rollout's tokens are its own."""
    own = [i for i, found in enumerate(expected) if found.calls]
    ahead = make_idle_requests(SpeculationConfig(run_ahead_below=SLOTS))
    ahead.max_share = 1e9
    times = FavouriteRows([0])
    speculator = Speculator(engine, {"srt": make_drafter("srt")}, SLOTS, ahead, times, times.choice)
    tool = Counter()
    scheduler = Scheduler(engine, SLOTS, None, speculator, False, make_use(tool))
    ahead.plan([requests[i] for i in own])
    now = [*range(9, 12), 17]  # three that are short, and a long one
    completions, _ = scheduler.run(params, [requests[i] for i in now])
    assert_as_expected(completions, [expected[i] for i in now])
    assert len(tool.texts) == sum(expected[i].calls for i in now)
    kept = [ahead.recall(requests[i].noise_key) for i in own]
    assert sum(tokens is not None for tokens in kept) >= 2
    for tokens, index in zip(kept, own, strict=True):
        if tokens is not None:
            assert tokens.tolist() == expected[index].tokens[: len(tokens)]
            assert all(expected[index].own[: len(tokens)])
    times.rows = itertools.cycle(ALL_ROWS)
    completions, _ = scheduler.run(params, requests)
    assert_as_expected(completions, expected)


@pytest.mark.default_cases("small_model-True", "quantized-False")
@pytest.mark.parametrize(("name", "overlap"), [("quantized", False), ("small_model", True), ("eagle", False)])
def test_same_bits_with_drafters_on_the_device(params, requests, expected, tmp_path, name, overlap):
    args = {}
    if name == "small_model":  # the policy: what it knows of the slots is right where drafts are
        save_model(tmp_path, CONFIG, params, "float32")
        args = {"path": str(tmp_path)}
    elif name == "eagle":
        args = {"depths": [3], "train": False}
    drafters = {name: make_drafter(name, **args)}
    reads = states_read(drafters, CONFIG)
    engine = make_engine(buckets=Buckets((4,), (128,), (16,), 7), hidden_layers=reads)
    speculator = Speculator(engine, drafters, SLOTS, times=CheapTimes())
    scheduler = Scheduler(engine, SLOTS, None, speculator, overlap, make_use(Counter()))
    completions, statistics = scheduler.run(params, requests)
    assert_as_expected(completions, expected)
    assert statistics.verified > 0.5 * statistics.steps and statistics.drafted > 0
    if name == "small_model":
        assert statistics.accepted > 0.9 * statistics.drafted


def test_a_head_does_not_train_on_what_it_has_not_seen_whole():
    collector, added = FeatureCollector(1000), []
    collector.trainer = types.SimpleNamespace(
        reserve=lambda size: None, add=lambda tokens, *_: added.append(tokens.tolist())
    )
    collector.begin([DraftRequest((1, 2), None)] * 3, True)
    collector.insert(np.zeros((1, 1, 3, 2)), [0, 0, 0], [0, 1, 2], [0, 1, 2])
    collector.advance(np.zeros((3, 1, 3, 2)), np.ones(3, int))
    collector.drop([1])  # in whose slot something was appended
    counts, ended = np.asarray([1, 1, 2]), np.ones(3, bool)  # of the last one a token came without features
    tokens = np.asarray([[5, 0], [6, 0], [7, 8]])
    collector.observe(Sampled(np.arange(3), tokens, counts, counts, counts, ended))
    assert added == [[1, 2]]
