"""The protocol of environments: problems that take several turns.

problem = environment.problem("train", 0)    # problem.messages is what the policy reads first
state = environment.reset(problem)           # an episode begins
step = environment.step("17", state)         # the policy's turn, and what it gets for it
step.observation                             # "higher": what the policy reads next
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rljax.tasks.base import Problem, Split


@dataclass(frozen=True)
class Step:
    """What an environment makes of a turn of the policy.

    Attributes:
      observation: what the policy reads next: the text of a user's turn, or messages in the form of chat
        templates. Not read where `done` is True.
      reward: reward of this turn; the rewards of an episode are summed. An environment that scores at the end
        only leaves the others at 0.
      done: whether the episode has ended.
      info: numbers for metrics, by name (`reward/NAME`); of each name the last one of an episode counts.
    """

    observation: str | Sequence[Mapping[str, str]] = ""
    reward: float = 0.0
    done: bool = False
    info: Mapping[str, float] = field(default_factory=dict)


class Environment(Protocol):
    """A source of problems that take several turns, and their judge.

    An episode is a function of the problem and the policy's turns alone: the same turns get the same answers.
    Where a worker process was lost, an episode is played again up to its last turn.

    Turns are model output: an environment never evaluates them in its process, and a turn that makes no sense
    is answered like any other, by an observation that says so and a reward. An exception is a mistake of the
    environment, and stops the run.

    An environment may also have:
      demonstration(problem): the policy's turns of a solution, a sequence of texts, for the warm start.
      cut_off(state): reward (a `Step`, of which `reward` and `info` count) of an episode that is ended by
        `environment.max_turns`, on top of that of its turns.
      size: number of training problems, where these come back.
      fingerprint(): see `rljax.tasks.base.Task`.
    """

    def problem(self, split: Split, index: int) -> Problem:
        """Returns problem `index` of a split, the same one at every call; see `Task.problem`."""
        ...

    def reset(self, problem: Problem) -> Any:
        """Begins an episode; returns its state, which only this environment looks into. A state with a method
        `close` is closed when the episode has ended.
        """
        ...

    def step(self, action: str, state: Any) -> Step:
        """Takes a turn of the policy.

        Args:
          action: its text, without special tokens; a stop string that ended the turn is part of it.
          state: state of the episode, which the step may change.
        """
        ...
