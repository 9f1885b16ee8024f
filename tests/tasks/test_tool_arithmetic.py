"""The task that needs a calculator: what it asks, what its solutions say, how it judges."""

import itertools
import re

from rljax.config.tools import ToolsConfig
from rljax.tasks.base import SPLITS, Problem, Task, is_heldout
from rljax.tasks.tool_arithmetic import ANSWER, CALL, ToolArithmetic
from rljax.tools.calculator import Calculator


def expression_of(problem):
    (message,) = problem.messages
    assert re.fullmatch(r"[0-9]+([-+*][0-9]+)+=", message["content"])
    return message["content"][:-1]


def test_a_known_problem_never_changes():
    """Resume depends on these literals: a change here changes the data of every run."""
    assert isinstance(ToolArithmetic(seed=0), Task)
    assert ToolArithmetic(seed=0).problem("warm_start", 0) == Problem(
        id="warm_start/0",
        messages=({"role": "user", "content": "45+0="},),
        answer="45",
        difficulty=2,
        solution="<calculator>45+0</calculator><result>45</result>#45",
    )


def test_solutions_have_the_markers_that_a_config_has_by_default():
    tools = ToolsConfig(names=["calculator"])
    assert tuple(each.format(name="calculator") for each in (tools.opening, tools.closing)) == CALL
    assert (tools.answer_opening, tools.answer_closing) == ANSWER


def test_answers_are_what_the_calculator_says():
    task = ToolArithmetic(seed=1, numbers=6, digits=6)
    for split, index in itertools.product(SPLITS, range(300)):
        problem = task.problem(split, index)
        expression = expression_of(problem)
        assert Calculator().call(expression) == problem.answer
        assert is_heldout(expression + "=") == (split == "heldout")
        assert len(re.findall("[0-9]+", expression)) == problem.difficulty <= 6


def test_solutions_earn_what_they_deserve():
    task = ToolArithmetic(seed=2)
    judged = [task.reward(each, each.solution) for each in (task.problem("train", i) for i in range(200))]
    assert all(one == {"reward": 1.0, "called": 1.0} for one in judged)
    shown = [task.reward(each, each.solution) for each in (task.problem("warm_start", i) for i in range(500))]
    called = sum(one["called"] for one in shown) / 500
    guessed = [one["reward"] for one in shown if not one["called"]]
    assert 0.25 < called < 0.35
    assert sum(guessed) < 0.05 * len(guessed)


def test_only_the_number_behind_the_last_marker_counts():
    task = ToolArithmetic(seed=0)
    problem = task.problem("warm_start", 0)
    assert [task.reward(problem, right)["reward"] for right in ("#45", "#1#45 \n")] == [1, 1]
    wrong = ("#-45", "#45.0", "45", "#45<result>45</result>", "<result>#45</result>", "#٤٥", "")
    assert not any(task.reward(problem, each)["reward"] for each in (*wrong, "#" + "9" * 5000))
