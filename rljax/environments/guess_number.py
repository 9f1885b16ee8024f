"""Guess a number from hints: an environment of a few turns, for a policy made from scratch.

    user       guess 23-38
    assistant  31
    user       higher
    assistant  34
    user       lower
    assistant  33                  (found: the episode ends)

A guess in the middle of what is left halves it. The warm start demonstrates guesses anywhere in what is left,
which find one of eight to sixteen numbers within four turns in about seven of ten episodes; guesses in the
middle do in nearly all. RL has to discover that.
"""

import dataclasses
import re
from collections.abc import Iterator

from rljax.environments.base import Step
from rljax.tasks.arguments import checked
from rljax.tasks.base import Problem, Split, is_heldout, problem_random

_GUESS = re.compile(r"[0-9]{1,4}")
_LARGEST = 99
_DEMONSTRATIONS = 2**32  # no problem has so high an index


@dataclasses.dataclass
class _State:
    """What the hints leave, and the guesses that did not follow them."""

    secret: int
    low: int
    high: int
    wasted: int = 0


class GuessNumber:
    """The environment. Its arguments are those of `task.args` in a config.

    Args:
      numbers: how many numbers the secret may be, at most, from 2 to 64; at least half as many.
      penalty: what a guess costs that is no number, or that the hints have excluded; from 0 to 1.
      demonstrated_middles: share of the demonstrations of the warm start that always guess the middle.
      demonstrated_mistakes: share of their guesses that ignore the hints.
    """

    def __init__(
        self,
        seed: int,
        numbers: int = 16,
        penalty: float = 0.1,
        demonstrated_middles: float = 0.0,
        demonstrated_mistakes: float = 0.1,
    ) -> None:
        self.seed = seed
        self.numbers = checked("numbers", numbers, int, 2, 64)
        self.penalty = checked("penalty", penalty, float, 0.0, 1.0)
        self.demonstrated_middles = checked("demonstrated_middles", demonstrated_middles, float, 0.0, 1.0)
        self.demonstrated_mistakes = checked("demonstrated_mistakes", demonstrated_mistakes, float, 0.0, 1.0)

    def problem(self, split: Split, index: int) -> Problem:
        """Returns problem `index` of a split; see `Task.problem`. The secret is its answer."""
        source = problem_random(self.seed, split, index)
        while True:
            numbers = self.numbers - int(source.random() * (self.numbers // 2 + 1))
            low = int(source.random() * (_LARGEST + 2 - numbers))
            high = low + numbers - 1
            prompt = f"guess {low}-{high}"
            if is_heldout(prompt) == (split == "heldout"):
                break
        secret = low + int(source.random() * numbers)
        return Problem(
            id=f"{split}/{index}",
            messages=({"role": "user", "content": prompt},),
            answer=str(secret),
            difficulty=0,
            data={"low": low, "high": high},
        )

    def reset(self, problem: Problem) -> _State:
        """Begins an episode."""
        return _State(int(problem.answer), problem.data["low"], problem.data["high"])

    def step(self, action: str, state: _State) -> Step:
        """Takes a guess. `reward`: 1 where it is right, less the penalty where it is none that the hints
        allow. `info`: "solved" and "wasted", the number of guesses with a penalty so far.
        """
        guess = int(action) if _GUESS.fullmatch(action) else None
        if guess == state.secret:
            return Step(reward=1.0, done=True, info={"solved": 1.0, "wasted": float(state.wasted)})
        allowed = guess is not None and state.low <= guess <= state.high
        state.wasted += not allowed
        hint = "number?" if guess is None else "higher" if guess < state.secret else "lower"
        if allowed and guess < state.secret:
            state.low = guess + 1
        elif allowed:
            state.high = guess - 1
        info = {"solved": 0.0, "wasted": float(state.wasted)}
        return Step(hint, 0.0 if allowed else -self.penalty, info=info)

    def demonstration(self, problem: Problem) -> Iterator[str]:
        """Yields guesses up to the right one."""
        # Not the numbers that the problem was drawn with: guesses must know nothing of the secret.
        number = _DEMONSTRATIONS + int(problem.id.rpartition("/")[2])
        source = problem_random(self.seed, "warm_start", number)
        state, middles = self.reset(problem), source.random() < self.demonstrated_middles
        done = False
        while not done:
            low, high = state.low, state.high
            if not middles and source.random() < self.demonstrated_mistakes:
                low, high = problem.data["low"], problem.data["high"]
            guess = (low + high) // 2 if middles else low + int(source.random() * (high + 1 - low))
            yield str(guess)
            done = self.step(str(guess), state).done
