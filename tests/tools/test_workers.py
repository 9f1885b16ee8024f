"""Calls in threads: every one is answered, in time, whatever the tool does."""

import threading
import time

import pytest

from rljax.errors import UserError
from rljax.tools import workers
from rljax.tools.base import ToolError
from rljax.tools.workers import ToolWorkers


class Tool:
    """Does what it is told to."""

    def __init__(self):
        self.release, self.running, self.most = threading.Event(), [], 0

    def call(self, text):
        self.running.append(text)
        self.most = max(self.most, len(self.running))
        try:
            return self.act(text)
        finally:
            self.running.remove(text)

    def act(self, text):
        if text == "hang":
            self.release.wait()
        elif text == "wrong":
            raise ToolError("that is\nwrong")
        elif text == "raise":
            raise ValueError("x" * 1000)
        elif text == "exit":
            raise SystemExit(3)
        elif text == "machine":
            raise UserError("no process left")
        elif text == "number":
            return 7
        elif text.startswith("sleep"):
            time.sleep(float(text[5:]))
        return text.upper()


@pytest.fixture
def tool():
    tool = Tool()
    yield tool
    tool.release.set()


def answers_of(pool, count):
    answers = {}
    while len(answers) < count:
        for answer in pool.answers(None):
            assert answer.key not in answers
            answers[answer.key] = answer
    return answers


def test_every_call_is_answered_under_its_key_in_any_order(tool):
    pool = ToolWorkers(3, 10.0)
    texts = [f"sleep{seconds}" for seconds in (0.08, 0.0, 0.04, 0.02, 0.0, 0.06)]
    for key, text in enumerate(texts):
        pool.submit(key, "tool", tool, text)
    answers = answers_of(pool, len(texts))
    assert [answers[key].text for key in range(len(texts))] == [text.upper() for text in texts]
    assert not any(answer.failed for answer in answers.values())
    assert answers[0].seconds >= 0.08 and tool.most <= 3
    assert not pool.pending


def test_what_a_tool_raises_is_one_line(tool):
    pool = ToolWorkers(2, 10.0)
    for key, text in enumerate(["wrong", "raise", "exit", "number"]):
        pool.submit(key, "tool", tool, text)
    answers = answers_of(pool, 4)
    assert answers[0].text == "error: that is wrong"
    assert answers[1].text.startswith("error: ValueError: xxx") and len(answers[1].text) == 200
    assert answers[2].text == "error: SystemExit: 3"
    assert answers[3].text == "error: TypeError: tool answered with int, not with text"
    assert all(answer.failed for answer in answers.values())
    pool.submit(0, "tool", tool, "machine")  # what is wrong with it is not for the policy
    with pytest.raises(UserError, match="no process left"):
        answers_of(pool, 1)


def test_a_call_that_hangs_is_given_up_and_the_next_ones_work(tool):
    pool = ToolWorkers(1, 0.1)
    for key, text in enumerate(["hang", "a", "hang", "b"]):
        pool.submit(key, "tool", tool, text)
    start = time.monotonic()
    answers = answers_of(pool, 4)
    assert time.monotonic() - start < 5.0
    given_up = "error: no answer after 0.1 s"
    assert [answers[key].text for key in range(4)] == [given_up, "A", given_up, "B"]
    tool.release.set()  # answers that come late belong to nobody
    time.sleep(0.05)
    pool.submit(4, "tool", tool, "c")
    assert [answer.text for answer in answers_of(pool, 1).values()] == ["C"]


def test_nobody_waits_longer_than_asked_and_what_was_forgotten_is_not_answered(tool):
    pool = ToolWorkers(1, 60.0)
    for key, text in enumerate(["hang", "a"]):
        pool.submit(key, "tool", tool, text)
    start = time.monotonic()
    assert pool.answers(0.05) == [] and pool.answers(0.0) == []
    assert 0.05 <= time.monotonic() - start < 2.0
    assert pool.pending
    pool.forget()
    assert not pool.pending
    tool.release.set()
    pool.submit(7, "tool", tool, "b")
    assert [answer.key for answer in pool.answers(None)] == [7]


def test_a_tool_that_always_hangs_ends_the_run(tool, monkeypatch):
    monkeypatch.setattr(workers, "MOST_ABANDONED", 3)
    pool = ToolWorkers(2, 0.02)
    for key in range(10):
        pool.submit(key, "slow", tool, "hang")
    with pytest.raises(UserError, match=r"tools: 4 calls .* of slow after 0\.02 s.*tools\.time_limit"):
        answers_of(pool, 10)
