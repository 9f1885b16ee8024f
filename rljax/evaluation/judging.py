"""Rewards and answers of responses, and the metrics of the evaluations inside a run."""

import math

import numpy as np

from rljax.config import EvaluationConfig
from rljax.errors import UserError
from rljax.evaluation.metrics import (
    JudgedProblem,
    default_ks,
    difficulty_groups,
    problem_metrics,
    success_part,
)
from rljax.models.tokenizer import Tokenizer
from rljax.rollout.collector import Group
from rljax.tasks.answers import extracted_answer
from rljax.tasks.base import Problem, Split, Task


def judge(task: Task, problem: Problem, text: str) -> dict[str, float]:
    """The task's reward of a response, "reward" and its parts; a UserError if it raises or is not finite."""
    try:
        rewards = {name: float(value) for name, value in task.reward(problem, text).items()}
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"task: the reward of problem {problem.id} raised {error!r}") from error
    for name, value in rewards.items():
        if not math.isfinite(value):
            raise UserError(f"task: the reward of problem {problem.id} has {name} {value}")
    return rewards


def check_success(task: Task, split: Split, evaluation: EvaluationConfig) -> None:
    """Raises a ConfigError if rewards have no part `evaluation.success`, before there is any response."""
    if evaluation.success is not None and evaluation.problems:
        success_part(list(judge(task, task.problem(split, 0), "")), evaluation.success)


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
    success = success_part(list(groups[0].rewards[0]), evaluation.success)
    ks = evaluation.pass_at or default_ks(evaluation.samples)
    metrics = [problem_metrics(_judged(group, task, tokenizer), ks, success) for group in groups]
    counted = [name for name in metrics[0] if "@" in name]
    means = {name: float(np.mean([each[name] for each in metrics])) for name in counted}
    if evaluation.by_difficulty:
        for part in difficulty_groups([group.problem.difficulty for group in groups]):
            for name in metrics[0]:
                value = float(np.mean([metrics[index][name] for index in part.members]))
                means[f"difficulty_{part.name}/{name}"] = value
    return means


def _judged(group: Group, task: Task, tokenizer: Tokenizer) -> JudgedProblem:
    texts = [tokenizer.decode(each.response_ids.tolist()) for each in group.completions]
    answers = [extracted_answer(task, group.problem, text) for text in texts]
    return JudgedProblem(group.problem.difficulty, group.rewards, answers)
