"""Arithmetic that is too hard for a small policy alone: a task for the calculator (docs/tools.md).

    prompt    347*862-95=
    solution  <calculator>347*862-95</calculator><result>299019</result>#299019

Copying an expression into a call, and a number out of an answer, is easy; products of two numbers of three
digits are hard without intermediate steps. In the warm start only a share `demonstrated_calls` of the
solutions calls the calculator; the others guess. RL has to discover that calling pays.

Solutions use the default markers of the config's section `tools`.
"""

import re
from random import Random

from rljax.tasks.arguments import checked
from rljax.tasks.base import Problem, Split, is_heldout, problem_random

ANSWER_MARKER = "#"
CALL = ("<calculator>", "</calculator>")
ANSWER = ("<result>", "</result>")

_INTEGER = re.compile(r"-?[0-9]{1,100}")


class ToolArithmetic:
    """The task. Its arguments are those of `task.args` in a config.

    Args:
      numbers: most numbers in an expression, from 2 to 6; every expression has at least two.
      digits: largest number of digits of a number, from 1 to 6.
      demonstrated_calls: share of `warm_start` solutions that call the calculator.
    """

    def __init__(self, seed: int, numbers: int = 3, digits: int = 3, demonstrated_calls: float = 0.3):
        self.seed = seed
        self.numbers = checked("numbers", numbers, int, 2, 6)
        self.digits = checked("digits", digits, int, 1, 6)
        self.demonstrated_calls = checked("demonstrated_calls", demonstrated_calls, float, 0.0, 1.0)

    def problem(self, split: Split, index: int) -> Problem:
        """Returns problem `index` of a split; see `Task.problem`."""
        source = problem_random(self.seed, split, index)
        while True:
            terms = [self._number(source) for _ in range(2 + int(source.random() * (self.numbers - 1)))]
            operations = ["+-*"[int(source.random() * 3)] for _ in terms[1:]]
            expression = str(terms[0]) + "".join(
                f"{operation}{term}" for operation, term in zip(operations, terms[1:], strict=True)
            )
            prompt = expression + "="
            if is_heldout(prompt) == (split == "heldout"):
                break
        value = _value(terms, operations)
        calls = split != "warm_start" or source.random() < self.demonstrated_calls
        return Problem(
            id=f"{split}/{index}",
            messages=({"role": "user", "content": prompt},),
            answer=str(value),
            difficulty=len(terms),
            solution=_called(expression, value) if calls else _guessed(value, source),
        )

    def reward(self, problem: Problem, response_text: str) -> dict[str, float]:
        """Scores a response by what follows its last marker.

        Returns:
          "reward": 1 if the answer and nothing else follows the marker, else 0; "called": 1 if a call was
          completed, else 0.
        """
        _, marker, tail = response_text.rstrip().rpartition(ANSWER_MARKER)
        correct = bool(marker) and _INTEGER.fullmatch(tail) is not None and int(tail) == int(problem.answer)
        return {"reward": float(correct), "called": float(CALL[1] in response_text)}

    def _number(self, source: Random) -> int:
        return int(source.random() * 10 ** (1 + int(source.random() * self.digits)))


def _value(terms: list[int], operations: list[str]) -> int:
    """Evaluates an expression, products before sums."""
    total, product, sign = 0, terms[0], 1
    for operation, term in zip(operations, terms[1:], strict=True):
        if operation == "*":
            product *= term
        else:
            total, product, sign = total + sign * product, term, 1 if operation == "+" else -1
    return total + sign * product


def _called(expression: str, value: int) -> str:
    return f"{CALL[0]}{expression}{CALL[1]}{ANSWER[0]}{value}{ANSWER[1]}{ANSWER_MARKER}{value}"


def _guessed(value: int, source: Random) -> str:
    """Returns a solution without a call: random digits, as many as the answer has."""
    digits = "".join(str(int(source.random() * 10)) for _ in str(abs(value)))
    return ANSWER_MARKER + ("-" if value < 0 else "") + digits
