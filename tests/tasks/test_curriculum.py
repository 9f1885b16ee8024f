"""Curricula by pass rates: which problems are passed over, and that a resumed run asks the same ones."""

import pytest

from rljax.errors import ConfigError
from rljax.rollout.prompts import Prompts
from rljax.tasks.base import Problem
from rljax.tasks.curriculum import Curriculum
from tests.rollout.test_prompts import Characters
from tests.training.tiny_run import train


def problem(number):
    return Problem(f"train/{number}", ({"role": "user", "content": "?"},), "", 0)


class Epochs:
    """Four problems, again and again."""

    def problem(self, split, index):
        return problem(index % 4)


def shares_asked(curriculum, count=400):
    asked, after = Prompts(Epochs(), Characters(), 4, False, curriculum).next_problems("train", 100, count)
    assert after - 100 >= count
    return [sum(index % 4 == number for index in asked) / ((after - 100) / 4) for number in range(4)]


def test_a_problem_is_asked_as_often_as_its_rule_says():
    passed = [(problem(0), 1.0), (problem(1), 0.5), (problem(2), 0.0)]  # 3 was never asked
    for rule, expected in (("failures", (0.1, 0.5, 1.0, 1.0)), ("uncertain", (0.1, 1.0, 0.1, 1.0))):
        curriculum = Curriculum(rule, 0.1, seed=0)
        assert shares_asked(curriculum) == [1.0] * 4
        curriculum.learn(passed)
        assert shares_asked(curriculum) == pytest.approx(expected, abs=0.08)
        again = Curriculum(rule, 0.1, seed=0)
        again.load_state(curriculum.state())
        prompts = [Prompts(Epochs(), Characters(), 4, False, each) for each in (curriculum, again)]
        first, second = (each.next_problems("train", 7, 50) for each in prompts)
        assert first == second
        held_out = prompts[0].next_problems("heldout", 0, 9)
        assert held_out == (list(range(9)), 9)


def test_a_pass_rate_remembers_its_last_visits():
    curriculum = Curriculum("failures", 0.1, seed=0)
    for share in (0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0):
        metrics = curriculum.learn([(problem(0), share)])
    assert curriculum.state() == {"train/0": [8, pytest.approx(1 - 0.75**4)]}
    assert metrics == {"curriculum/known": 1, "curriculum/pass_rate": pytest.approx(1 - 0.75**4)}


_RUN = (
    "warm_start=null",
    "evaluation.problems=0",
    "task.problems=4",
    "checkpoint.every=3",
    "task.curriculum=uncertain",
    "task.curriculum_floor=0.05",
    "training.steps=4",
)


def test_a_run_passes_over_problems_and_resumes_exactly(tmp_path):
    """Nobody passes, so every problem that was asked once is passed over but for the floor."""
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    whole = train(tmp_path / "whole", *_RUN)
    train(tmp_path / "parts", *_RUN, "training.steps=3")
    resumed = train(tmp_path / "parts", *_RUN)
    numbers = ("reward/mean", "loss/policy", "rollout/tokens")
    for line, other in zip(resumed, whole, strict=True):
        for key in other:
            assert not (key.startswith("curriculum/") or key in numbers) or line[key] == other[key], key
    assert [line["curriculum/known"] for line in whole[1:3]] == [2, 4]
    assert sum(line["curriculum/passed_over"] for line in whole[4:]) > 6


def test_problems_that_never_come_back_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"task\.curriculum: uncertain needs problems that come back"):
        train(tmp_path, *_RUN, "task.problems=0")
