"""Which training problems come again: a curriculum by pass rates measured in the run.

A problem is skipped with a probability that follows from how often its last responses passed. Nothing is
learned from a problem that always passes or never does: with a baseline of the group its advantages are 0.

- `failures`: taken with probability 1 - s, for a pass rate of s (Kimi k1.5, arXiv 2501.12599, section 2.3.4,
  "prioritized sampling").
- `uncertain`: taken with probability 4 s (1 - s), the variance of passing (online difficulty filtering, arXiv
  2504.03380, in a soft form).

Both with a floor, so that every problem comes back. Whether a position is skipped is a pure function of
the seed, the position and the pass rates, which a checkpoint keeps: a resumed run takes the same problems.
"""

from collections.abc import Callable, Iterable, Mapping

from rljax.tasks.base import Problem, problem_random

_MEMORY = 4  # visits that a pass rate remembers: the policy changes

RULES: dict[str, Callable[[float], float]] = {
    "failures": lambda rate: 1.0 - rate,
    "uncertain": lambda rate: 4.0 * rate * (1.0 - rate),
}
"""Probability of asking a problem, by the rule's name, from its pass rate."""


class Curriculum:
    """Pass rates of a run's training problems.

    Args:
      rule: a key of `RULES`.
      floor: least probability of asking a problem.
    """

    def __init__(self, rule: str, floor: float, seed: int) -> None:
        self._rule, self._floor, self._seed = RULES[rule], floor, seed
        self._rates: dict[str, tuple[int, float]] = {}  # number of visits and pass rate, by the problem's id

    def asks(self, problem: Problem, position: int) -> bool:
        """Returns whether the problem at a position is taken. One that never was always is."""
        if problem.id not in self._rates:
            return True
        probability = max(self._rule(self._rates[problem.id][1]), self._floor)
        source = problem_random(self._seed, "train", position)
        source.random()  # the number that a mixture draws its task by
        return source.random() < probability

    def learn(self, passed: Iterable[tuple[Problem, float]]) -> dict[str, float]:
        """Updates pass rates.

        Args:
          passed: problems that were sampled, each with the share of its responses that passed, 0 to 1.

        Returns:
          The metrics `curriculum/known`, problems with a pass rate, and `curriculum/pass_rate`, their mean.
        """
        for problem, share in passed:
            visits, rate = self._rates.get(problem.id, (0, 0.0))
            rate += (min(max(share, 0.0), 1.0) - rate) / min(visits + 1, _MEMORY)
            self._rates[problem.id] = visits + 1, rate
        rates = [rate for _, rate in self._rates.values()]
        return {"curriculum/known": len(rates), "curriculum/pass_rate": sum(rates) / max(len(rates), 1)}

    def state(self) -> dict[str, list[float]]:
        """Returns the pass rates as JSON values."""
        return {name: [visits, rate] for name, (visits, rate) in self._rates.items()}

    def load_state(self, state: Mapping[str, Iterable[float]]) -> None:
        """Takes over pass rates from `state`."""
        self._rates = {name: (int(visits), float(rate)) for name, (visits, rate) in state.items()}
