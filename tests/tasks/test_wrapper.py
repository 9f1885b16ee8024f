"""Tasks that are made of tasks: what they pass on, and problems that come back epoch after epoch."""

from types import SimpleNamespace

import pytest

from rljax.config import MixtureConfig, TaskConfig
from rljax.tasks.base import SPLITS, Problem, Task
from rljax.tasks.chain_arithmetic import ChainArithmetic
from rljax.tasks.epochs import EpochTask
from rljax.tasks.judging import own_reward
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
    inner = SimpleNamespace(
        problem=lambda split, index: PROBLEM,
        reward=lambda problem, text: {"reward": float(text == problem.answer)},
        finite_problems=lambda: [PROBLEM],
        fingerprint=lambda: {"data.jsonl": "digest"},
        close=lambda: ended.append(True),
    )
    task = wrap(inner)
    assert finite_problems(task) == [PROBLEM] and fingerprint(task) == {"data.jsonl": "digest"}
    asked = task.problem("train", 0)
    assert [task.reward(asked, text)["reward"] for text in ("4", "5")] == [1.0, 0.0]
    close(task)
    assert ended == [True]
    nothing = EpochTask(SimpleNamespace(), 1)  # need have none of it
    assert finite_problems(nothing) == [] and fingerprint(nothing) == {}
    close(nothing)


def test_a_wrapper_that_forgets_something_cannot_be_made():
    class Forgetful(Wrapper):
        def problem(self, split, index):
            return PROBLEM

        def extracted_answer(self, problem, response_text):
            return None

    with pytest.raises(TypeError, match="rewards"):
        Forgetful(SimpleNamespace())


@pytest.mark.parametrize("problems", [1, 7])
def test_training_problems_come_back_and_others_are_untouched(problems):
    task = ChainArithmetic(seed=0)
    epochs = EpochTask(task, problems)
    assert isinstance(epochs, Task)
    seen = [epochs.problem("train", index) for index in range(3 * problems)]
    assert seen == [task.problem("train", index) for index in range(problems)] * 3
    assert len({problem.id for problem in seen}) == problems
    assert epochs.problem("train", 10**9 * problems) == seen[0]
    for split in set(SPLITS) - {"train"}:
        assert [epochs.problem(split, i) for i in range(8)] == [task.problem(split, i) for i in range(8)]
    for text in (seen[0].solution, "nonsense", ""):
        assert epochs.reward(seen[0], text) == own_reward(task, seen[0], text)
    assert epochs.reward(seen[0], seen[0].solution)["reward"] > epochs.reward(seen[0], "nonsense")["reward"]
