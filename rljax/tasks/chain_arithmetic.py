"""Chains of additions modulo 100, solved one named term at a time.

The quickstart's task: a transformer of two million parameters learns it on a CPU in minutes. The prompt is a
first total and a chain of terms, each named by a letter; the worked solution adds them one by one, and `#`
marks the answer:

    prompt    47a5b8c9=
    solution  a5+47=52b8+52=60c9+60=69#69

Why this form:

- *Every term has a name.* A step begins with the name of its term. The name occurs once in the prompt, with
  the term right after it, so finding the term is one lookup, the first skill that attention learns; counting
  to the k-th place is not needed.
- *A step restates the total.* All other inputs of a step are a few tokens back, at fixed distances.
- *Totals wrap around at 100* and are zero-padded, so every step has the same width, and a wrong total is as
  good a start for the next step as a right one.
- *A long tail.* The number of terms is drawn from a power law cut at `max_terms`, so most solutions are short
  and a few are many times longer, as in RL on reasoning models.
- *Lengths that differ within a group.* Without rechecks, all samples of a chain are equally long. With
  `rechecks`, a demonstration that has reached the end may go through its chain again, after a `?`, and again,
  as reasoning models check themselves: the policy samples the number of rounds. The last round's answer
  counts.

      solution  a5+47=52b8+52=60c9+60=69?a5+47=52b8+52=60c9+60=69#69

The warm start's demonstrations are imperfect, as cold-start data is: a fraction `demonstration_noise` of
their steps contains a slip, which carries over into the answer. A policy trained on them slips as often when
it samples, though its most likely token is right. RL with a verifiable reward then removes these slips.
"""

import bisect
import itertools
import re
import string
from collections.abc import Sequence
from random import Random

from rljax.tasks.arguments import checked
from rljax.tasks.base import Problem, Split, is_heldout, problem_random

MODULUS = 100
TERM_NAMES = string.ascii_letters
ANSWER_MARKER = "#"
RECHECK_MARKER = "?"
SLIPS = (1, -1, 10, -10)
"""Errors that a slip adds to the result of a step: a miscounted unit or a mishandled carry."""

# The marker is outside the first class, so matching takes linear time on any text.
_WELL_FORMED = re.compile(r"[0-9A-Za-z+=?]*#[0-9]{2}")
_ANSWER = re.compile(r"[0-9]{1,2}")


class ChainArithmetic:
    """The task. Its arguments are those of `task.args` in a config.

    Args:
      max_terms: most numbers in a chain, the first total included, from 2 to 53 (52 letters name the others).
      tail_exponent: the count of numbers n, from 2 on, has probability proportional to n ** -tail_exponent. 0
        is uniform; larger means fewer long chains.
      max_number: the largest term after the first, from 1 to 99 (the first is a total, 0 to 99). Terms above
        9 cost two tokens.
      demonstration_noise: fraction of the steps of a `warm_start` solution that contain a slip.
      rechecks: probability that a `warm_start` solution goes through its chain once more after each round,
        from 0 to 0.95. No solution gets more steps than the longest chain has.
      format_weight: share of the reward given for a well-formed response, right or wrong; the answer earns
        the rest.

    Attributes:
      well_formed: pattern of a response in the right format.
    """

    well_formed = _WELL_FORMED

    def __init__(
        self,
        seed: int,
        max_terms: int = 46,
        tail_exponent: float = 1.6,
        max_number: int = 9,
        demonstration_noise: float = 0.18,
        rechecks: float = 0.0,
        format_weight: float = 0.1,
    ):
        self.seed = seed
        self.max_terms = checked("max_terms", max_terms, int, 2, 1 + len(TERM_NAMES))
        self.tail_exponent = checked("tail_exponent", tail_exponent, float, 0.0, 10.0)
        self.max_number = checked("max_number", max_number, int, 1, MODULUS - 1)
        self.demonstration_noise = checked("demonstration_noise", demonstration_noise, float, 0.0, 1.0)
        self.rechecks = checked("rechecks", rechecks, float, 0.0, 0.95)
        self.format_weight = checked("format_weight", format_weight, float, 0.0, 1.0)
        self._cumulative = list(
            itertools.accumulate(n**-self.tail_exponent for n in range(2, self.max_terms + 1))
        )
        self._term_width = len(str(self.max_number))

    def problem(self, split: Split, index: int) -> Problem:
        """Returns problem `index` of a split; see `Task.problem`."""
        source = problem_random(self.seed, split, index)
        num_terms = 2 + bisect.bisect_left(self._cumulative, source.random() * self._cumulative[-1])
        # The length is drawn before the terms, so that both splits have the same distribution of lengths.
        while True:
            first = int(source.random() * MODULUS)
            terms = [1 + int(source.random() * self.max_number) for _ in range(num_terms - 1)]
            prompt = self._prompt(first, terms)
            if is_heldout(prompt) == (split == "heldout"):
                break
        return Problem(
            id=f"{split}/{index}",
            messages=({"role": "user", "content": prompt},),
            answer=total_text(first + sum(terms)),
            difficulty=num_terms,
            solution=self._solution(first, terms, source, imperfect=split == "warm_start"),
        )

    def reward(self, problem: Problem, response_text: str) -> dict[str, float]:
        """Scores a response by what follows its last marker.

        Returns:
          "correct": 1 if the answer and nothing else follows the marker, else 0; "format": 1 if the response
          consists of steps, one marker and two digits, else 0; "reward": (1 - format_weight) * correct +
          format_weight * format.
        """
        text = response_text.rstrip()
        correct = self.extracted_answer(problem, text) == problem.answer
        well_formed = self.well_formed.fullmatch(text) is not None
        reward = (1.0 - self.format_weight) * correct + self.format_weight * well_formed
        return {"reward": reward, "correct": float(correct), "format": float(well_formed)}

    def extracted_answer(self, problem: Problem, response_text: str) -> str | None:
        """Returns the one or two digits after the last marker, as two; None if anything else follows it."""
        _, marker, tail = response_text.rstrip().rpartition(ANSWER_MARKER)
        return f"{int(tail):02d}" if marker and _ANSWER.fullmatch(tail) else None

    def _prompt(self, first: int, terms: Sequence[int]) -> str:
        named = (f"{name}{self._term_text(term)}" for name, term in zip(TERM_NAMES, terms, strict=False))
        return total_text(first) + "".join(named) + "="

    def _solution(self, first: int, terms: Sequence[int], source: Random, imperfect: bool) -> str:
        """Writes one step per term, round after round, then the marker and the last total. An imperfect
        solution contains slips and further rounds at the rates of the task.
        """
        rounds, most = [], (self.max_terms - 1) // len(terms) if imperfect and self.rechecks else 1
        while True:
            steps, total = self._steps(first, terms, source, self.demonstration_noise if imperfect else 0.0)
            rounds.append(steps)
            if len(rounds) >= most or source.random() >= self.rechecks:
                return RECHECK_MARKER.join(rounds) + ANSWER_MARKER + total_text(total)

    def _steps(self, first: int, terms: Sequence[int], source: Random, noise: float) -> tuple[str, int]:
        """Returns the steps of a chain, with slips at the rate `noise`, and the last total."""
        total, steps = first, []
        for name, term in zip(TERM_NAMES, terms, strict=False):
            result = total + term
            if source.random() < noise:
                result += SLIPS[int(source.random() * len(SLIPS))]
            steps.append(f"{name}{self._term_text(term)}+{total_text(total)}={total_text(result)}")
            total = result
        return "".join(steps), total

    def _term_text(self, term: int) -> str:
        return f"{term:0{self._term_width}d}"


def total_text(total: int) -> str:
    """Returns a total as two digits."""
    return f"{total % MODULUS:02d}"
