"""Rewards of the response's text. They take linear time, so the training process computes them.

`vote` of a reward returns the response's answer in a normal form (equal answers are equal texts), for maj@k.
"""

from collections.abc import Callable
from fractions import Fraction

from rljax.tasks.base import Problem
from rljax.tasks.rewards.extraction import answer_finder
from rljax.tasks.rewards.spelling import number, plain

TextReward = Callable[[Problem, str], float]


def exact(answer_in: str = "response", marker: str = "####", ignore_case: bool = False) -> TextReward:
    """Rewards 1 if the response's answer equals the problem's, character by character, else 0. White space at
    the ends does not count, nor how signs and digits are spelled (`spelling.plain`). For the arguments see
    `answer_finder`.
    """
    find = answer_finder(answer_in, marker)

    def normal(answer: str) -> str:
        answer = plain(answer).strip()
        return answer.casefold() if ignore_case else answer

    def reward(problem: Problem, response: str) -> float:
        return float(vote(response) == normal(problem.answer))

    def vote(response: str) -> str | None:
        answer = find(response)
        return None if answer is None else normal(answer)

    reward.vote = vote
    return reward


def numeric(
    answer_in: str = "number", marker: str = "####", tolerance: float = 0.0, relative: float = 0.0
) -> TextReward:
    """Rewards 1 if the response's answer is the problem's number, else 0. "1,234.50", "1/2" and "50%" are
    numbers, in any spelling (`spelling.number`); "18 cm" is none, except where answer_in is "number", which
    leaves units out.

    Args:
      answer_in, marker: place of the answer; see `answer_finder`.
      tolerance: largest absolute error.
      relative: largest error, as a share of the right number.
    """
    find = answer_finder(answer_in, marker)
    for name, value in (("tolerance", tolerance), ("relative", relative)):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
            raise ValueError(f"args.{name}: should be a number of at least 0, not {value!r}")

    def reward(problem: Problem, response: str) -> float:
        answer, right = find(response), number(problem.answer)
        value = None if answer is None else number(answer)
        if right is None:
            raise ValueError(f"the answer {problem.answer[:60]!r} is not a number")
        return float(
            value is not None
            and abs(value - right) <= max(Fraction(tolerance), Fraction(relative) * abs(right))
        )

    def vote(response: str) -> str | None:
        answer = find(response)
        value = None if answer is None else number(answer)
        return answer if value is None else str(value)

    reward.vote = vote
    return reward


def length(target: int, limit: int) -> TextReward:
    """Rewards 1 up to `target` characters, 0 from `limit` on, and linearly less in between."""
    for name, value in (("target", target), ("limit", limit)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"args.{name}: should be a whole number of at least 0, not {value!r}")
    if limit <= target:
        raise ValueError(f"args.limit: {limit} should be more than args.target {target}")
    return lambda problem, response: min(1.0, max(0.0, (limit - len(response)) / (limit - target)))
