"""The worded arithmetic task: what its solutions say, at which rates, and how long they are."""

import re

import numpy as np
import pytest

from rljax.tasks.base import Task
from rljax.tasks.registry import make_task
from rljax.tasks.worded_arithmetic import DIGRESSIONS, FORMS, OPENERS, SEPARATORS, WordedArithmetic


def demonstrations(count: int, **arguments) -> list:
    task = WordedArithmetic(0, **arguments)
    return [task.problem("warm_start", index) for index in range(count)]


def results_of(solution: str) -> list[int]:
    """The result of every step, in whichever form."""
    return [int(result) for result in re.findall(r"(?:=| is | makes )([0-9]{2})(?=[;,.])", solution)]


def test_a_known_problem_never_changes():
    """Resume depends on these literals: a change here changes the data of every run."""
    task = make_task("worded_arithmetic", 0)
    assert isinstance(task, Task)
    problem = task.problem("warm_start", 2)
    assert problem.messages[0]["content"] == "19a4="
    assert problem.solution == " a4 to 19 is 23; #23"


def test_solutions_of_other_splits_have_one_wording_and_are_right():
    task = WordedArithmetic(seed=3)
    for index in range(200):
        problem = task.problem("train", index)
        assert task.reward(problem, problem.solution) == {"reward": 1.0, "correct": 1.0, "format": 1.0}
        assert re.fullmatch(r"( [A-Za-z][0-9]\+[0-9]{2}=[0-9]{2};)+ #[0-9]{2}", problem.solution)


def test_demonstrations_are_in_the_format_and_end_with_their_last_result():
    task = WordedArithmetic(0)
    right = []
    for problem in demonstrations(500):
        reward = task.reward(problem, problem.solution)
        assert reward["format"] == 1.0
        assert results_of(problem.solution)[-1] == int(problem.solution[-2:])
        right.append(reward["correct"])
    assert 0.5 < np.mean(right) < 0.95  # slips run on into some answers: something is left to learn


def test_every_wording_comes_at_its_rate():
    for texts in (OPENERS, FORMS, SEPARATORS, DIGRESSIONS):
        assert sum(texts.values()) == pytest.approx(1.0)
    text = " ".join(problem.solution for problem in demonstrations(2000))
    steps = len(results_of(text))
    for opener, rate in OPENERS.items():
        if opener:
            count = len(re.findall(rf"{opener} [A-Za-z][0-9][+ ]", text))
            assert count / steps == pytest.approx(rate, abs=0.01)
    assert text.count(" to ") / steps == pytest.approx(0.24, abs=0.01)
    remarks = sum(text.count(remark) for remark in DIGRESSIONS)
    assert remarks / steps == pytest.approx(0.08, abs=0.005)


def test_lengths_have_a_long_tail():
    """Of 64 responses, the longest has over five times the steps of three quarters; the limit holds."""
    steps = np.asarray([len(results_of(problem.solution)) for problem in demonstrations(64 * 40)])
    batches = steps.reshape(-1, 64)
    assert np.median(batches.max(axis=1) / np.percentile(batches, 75, axis=1)) > 5
    assert steps.max() <= 110 and steps.max() > 100
