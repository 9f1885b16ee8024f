"""Rewards of a task's own: what is no number is named before it is learned from."""

import math
from types import SimpleNamespace

import pytest

from rljax.errors import UserError
from rljax.tasks.base import Problem
from rljax.tasks.judging import judge

PROBLEM = Problem("train/7", ({"role": "user", "content": "?"},), "!", 0)


@pytest.mark.parametrize(
    "found", [{"reward": math.nan}, {"reward": -math.inf}, {"reward": "1"}, {"correct": 1.0}, None]
)
def test_a_reward_that_is_no_number_names_its_problem(found):
    one_by_one = SimpleNamespace(reward=lambda problem, text: found)
    together = SimpleNamespace(rewards=lambda answered: [{"reward": 1.0}, found])
    for task in (one_by_one, together):
        with pytest.raises(UserError, match=r"reward of problem train/7 is .*, without a finite 'reward'"):
            judge(task, [(PROBLEM, "a"), (PROBLEM, "b")])
