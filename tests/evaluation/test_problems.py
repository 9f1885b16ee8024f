"""What responses and judgements depend on: what was edited in its place is not taken for what it was."""

import dataclasses
import sys

import pytest

from rljax.config import load_config
from rljax.evaluation.problems import asked_digest, distinct_problems, judging_digest, task_settings
from rljax.tasks.base import Problem
from tests.training.tiny_run import write_config

PROBLEM = Problem("a.jsonl:1", ({"role": "user", "content": "?"},), "7", 0, "so 7", {"tests": [1]})


@pytest.mark.parametrize(
    ("changes", "asked", "judged"),
    [
        ({"id": "b.jsonl:2", "solution": "hence 7", "difficulty": 3}, True, True),
        ({"answer": "8"}, True, False),
        ({"data": {"tests": [2]}}, True, False),
        ({"messages": ({"role": "user", "content": "!"},)}, False, False),
    ],
)
def test_a_problem_that_was_edited(changes, asked, judged):
    other = dataclasses.replace(PROBLEM, **changes)
    assert (asked_digest(other) == asked_digest(PROBLEM)) is asked
    assert (judging_digest(other, {}) == judging_digest(PROBLEM, {})) is judged


def test_rewards_are_settings_of_the_judging_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])

    def settings(*overrides, code="a"):
        (tmp_path / "mine.py").write_text(code)
        overrides = ["task.rewards=[{name: mine:judge}]", *overrides]
        return task_settings(load_config(write_config(tmp_path), overrides).task)

    sampled, judged = settings()
    for overrides, code in (
        (["task.reward_errors=zero"], "a"),
        (["task.reward_timeout=60"], "a"),
        (["task.rewards=[{name: numeric}]"], "a"),
        ([], "b"),
    ):
        same, other = settings(*overrides, code=code)
        assert same == sampled and other != judged
    assert settings("task.reward_workers=3") == (sampled, judged)
    assert settings("task.args.max_terms=4")[0] != sampled
    mixture = "task={name: mixture, mixture: [{name: chain_arithmetic, rewards: [{name: %s}]}]}"
    (same, one), (again, other) = (
        task_settings(load_config(write_config(tmp_path), [mixture % name]).task)
        for name in ("numeric", "exact")
    )
    assert same == again and one != other and not same.keys() & one.keys()


def test_each_problem_once():
    class Three:
        def problem(self, split, index):
            return dataclasses.replace(PROBLEM, id=str(index % 3))

    said = []
    assert list(distinct_problems(Three(), "heldout", 5, said.append)) == [0, 1, 2]
    assert said == ["only 3 of the first 5 heldout problems are different ones"]
    assert list(distinct_problems(Three(), "heldout", 2, said.append)) == [0, 1] and len(said) == 1
