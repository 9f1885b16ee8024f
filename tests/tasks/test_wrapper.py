"""What tasks that are made of tasks pass on."""

from types import SimpleNamespace

import pytest

from rljax.config import MixtureConfig, TaskConfig
from rljax.tasks.base import Problem
from rljax.tasks.epochs import EpochTask
from rljax.tasks.mixture import Mixture
from rljax.tasks.rewards.combined import RewardedTask
from rljax.tasks.wrapper import Wrapper, close, fingerprint, finite_problems

PROBLEM = Problem("train/0", ({"role": "user", "content": "?"},), "4", 0)
EXACT = TaskConfig.model_validate({"name": "dataset", "rewards": [{"name": "exact"}]})


@pytest.mark.parametrize(
    "wrap",
    [
        lambda task: EpochTask(task, 1),
        lambda task: Mixture(0, [(MixtureConfig(name="dataset"), task)]),
        lambda task: RewardedTask(task, EXACT),
        lambda task: EpochTask(Mixture(0, [(MixtureConfig(name="dataset"), RewardedTask(task, EXACT))]), 1),
    ],
)
def test_what_a_task_may_have_is_passed_on(wrap):
    ended = []
    task = wrap(
        SimpleNamespace(
            problem=lambda split, index: PROBLEM,
            reward=lambda problem, text: {"reward": float(text == problem.answer)},
            finite_problems=lambda: [PROBLEM],
            fingerprint=lambda: {"data.jsonl": "digest"},
            close=lambda: ended.append(True),
        )
    )
    assert finite_problems(task) == [PROBLEM] and fingerprint(task) == {"data.jsonl": "digest"}
    asked = task.problem("train", 0)
    assert [task.reward(asked, text)["reward"] for text in ("4", "5")] == [1.0, 0.0]
    close(task)
    assert ended == [True]


def test_a_task_need_have_none_of_it():
    task = EpochTask(SimpleNamespace(), 1)
    assert finite_problems(task) == [] and fingerprint(task) == {}
    close(task)


def test_a_wrapper_that_forgets_something_cannot_be_made():
    class Forgetful(Wrapper):
        def problem(self, split, index):
            return PROBLEM

        def extracted_answer(self, problem, response_text):
            return None

    with pytest.raises(TypeError, match="rewards"):
        Forgetful(SimpleNamespace())
