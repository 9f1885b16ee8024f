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

from drafters.base import DraftRequest, Outcome, Sampled
from drafters.eagle.collecting import FeatureCollector
from drafters.registry import make_drafter, states_read
from rljax.engine.appending import WIDTH
from rljax.engine.buckets import Buckets
from rljax.models.huggingface import save_model
from rljax.requests import Request
from rljax.rollout.scheduler import Scheduler
from rljax.rollout.stop_strings import StopStrings
from rljax.speculation.run_ahead import RunAhead
from rljax.speculation.speculator import Speculator
from rljax.tools.base import ToolError
from rljax.tools.markup import Markup
from rljax.tools.use import ToolUse
from rljax.tools.workers import ToolWorkers
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


def make_use(tool, max_calls=MAX_CALLS, time_limit=30.0, most=8):
    return ToolUse({"counter": tool}, MARKUP, max_calls, ToolWorkers(most, time_limit))


class Sequentially:
    """The same by plain decoding: after every call, what there is becomes the prompt."""

    def __init__(self, engine, params, stop=None, max_calls=MAX_CALLS):
        self.scheduler = Scheduler(engine, SLOTS, stop)
        self.params, self.max_calls, self.calls, self.errors = params, max_calls, 0, 0

    def run(self, requests):
        found = [[[], [], [], "", 0] for _ in requests]  # tokens, logprobs, own, reason, calls
        left = dict(enumerate(requests))
        while left:
            completions, _ = self.scheduler.run(self.params, list(left.values()))
            for (index, request), completion in zip(list(left.items()), completions, strict=True):
                ids, own = completion.response_ids.tolist(), found[index]
                end = self.find(ids) if own[4] < self.max_calls else None
                del left[index]
                if end is not None:
                    ids = ids[:end]
                own[0] += ids
                own[1] += completion.logprobs[: len(ids)].tolist()
                own[2] += [True] * len(ids)
                own[3] = completion.finish_reason
                if end is None:
                    continue
                own[3] = "eos" if ids[-1] == EOS else "length"
                limit = request.max_response - len(ids)
                if limit == 0:
                    continue
                answer = self.answer(spell(ids))
                own[4] += 1
                if len(answer) >= limit:
                    own[3] = "length"
                    continue
                own[0] += answer
                own[1] += [0.0] * len(answer)
                own[2] += [False] * len(answer)
                prompt = (*request.prompt_ids, *ids, *answer)
                left[index] = Request(prompt, request.noise_key, limit - len(answer))
        return found

    def find(self, ids):
        for end in range(1, len(ids) + 1):
            text = spell(ids[:end])
            if text.endswith(CLOSING) and OPENING in text[: -len(CLOSING)]:
                return end
        return None

    def answer(self, text):
        self.calls += 1
        text = text[: -len(CLOSING)]
        text = text[text.rindex(OPENING) + 1 :]
        if text.endswith("d"):
            self.errors += 1
            text = f"error: {text}"
        else:
            text += "!" * (len(text) % 23)
        return encode("(") + encode(text if len(text) <= 40 else text[:30] + " ... (cut)") + encode(")")


@pytest.fixture(scope="module")
def sequential(engine, params):
    return Sequentially(engine, params)


@pytest.fixture(scope="module")
def expected(sequential, requests):
    return sequential.run(requests)


def assert_as_expected(completions, expected):
    for completion, (tokens, logprobs, own, reason, _) in zip(completions, expected, strict=True):
        assert completion.response_ids.tolist() == tokens
        np.testing.assert_array_equal(completion.logprobs, np.asarray(logprobs, np.float32))
        assert completion.sampled_mask.tolist() == own and completion.sampled_tokens == sum(own)
        assert completion.finish_reason == reason


def test_the_requests_say_something(expected, requests):
    calls = [own[4] for own in expected]
    assert max(calls) == MAX_CALLS and min(calls) == 0 and sum(calls) > len(calls)
    ended = {(own[3], own[4] > 0) for own in expected}
    assert ended == {("eos", True), ("length", True), ("eos", False), ("length", False)}
    answers = [len(list(part)) for own in expected for mine, part in itertools.groupby(own[2]) if not mine]
    assert max(answers) > WIDTH  # more than one pass of the engine
    assert all(own[2][-1] for own in expected)  # an answer after which nothing could come is left out
    assert any(len(own[0]) + len(r.prompt_ids) > 64 for own, r in zip(expected, requests, strict=True))


@pytest.mark.parametrize("max_slots", [1, 3, 4])
def test_same_bits_whatever_the_number_of_slots(engine, params, requests, expected, sequential, max_slots):
    tool, ended = Counter(), []
    scheduler = Scheduler(engine, max_slots, tools=make_use(tool))
    completions, statistics = scheduler.run(params, requests, on_finished=lambda *each: ended.append(each))
    assert_as_expected(completions, expected)
    assert sorted(index for index, _ in ended) == list(range(len(requests)))
    assert_as_expected([completion for _, completion in sorted(ended, key=lambda each: each[0])], expected)
    calls = sum(own[4] for own in expected)
    assert statistics.tool_calls == len(tool.texts) == calls == sequential.calls
    assert statistics.tool_errors == sequential.errors > 0
    own = sum(completion.sampled_tokens for completion in completions)
    assert statistics.tokens == own
    assert statistics.tool_tokens == sum(len(c.response_ids) for c in completions) - own > 0


@pytest.mark.parametrize("overlap", [False, True], ids=["all", "halves"])
@pytest.mark.parametrize("slow", [False, True], ids=["at once", "slowly"])
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
        speculator.learn(
            [
                Outcome(request.prompt_ids, completion.response_ids, 1.0)
                for request, completion in zip(requests, completions, strict=True)
            ]
        )
    assert statistics.accepted > 0.5 * statistics.tokens


def test_others_decode_while_a_tool_works(engine, params, requests, expected):
    """A tool that does not answer before another response has ended."""
    over = threading.Event()

    class Waiting(Counter):
        def call(self, text):
            assert over.wait(30)
            return super().call(text)

    first = next(index for index, own in enumerate(expected) if own[4])
    other = next(index for index, own in enumerate(expected) if not own[4])
    chosen = [first, other]
    completions, statistics = Scheduler(engine, 2, tools=make_use(Waiting())).run(
        params, [requests[i] for i in chosen], lambda tokens, finished: finished and over.set()
    )
    assert_as_expected(completions, [expected[i] for i in chosen])
    assert statistics.tool_waiting_seconds < 30


def test_a_tool_that_hangs_costs_its_time_limit_and_answers_with_an_error(engine, params, requests):
    release = threading.Event()

    class Hanging:
        def call(self, text):
            release.wait()

    use = make_use(Hanging(), max_calls=1, time_limit=0.05)
    completions, statistics = Scheduler(engine, SLOTS, tools=use).run(params, requests[:6])
    release.set()
    assert statistics.tool_calls == statistics.tool_errors > 0
    said = encode("(error: no answer after 0.05 s)")
    answered = [completion for completion in completions if not completion.sampled_mask.all()]
    assert answered
    for completion in answered:
        assert completion.response_ids[~completion.sampled_mask].tolist() == said


def test_stop_strings_are_looked_for_in_what_the_policy_writes(engine, params, requests):
    """Letters of answers do not complete one, and whichever comes first ends or calls."""
    stop = StopStrings(["ddd"], spell)
    completions, _ = Scheduler(engine, SLOTS, stop, tools=make_use(Counter())).run(params, requests)
    found = Sequentially(engine, params, stop).run(requests)
    assert_as_expected(completions, found)
    stopped = [own for own in found if own[3] == "stop"]
    assert any(own[4] for own in stopped)
    for own in found:
        for mine, part in itertools.groupby(zip(own[0], own[2], strict=True), key=lambda pair: pair[1]):
            text = spell([token for token, _ in part])
            assert not mine or "ddd" not in text[:-1]
    assert any("ddd" in spell(own[0][: -1 if own[3] == "stop" else None]) for own in found)


def test_without_a_call_nothing_differs(engine, params, requests):
    plain, statistics = Scheduler(engine, SLOTS).run(params, requests)
    use = dataclasses.replace(
        make_use(Counter()), markup=dataclasses.replace(MARKUP, calls={"x": ("<", ">")})
    )
    completions, same = Scheduler(engine, SLOTS, tools=use).run(params, requests)
    assert_same(completions, plain)
    assert all(completion.sampled_mask.all() for completion in completions)
    assert all(completion.sampled_mask is None for completion in plain)
    assert (same.tokens, same.steps, same.rows) == (statistics.tokens, statistics.steps, statistics.rows)


def test_what_is_sampled_ahead_ends_at_its_first_call(engine, params, requests, expected):
    """Nobody's tools are called for what is drafts only; the next rollout's tokens are its own."""
    own = [i for i, found in enumerate(expected) if found[4]]
    ahead = RunAhead(below=SLOTS, max_share=1e9)
    times = FavouriteRows([0])
    speculator = Speculator(engine, {"srt": make_drafter("srt")}, SLOTS, ahead, times, times.choice)
    tool = Counter()
    scheduler = Scheduler(engine, SLOTS, None, speculator, False, make_use(tool))
    ahead.plan([requests[i] for i in own])
    now = [*range(9, 12), 17]  # three that are short, and a long one
    completions, _ = scheduler.run(params, [requests[i] for i in now])
    assert_as_expected(completions, [expected[i] for i in now])
    assert len(tool.texts) == sum(expected[i][4] for i in now)
    kept = [ahead.recall(requests[i].noise_key) for i in own]
    assert sum(tokens is not None for tokens in kept) >= 2
    for tokens, index in zip(kept, own, strict=True):
        if tokens is not None:
            assert tokens.tolist() == expected[index][0][: len(tokens)]
            assert all(expected[index][2][: len(tokens)])
    times.rows = itertools.cycle(ALL_ROWS)
    completions, _ = scheduler.run(params, requests)
    assert_as_expected(completions, expected)


@pytest.mark.parametrize(("name", "overlap"), [("quantized", False), ("small_model", True), ("eagle", False)])
def test_same_bits_with_drafters_on_the_device(params, requests, expected, tmp_path, name, overlap):
    args = {}
    if (
        name == "small_model"
    ):  # the policy beside itself: what it knows of the slots is right where drafts are
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
