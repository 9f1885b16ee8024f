"""Several tasks in one, by weights that may change along the run: a mixture, or a curriculum.

The task of a position is drawn from (seed, split, position) and the weights there. A task's problems come in
order, none left out: the index of its next problem is the number of times that the task was drawn before. The
count starts with the run, so it is a function of the position too, and a resumed run continues with the same
problem.
"""

import array
import dataclasses
from collections.abc import Sequence

from rljax.config import MixtureConfig
from rljax.tasks.answers import extracted_answer
from rljax.tasks.base import Problem, Rewards, Split, Task, problem_random
from rljax.tasks.judging import Answered, judge
from rljax.tasks.wrapper import Wrapper


class Mixture(Wrapper):
    """The task. Weights of the training split follow the schedules; `heldout` and `warm_start` take the tasks
    in equal shares, so that every evaluation has the same problems.

    Args:
      parts: the tasks, each with its weights.
    """

    def __init__(self, seed: int, parts: Sequence[tuple[MixtureConfig, Task]]) -> None:
        super().__init__(*(task for _, task in parts))
        self.seed = seed
        self._configs = [config for config, _ in parts]
        self._tasks = {config.prefix: task for config, task in parts}
        self._drawn = array.array("H")  # number of the task at every training position so far
        self._before = array.array("Q")  # how often this task had been drawn before
        self._counts = [0] * len(parts)

    def problem(self, split: Split, index: int) -> Problem:
        """Returns problem `index` of a split; see `Task.problem`. Its id begins with its task's label."""
        if split == "train":
            number, inner = self._training_place(index)
        else:
            number, inner = index % len(self._configs), index // len(self._configs)
        prefix = self._configs[number].prefix
        problem = self._tasks[prefix].problem(split, inner)
        return dataclasses.replace(problem, id=f"{prefix}/{problem.id}")

    def rewards(self, answered: Sequence[Answered]) -> list[Rewards]:
        """Returns the rewards of many responses, in one call per task. Parts differ from task to task."""
        scored: list[Rewards] = [{}] * len(answered)
        for prefix, task in self._tasks.items():
            places = [i for i, (problem, _) in enumerate(answered) if problem.id.startswith(f"{prefix}/")]
            inner = [(_without(prefix, answered[i][0]), answered[i][1]) for i in places]
            for i, reward in zip(places, judge(task, inner) if inner else [], strict=True):
                scored[i] = reward
        return scored

    def extracted_answer(self, problem: Problem, response_text: str) -> str | None:
        """Extracts the answer as the problem's task does; see `rljax/tasks/answers.py`."""
        prefix = next(prefix for prefix in self._tasks if problem.id.startswith(f"{prefix}/"))
        return extracted_answer(self._tasks[prefix], _without(prefix, problem), response_text)

    def _training_place(self, index: int) -> tuple[int, int]:
        problem_random(self.seed, "train", index)  # raises an error for a negative index
        for position in range(len(self._drawn), index + 1):
            weights = [config.weight_at(position) for config in self._configs]
            left = problem_random(self.seed, "train", position).random() * sum(weights)
            number = max(i for i, weight in enumerate(weights) if weight > 0)  # if rounding skips all tasks
            for i, weight in enumerate(weights):
                left -= weight
                if left < 0:
                    number = i
                    break
            self._drawn.append(number)
            self._before.append(self._counts[number])
            self._counts[number] += 1
        return self._drawn[index], self._before[index]


def _without(prefix: str, problem: Problem) -> Problem:
    return dataclasses.replace(problem, id=problem.id.removeprefix(f"{prefix}/"))
