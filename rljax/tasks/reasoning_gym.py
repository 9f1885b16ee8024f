"""The environments of reasoning-gym by name (arXiv 2505.24760): `task.name: reasoning_gym`."""

import inspect
import json
from collections.abc import Mapping
from typing import Any

from rljax.errors import ConfigError, known_names
from rljax.tasks.base import Problem, Split, is_heldout, problem_random
from rljax.tasks.rewards.registry import require_package

_NUM_PROBLEMS = 2**31 - 1  # of an environment; each problem is a function of its number
_SYSTEM = (
    "Think about the problem step by step. Then give the final answer, and nothing else, between <{tag}> and"
    " </{tag}>."
)


class ReasoningGym:
    """The task: procedural problems, scored by their environment.

    Args:
      seed: the run seed, also of the environment.
      environment: name of the environment, e.g. "leg_counting".
      config: settings of the environment, by name, such as its difficulty.
      system: system message; null for one that asks for the answer between tags, "" for none.
      tag: name of the tag around the answer.
    """

    def __init__(
        self,
        seed: int,
        environment: str,
        config: Mapping[str, Any] | None = None,
        system: str | None = None,
        tag: str = "answer",
    ) -> None:
        require_package(("reasoning_gym", "reasoning-gym"), "task.name: reasoning_gym")
        import reasoning_gym
        from reasoning_gym.factory import DATASETS

        if environment not in DATASETS:
            known = known_names(str(environment), DATASETS)
            raise ConfigError(f"task.args.environment: unknown environment {environment!r}; {known}")
        if not isinstance(tag, str) or not tag.isidentifier():
            raise ConfigError(f"task.args.tag: should be a name, not {tag!r}")
        if not isinstance(config, (dict, type(None))):
            raise ConfigError(f"task.args.config: should be a section of keys, not {config!r}")
        known = [name for name in inspect.signature(DATASETS[environment][1]).parameters if name != "seed"]
        for name in config or {}:
            if name not in known:
                raise ConfigError(
                    f"task.args.config.{name}: {environment} has no such setting; {known_names(name, known)}"
                )
        settings = {"size": _NUM_PROBLEMS, **(config or {}), "seed": seed}
        try:
            self._environment = reasoning_gym.create_dataset(environment, **settings)
            self._environment[0]
        except Exception as error:  # 100 environments check their settings and raise many types
            raise ConfigError(
                f"task.args.config: {environment} refuses {json.dumps(settings)}: {error!r}"
            ) from error
        self.seed = seed
        self._size = settings["size"]
        self._system = _SYSTEM.format(tag=tag) if system is None else system
        self.checker = ("reasoning_gym", {"dataset": environment, "config": settings, "tag": tag})

    def problem(self, split: Split, index: int) -> Problem:
        """Returns problem `index` of a split; see `Task.problem`."""
        source = problem_random(self.seed, split, index)
        for _ in range(1000):
            number = int(source.random() * self._size)
            entry = self._environment[number]
            if is_heldout(entry["question"]) == (split == "heldout"):
                break
        else:
            raise ConfigError("task.args.config: too few different problems for a held-out split")
        system = ({"role": "system", "content": self._system},) if self._system else ()
        return Problem(
            id=f"{split}/{index}",
            messages=(*system, {"role": "user", "content": entry["question"]}),
            answer=str(entry["answer"]),
            difficulty=0,
            data={"item": number},
        )

    def reward(self, problem: Problem, response_text: str) -> dict[str, float]:
        """Raises an error: several environments evaluate answers as Python, so the sandbox runs `checker`."""
        raise NotImplementedError("a checker scores; see rljax/tasks/rewards/combined.py")
