"""Rewards of a task's own: what is no number is named before it is learned from."""

import math
import re
from types import SimpleNamespace

import pytest

from rljax.errors import UserError
from rljax.tasks.base import Problem
from rljax.tasks.judging import judge

PROBLEM = Problem("train/7", ({"role": "user", "content": "?"},), "!", 0)


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ({"reward": math.nan}, "has reward nan, no finite number"),
        ({"reward": "1"}, "has reward '1', no finite number"),
        ({"reward": 1.0, "part": -math.inf}, "has part -inf, no finite number"),
        ({"reward": 1e20}, "is 1e+20, beyond 1e+18, where the statistics of a group overflow"),
        ({"correct": 1.0}, "is {'correct': 1.0}, without a 'reward'"),
        (None, "is None, without a 'reward'"),
    ],
)
def test_a_reward_that_is_no_number_names_its_problem(reward, message):
    one_by_one = SimpleNamespace(reward=lambda problem, text: reward)
    together = SimpleNamespace(rewards=lambda answered: [{"reward": 1.0}, reward])
    for task in (one_by_one, together):
        with pytest.raises(UserError, match=re.escape(f"reward of problem train/7 {message}")):
            judge(task, [(PROBLEM, "a"), (PROBLEM, "b")])


def test_a_task_may_decline_and_says_whether_there_was_an_answer():
    task = SimpleNamespace(
        reward=lambda problem, text: {"reward": None if text == "?" else 1.0, "part": None},
        extracted_answer=lambda problem, text: text or None,
    )
    assert judge(task, [(PROBLEM, "?"), (PROBLEM, "")]) == [
        {"reward": None, "part": None, "answer_found": 1.0},
        {"reward": 1.0, "part": None, "answer_found": 0.0},
    ]
