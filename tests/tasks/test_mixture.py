"""Mixtures and curricula: shares, order, and that a position is all there is to resume from."""

import collections

import pytest

from rljax.assembly.task import configured_task
from rljax.config import MixtureConfig, TaskConfig
from rljax.tasks.chain_arithmetic import ChainArithmetic
from rljax.tasks.mixture import Mixture


def mixture(*items, seed=0):
    configs = [MixtureConfig.model_validate(item) for item in items]
    return Mixture(
        seed, [(config, ChainArithmetic(seed, max_terms=i + 2)) for i, config in enumerate(configs)]
    )


def labels(task, positions):
    return [task.problem("train", i).id.partition("/")[0] for i in positions]


EASY, HARD = {"name": "easy", "weight": 3}, {"name": "hard"}


def test_shares_are_the_weights():
    counts = collections.Counter(labels(mixture(EASY, HARD), range(2000)))
    # 5 standard deviations of a binomial with p = 3/4.
    assert abs(counts["easy"] - 1500) < 5 * (2000 * 0.75 * 0.25) ** 0.5
    assert set(labels(mixture({**EASY, "weight": 0}, HARD), range(100))) == {"hard"}


def test_each_task_gives_all_its_problems_in_its_own_order():
    task, easy = mixture(EASY, HARD), ChainArithmetic(0, max_terms=2)
    mixed = [problem for i in range(200) if (problem := task.problem("train", i)).id.startswith("easy/")]
    expected = [easy.problem("train", i) for i in range(len(mixed))]
    assert [problem.messages for problem in mixed] == [problem.messages for problem in expected]
    assert [problem.id for problem in mixed] == [f"easy/{problem.id}" for problem in expected]


def test_a_problem_is_a_function_of_its_position():
    once, again = mixture(EASY, HARD), mixture(EASY, HARD)
    forwards = [once.problem("train", i) for i in range(100)]
    assert again.problem("train", 99) == forwards[99]  # a resumed run starts here
    assert [again.problem("train", i) for i in range(100)] == forwards
    assert labels(mixture(EASY, HARD, seed=1), range(100)) != labels(once, range(100))
    with pytest.raises(ValueError):
        once.problem("train", -1)
    held = [once.problem("heldout", i).id for i in range(4)]  # every evaluation asks the same
    assert held == ["easy/heldout/0", "hard/heldout/0", "easy/heldout/1", "hard/heldout/1"]


def test_a_schedule_moves_from_one_task_to_the_other():
    task = mixture(
        {"name": "easy", "schedule": [[200, 1], [1200, 0]]},
        {"name": "hard", "schedule": [[200, 0.0], [1200, 1]]},
    )
    order = labels(task, range(1400))
    assert set(order[:200]) == {"easy"} and set(order[1200:]) == {"hard"}
    middle = order[600:800].count("hard")
    assert abs(middle - 100) < 5 * 50**0.5
    config = MixtureConfig(name="x", schedule=[[10, 1], [20, 3], [30, 0]])
    assert [config.weight_at(i) for i in (0, 10, 15, 20, 25, 30, 99)] == [1, 1, 2, 3, 1.5, 0, 0]


def test_each_problem_is_judged_by_its_own_task():
    rewards = [{"name": "length", "weight": 2, "args": {"target": 0, "limit": 10}}, {"name": "task"}]
    parts = [
        {"name": "chain_arithmetic", "label": "own", "args": {"max_terms": 2}},
        {"name": "chain_arithmetic", "label": "length", "args": {"max_terms": 3}, "rewards": rewards},
    ]
    section = TaskConfig.model_validate({"name": "mixture", "mixture": parts})
    task = configured_task(section, 0)
    problems = [task.problem("heldout", i) for i in range(4)]
    judged = task.rewards([(problem, problem.solution) for problem in problems])
    assert judged == [task.reward(problem, problem.solution) for problem in problems]
    own = {"correct": 1.0, "format": 1.0, "answer_found": 1.0}
    assert judged[0] == judged[2] == {"reward": 1.0} | own
    length = max(0, 10 - len(problems[1].solution)) / 10
    assert judged[1] == {
        "reward": 2 * length + 1.0, "length": length, "errors": 0.0, "timeouts": 0.0,
        "task": 1.0, **{f"task/{name}": value for name, value in own.items()},
    }  # fmt: skip
    assert task.problem("train", 3) == configured_task(section, 0).problem("train", 3)
