"""Chain arithmetic in words: the same chains, each step worded in one of many ways.

    prompt    47a5b8c9=
    solution  then a5+47=52; b8 to 52 is 60, hm. now c9+60=69? again a5+47=52; ... #69

In `chain_arithmetic` steps have one form, so a policy's entropy is close to 0. A reasoning model's is not,
and the benefit of speculation depends on it. Here the entropy is about that of reasoning models, 0.3 nats a
token:

- *Wordings.* A step begins with one of seven openers and has one of three forms. Their frequencies are like
  those of words: a few are common, most are rare. The name of the term still comes before its total, which
  keeps a step easy to learn (`chain_arithmetic` says why).
- *Digressions.* A remark without content follows some steps, as in the output of reasoning models.
- *More rechecks.* Only `max_steps` limits the rounds through a chain, not the longest chain, so the longest
  response is more than five times as long as three quarters of all responses.

Slips, answers and rewards are as in `chain_arithmetic`.
"""

import itertools
import re
from collections.abc import Sequence
from random import Random

from rljax.tasks.arguments import checked
from rljax.tasks.chain_arithmetic import (
    ANSWER_MARKER,
    RECHECK_MARKER,
    SLIPS,
    TERM_NAMES,
    ChainArithmetic,
    total_text,
)

OPENERS = {"": 0.34, " then": 0.22, " now": 0.15, " next": 0.11, " add": 0.08, " take": 0.06, " so": 0.04}
FORMS = {
    " {name}{term}+{total}={result}": 0.62,
    " {name}{term} to {total} is {result}": 0.24,
    " {name}{term} on {total} makes {result}": 0.14,
}
SEPARATORS = {";": 0.7, ",": 0.2, ".": 0.1}
DIGRESSIONS = {
    " hm.": 0.3,
    " let me see.": 0.2,
    " wait, that is right.": 0.15,
    " good so far.": 0.12,
    " this is easy.": 0.1,
    " i keep the total in mind.": 0.08,
    " let me go on with the next one.": 0.05,
}
"""Texts with their rates in demonstrations; the rates sum to 1."""

# The marker is outside the first class, so matching takes linear time on any text.
_WELL_FORMED = re.compile(r"[0-9A-Za-z+=?;,. ]*#[0-9]{2}")


class WordedArithmetic(ChainArithmetic):
    """The task. Its arguments are those of `task.args` in a config.

    Args:
      max_terms, tail_exponent, max_number, demonstration_noise, format_weight: see `ChainArithmetic`.
      rechecks: probability that a `warm_start` solution goes through its chain once more after each round,
        from 0 to 0.95.
      max_steps: most steps of a solution over all its rounds, of about 10 tokens each; at least
        `max_terms` - 1.
      digressions: probability of a remark after a step of a `warm_start` solution, from 0 to 1.
    """

    well_formed = _WELL_FORMED

    def __init__(
        self,
        seed: int,
        max_terms: int = 46,
        tail_exponent: float = 1.6,
        max_number: int = 9,
        demonstration_noise: float = 0.05,
        rechecks: float = 0.6,
        format_weight: float = 0.1,
        max_steps: int = 110,
        digressions: float = 0.08,
    ):
        super().__init__(
            seed, max_terms, tail_exponent, max_number, demonstration_noise, rechecks, format_weight
        )
        self.max_steps = checked("max_steps", max_steps, int, self.max_terms - 1, 10_000)
        self.digressions = checked("digressions", digressions, float, 0.0, 1.0)

    def _solution(self, first: int, terms: Sequence[int], source: Random, imperfect: bool) -> str:
        """Writes rounds of worded steps, then the marker and the last total. Without `imperfect`, a solution
        has one round, no slips or digressions, and the most common wording.
        """
        rounds, most = [], self.max_steps // len(terms) if imperfect and self.rechecks else 1
        while True:
            steps, total = self._steps(first, terms, source, imperfect)
            rounds.append(steps)
            if len(rounds) >= most or source.random() >= self.rechecks:
                return f"{RECHECK_MARKER} again".join(rounds) + f" {ANSWER_MARKER}" + total_text(total)

    def _steps(self, first: int, terms: Sequence[int], source: Random, imperfect: bool) -> tuple[str, int]:
        total, steps = first, []
        for name, term in zip(TERM_NAMES, terms, strict=False):
            result = total + term
            if imperfect and source.random() < self.demonstration_noise:
                result += SLIPS[int(source.random() * len(SLIPS))]
            choose = (lambda texts: _drawn(texts, source)) if imperfect else _most_common
            form = choose(FORMS).format(
                name=name, term=self._term_text(term), total=total_text(total), result=total_text(result)
            )
            remark = ""
            if imperfect and source.random() < self.digressions:
                remark = _drawn(DIGRESSIONS, source)
            steps.append(choose(OPENERS) + form + choose(SEPARATORS) + remark)
            total = result
        return "".join(steps), total


def _drawn(texts: dict[str, float], source: Random) -> str:
    """Returns a text with the probability of its rate. Consumes one random number."""
    point = source.random()
    for text, bound in zip(texts, itertools.accumulate(texts.values()), strict=True):
        if point < bound:
            return text
    return next(reversed(texts))  # rounding may leave the sum of the rates just below 1


def _most_common(texts: dict[str, float]) -> str:
    return max(texts, key=texts.__getitem__)
