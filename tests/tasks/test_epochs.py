"""Problems that come back epoch after epoch."""

import pytest

from rljax.tasks.base import SPLITS, Task
from rljax.tasks.chain_arithmetic import ChainArithmetic
from rljax.tasks.epochs import EpochTask
from rljax.tasks.judging import own_reward


@pytest.fixture
def task():
    return ChainArithmetic(seed=0)


def test_is_a_task(task):
    assert isinstance(EpochTask(task, 3), Task)


@pytest.mark.parametrize("problems", [1, 2, 7])
def test_training_problems_come_back(task, problems):
    epochs = EpochTask(task, problems)
    seen = [epochs.problem("train", index) for index in range(3 * problems)]
    assert seen == [task.problem("train", index) for index in range(problems)] * 3
    assert len({problem.id for problem in seen}) == problems
    assert epochs.problem("train", 10**9 * problems) == seen[0]


@pytest.mark.parametrize("split", [split for split in SPLITS if split != "train"])
def test_other_splits_are_untouched(task, split):
    epochs = EpochTask(task, 2)
    assert [epochs.problem(split, index) for index in range(8)] == [task.problem(split, i) for i in range(8)]


def test_rewards_are_the_tasks(task):
    epochs = EpochTask(task, 2)
    problem = epochs.problem("train", 3)
    for text in (problem.solution, "nonsense", ""):
        assert epochs.reward(problem, text) == own_reward(task, problem, text)
    assert epochs.reward(problem, problem.solution)["reward"] > epochs.reward(problem, "nonsense")["reward"]
