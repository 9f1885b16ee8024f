"""Episodes: whatever decodes beside them, drafts for them or keeps them waiting, they are what plain decoding
of everything that stood before gives, bit for bit.
"""

import itertools
import threading
import types

import numpy as np
import pytest

from drafters.registry import make_drafter
from rljax.engine.buckets import Buckets
from rljax.environments.task import Outcome
from rljax.environments.use import EnvironmentUse
from rljax.errors import UserError
from rljax.requests import Request
from rljax.rollout.collector import Scheduler
from rljax.rollout.episodes import environment_metrics, episode_rewards
from rljax.rollout.stop_strings import StopStrings
from rljax.speculation.speculator import Speculator
from rljax.tasks.base import Problem
from rljax.tools.workers import ToolWorkers
from tests.rollout.test_tool_turns import assert_as_expected, sequentially
from tests.tiny_policy import SLOTS, FavouriteRows, make_engine, make_requests, outcomes, spell

EOS = (1, 7, 30, 44)  # so many that episodes have several turns
MAX_TURNS = 4


@pytest.fixture(scope="module")
def engine():
    """Of one shape: in test_tool_turns.py, states shrink and grow between turns."""
    return make_engine(buckets=Buckets((SLOTS,), (128,), (16,), 7), eos=EOS)


@pytest.fixture(scope="module")
def requests():
    return [
        Request(each.prompt_ids, each.noise_key, each.max_response, problem=Problem(str(number), (), "", 0))
        for number, each in enumerate(make_requests((3, 20, 64, 8, 1, 30), (60, 90, 64, 7, 100, 98)))
    ]


class Echo:
    """An environment that answers with what it was told, and then some; may fail."""

    config = types.SimpleNamespace(name="echo")

    def __init__(self, fails=lambda problem: None, is_here=False):
        self.fails, self.is_here = fails, is_here

    def step(self, key, problem, actions, last):
        assert last == (len(actions) == MAX_TURNS)
        if (failure := self.fails(problem)) is not None:
            return self.failed("failed", failure, problem, actions)
        return Outcome(*answer(actions[-1]))

    def failed(self, what, failure, problem, actions):
        return Outcome((), 0.0, False, {}, failure)


class SecondFirst(Echo):
    """Its first step ends after the second one."""

    def __init__(self):
        super().__init__()
        self.numbers, self.over = itertools.count(), threading.Event()

    def step(self, *arguments):
        number = next(self.numbers)
        if number == 0:
            assert self.over.wait(30)
        outcome = super().step(*arguments)
        if number == 1:
            self.over.set()
        return outcome


def answer(text):
    """What the environment makes of a turn: (messages, reward, done, info)."""
    content = text + "!" * (len(text) % 23)
    return [{"role": "user", "content": content}], len(text) % 3 - 1.0, len(text) % 5 == 4, {"n": len(text)}


def encode(text):
    """Anything, but the same every time: never EOS."""
    return [50 + ord(letter) % 10 for letter in text]


def following(messages, last_token):
    number = last_token % 40 + 2
    return [2, 3 if number in EOS else number, *encode(messages[0]["content"])]


def make_use(task, time_limit=30.0, most=8):
    turns = types.SimpleNamespace(following=following)
    tokenizer = types.SimpleNamespace(response_text=spell)
    return EnvironmentUse(task, tokenizer, turns, MAX_TURNS, 40, ToolWorkers(most, time_limit))


def environment_turn(ids, reason, own, limit):
    """As `sequentially` has it: what ends is answered."""
    if reason == "length" and ids[-1] not in EOS:
        return ids, None, "length"
    messages, reward, done, _ = answer(spell(ids))
    own.rewards.append(reward)
    more, reason = following(cut(messages), ids[-1]), "eos" if done else "length"
    goes_on = not done and len(own.rewards) < MAX_TURNS and len(more) < limit - len(ids)
    return ids, more if goes_on else None, reason


def cut(messages):
    text = messages[0]["content"]
    return [{"role": "user", "content": text if len(text) <= 40 else text[:30] + " ... (cut)"}]


@pytest.fixture(scope="module")
def expected(engine, params, requests):
    return sequentially(engine, params, requests, environment_turn)


def test_the_requests_say_something(expected):
    turns = [len(own.rewards) for own in expected]
    assert max(turns) == MAX_TURNS and min(turns) == 0 and sum(turns) > len(turns)
    assert {own.reason for own in expected} == {"eos", "length"}
    assert any(own.reason == "length" and len(own.rewards) == MAX_TURNS for own in expected)
    assert any(own.own[-1] and own.tokens[-1] in EOS and len(own.rewards) < MAX_TURNS for own in expected)


@pytest.mark.parametrize(("max_slots", "is_here"), [(1, True), (4, False)])
def test_same_bits_whatever_the_number_of_slots(engine, params, requests, expected, max_slots, is_here):
    scheduler = Scheduler(engine, max_slots, tools=make_use(Echo(is_here=is_here)))
    completions, statistics = scheduler.run(params, requests)
    assert_as_expected(completions, expected)
    assert statistics.tokens == sum(completion.sampled_tokens for completion in completions)
    metrics = environment_metrics(completions, statistics)
    turns = [len(own.rewards) for own in expected]
    assert metrics["environment/turns"] == np.mean(turns)
    assert 0 < metrics["environment/cut_off"] == np.mean([own.reason != "eos" for own in expected]) < 1
    assert metrics["environment/reward_per_turn"] == pytest.approx(
        sum(sum(own.rewards) for own in expected) / sum(turns)
    )
    assert metrics["environment/tokens"] == sum(own.own.count(False) for own in expected)


@pytest.mark.parametrize("overlap", [False, True], ids=["all", "halves"])
def test_same_bits_with_drafts_and_with_steps_that_end_in_another_order(
    engine, params, requests, expected, overlap
):
    times = FavouriteRows([16, 0])
    speculator = Speculator(engine, {"srt": make_drafter("srt")}, SLOTS, times=times, strategies=times.choice)
    for _ in range(2):  # the second time with what the first one taught
        task = SecondFirst()
        scheduler = Scheduler(engine, SLOTS, None, speculator, overlap, make_use(task))
        completions, statistics = scheduler.run(params, requests)
        assert_as_expected(completions, expected)
        assert task.over.is_set()
        speculator.learn(outcomes(requests, completions))
    assert statistics.accepted > 0.4 * statistics.tokens


def test_stop_strings_end_turns(engine, params, requests):
    stop = StopStrings(["d"], spell)
    completions, _ = Scheduler(engine, SLOTS, stop, tools=make_use(Echo())).run(params, requests)
    assert_as_expected(completions, sequentially(engine, params, requests, environment_turn, stop))
    pairs = [
        pair
        for each in completions
        for pair in zip(each.response_ids.tolist(), each.sampled_mask[1:].tolist(), strict=False)
    ]
    assert any(spell([token]) == "d" and not own for token, own in pairs)


def test_a_failure_costs_the_episode_its_reward(engine, params, requests, expected):
    task = Echo(fails=lambda problem: "errors" if int(problem.id) % 2 else None)
    completions, _ = Scheduler(engine, SLOTS, tools=make_use(task)).run(params, requests)
    rewards = episode_rewards(completions, declines=lambda kind: False)
    for number, (reward, own) in enumerate(zip(rewards, expected, strict=True)):
        failed = number % 2 and bool(own.rewards)
        assert reward["reward"] == (0.0 if failed else sum(own.rewards))
        assert (reward["errors"], reward["timeouts"]) == (float(bool(failed)), 0.0)
        assert "n" in reward


def test_a_step_that_hangs_is_given_up(engine, params, requests, expected):
    release = threading.Event()

    class Hanging(Echo):
        def step(self, *arguments):
            release.wait()

    number = next(index for index, own in enumerate(expected) if own.rewards)
    scheduler = Scheduler(engine, SLOTS, tools=make_use(Hanging(), time_limit=0.05))
    (completion,), _ = scheduler.run(params, [requests[number]])
    release.set()
    assert completion.episode.failure == "timeouts" and completion.episode.reward == 0.0


def test_an_environment_that_stops_the_run(engine, params, requests):
    class Strict(Echo):
        def step(self, *arguments):
            raise UserError("task.name (echo): raised; problem 3, turn 1")

    with pytest.raises(UserError, match="problem 3, turn 1"):
        Scheduler(engine, SLOTS, tools=make_use(Strict())).run(params, requests)
