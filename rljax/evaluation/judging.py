"""The metrics of the evaluations inside a run."""

from collections.abc import Sequence

from rljax.config import EvaluationConfig
from rljax.errors import UserError
from rljax.evaluation.metrics import (
    ScoredProblem,
    default_ks,
    difficulty_groups,
    means,
    part_names,
    problem_metrics,
    success_part,
)
from rljax.models.tokenizer import Tokenizer
from rljax.rollout.collector import Group
from rljax.tasks.answers import extracted_answer
from rljax.tasks.base import Problem, Split, Task
from rljax.tasks.judging import judge


def check_success(task: Task, split: Split, evaluation: EvaluationConfig) -> None:
    """Raises a ConfigError if rewards have no part `evaluation.success`, before anything is sampled."""
    if evaluation.problems:
        check_part(task, split, evaluation.success, "evaluation.success")


def check_part(task: Task, split: Split, part: str | None, key: str) -> None:
    """Raises a ConfigError if rewards have no such part, which a config key names."""
    if part is None:
        return
    try:
        (rewards,) = judge(task, [(task.problem(split, 0), "")])
    except UserError:
        return  # the task cannot judge an empty response; the first sampled one is checked instead
    if rewards["reward"] is not None:  # one that declines may give no parts
        success_part(list(rewards), part, key)


def group_metrics(
    groups: list[Group], task: Task, tokenizer: Tokenizer, evaluation: EvaluationConfig
) -> dict[str, float]:
    """Returns the metrics that `evaluation.samples` and `evaluation.by_difficulty` add to the mean rewards:
    `mean@n`, `pass@k` and `maj@k`, and `difficulty_4-6/...` for every difficulty group.

    Args:
      groups: groups of the held-out problems, n responses each.
    """
    if evaluation.samples == 1 and not evaluation.by_difficulty:
        return {}
    ks = evaluation.pass_at or default_ks(evaluation.samples)
    metrics = [problem_metrics(_scored(group, task, tokenizer), ks, evaluation.success) for group in groups]
    added = {name: value for name, value in means(metrics).items() if "@" in name}
    if evaluation.by_difficulty:
        for part in difficulty_groups([group.problem.difficulty for group in groups]):
            part_means = means([metrics[index] for index in part.members])
            added |= {f"difficulty_{part.name}/{name}": value for name, value in part_means.items()}
    return added


def pass_shares(groups: Sequence[Group], success: str | None) -> list[tuple[Problem, float]]:
    """Returns the problem of each group, and the share of its scored responses that pass (`success_part`); no
    group without any.
    """
    shares = []
    for group in groups:
        part = success_part(part_names(group.rewards), success)
        values = [value for rewards in group.rewards if (value := rewards.get(part)) is not None]
        if values:
            shares.append((group.problem, sum(values) / len(values)))
    return shares


def _scored(group: Group, task: Task, tokenizer: Tokenizer) -> ScoredProblem:
    responses = [group.last_of(place) for place in range(len(group.rewards))]
    texts = [
        "" if each is None else tokenizer.response_text(each.response_ids.tolist()) for each in responses
    ]
    answers = [extracted_answer(task, group.problem, text) for text in texts]
    return ScoredProblem(group.problem.difficulty, group.rewards, answers)
