"""Rewards and answers of responses, and the metrics of the evaluations inside a run."""

import math
from collections.abc import Sequence

from rljax.config import EvaluationConfig
from rljax.errors import UserError
from rljax.evaluation.metrics import (
    JudgedProblem,
    default_ks,
    difficulty_groups,
    means,
    problem_metrics,
    success_part,
)
from rljax.models.tokenizer import Tokenizer
from rljax.rollout.collector import Group
from rljax.tasks.answers import extracted_answer
from rljax.tasks.base import Problem, Split, Task

Answered = tuple[Problem, str]
"""A problem and the text of one response to it."""


def judge(task: Task, answered: Sequence[Answered]) -> list[dict[str, float]]:
    """The task's reward of each response, in order; together, if the task has a method `rewards` for that.

    Raises:
      UserError: a reward raised, or is not finite.
    """
    together = getattr(task, "rewards", None)
    found = [_reward(task, *each) for each in answered] if together is None else together(answered)
    for (problem, _), rewards in zip(answered, found, strict=True):
        for name, value in rewards.items():
            if not math.isfinite(value):
                raise UserError(f"task: the reward of problem {problem.id} has {name} {value}")
    return found


def _reward(task: Task, problem: Problem, text: str) -> dict[str, float]:
    try:
        return task.reward(problem, text)
    except Exception as error:
        raise UserError(f"task: the reward of problem {problem.id} raised {error!r}") from error


def check_success(task: Task, split: Split, evaluation: EvaluationConfig) -> None:
    """Raises a ConfigError if rewards have no part `evaluation.success`, before there is any response."""
    if evaluation.success is None or not evaluation.problems:
        return
    try:
        (rewards,) = judge(task, [(task.problem(split, 0), "")])
    except UserError:
        return  # no reward for an empty response: the first real one will tell
    success_part(list(rewards), evaluation.success)


def group_metrics(
    groups: list[Group], task: Task, tokenizer: Tokenizer, evaluation: EvaluationConfig
) -> dict[str, float]:
    """What `evaluation.samples` and `evaluation.by_difficulty` add to the mean rewards: `mean@n`, `pass@k`
    and `maj@k`, and `difficulty_4-6/...` of every group of difficulty.

    Args:
      groups: of the held-out problems, n responses each.
      task: whose problems.
      tokenizer: of the policy.
      evaluation: what is wanted.
    """
    if evaluation.samples == 1 and not evaluation.by_difficulty:
        return {}
    ks = evaluation.pass_at or default_ks(evaluation.samples)
    metrics = [problem_metrics(_judged(group, task, tokenizer), ks, evaluation.success) for group in groups]
    found = {name: value for name, value in means(metrics).items() if "@" in name}
    if evaluation.by_difficulty:
        for part in difficulty_groups([group.problem.difficulty for group in groups]):
            own = means([metrics[index] for index in part.members])
            found |= {f"difficulty_{part.name}/{name}": value for name, value in own.items()}
    return found


def _judged(group: Group, task: Task, tokenizer: Tokenizer) -> JudgedProblem:
    texts = [tokenizer.decode(each.response_ids.tolist()) for each in group.completions]
    answers = [extracted_answer(task, group.problem, text) for text in texts]
    return JudgedProblem(group.problem.difficulty, group.rewards, answers)
