"""Environments that are begun by `reset` and go on by `step`: Gymnasium's, and those of OpenEnv.

    task: {name: gymnasium, args: {environment: "my_module:make_environment", system: "Answer up or down."}}

Every episode has an environment of its own, made by a call of the user's function. The number of a problem
is the seed of its `reset`, whose observation is the policy's first prompt. So `reset` with the same seed must
give the same observation, which is checked.
"""

import abc
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from rljax.environments.base import Step
from rljax.errors import ConfigError
from rljax.importing import called, load
from rljax.tasks.base import Problem, Split, is_heldout, problem_random

_SEEDS = 2**31
_TRIED = 1000
_FIELDS = ("text", "prompt", "message", "content", "result")  # of observations that hold a text


class _Taken(NamedTuple):
    """A step of the wrapped environment."""

    observation: Any
    reward: float
    done: bool


class Seeded(abc.ABC):
    """Base of these adapters. The arguments are those of `task.args` in a config.

    Args:
      environment: `module:name` of a class or function that makes an environment; or the class or function.
      system: system message of every episode; "" for none.
      action: `module:name` of a class or function that makes an action of a text, and raises a ValueError for
        a text that is none; None for what the environment says of itself.
      observation: name of the observation's field that is its text; None for the observation itself, if it is
        a text, else the first of `text`, `prompt`, `message`, `content` and `result` that it has.
      mistake: what the policy reads after a text that is no action.
      mistake_reward: the reward of such a turn.
    """

    def __init__(
        self,
        seed: int,
        environment: str | Callable[..., Any],
        args: Mapping[str, Any] | None = None,
        system: str = "",
        action: str | Callable[[str], Any] | None = None,
        observation: str | None = None,
        mistake: str = "This is not an action.",
        mistake_reward: float = 0.0,
    ) -> None:
        self.seed, self._system, self._field = seed, system, observation
        self._mistake, self._mistake_reward = mistake, float(mistake_reward)
        self._path, self._args = environment, dict(args or {})
        self._factory = load(environment, "args.environment") if isinstance(environment, str) else environment
        self._action = load(action, "args.action") if isinstance(action, str) else action
        first = self._made()
        for method in ("reset", "step"):
            if not callable(getattr(first, method, None)):
                raise ConfigError(
                    f"args.environment: {environment}: {type(first).__name__} has no method {method}"
                )
        _close(first)

    def problem(self, split: Split, index: int) -> Problem:
        """Returns problem `index` of a split: the first observation of an environment with a seed of its own;
        see `Task.problem`. Whether it is held out follows from the seed.
        """
        source = problem_random(self.seed, split, index)
        number = next(
            number
            for number in (int(source.random() * _SEEDS) for _ in range(_TRIED))
            if is_heldout(str(number)) == (split == "heldout")
        )
        environment = self._made()
        text = self._text(self._reset(environment, number))
        _close(environment)
        system = ({"role": "system", "content": self._system},) if self._system else ()
        return Problem(
            id=f"{split}/{index}",
            messages=(*system, {"role": "user", "content": text}),
            answer="",
            difficulty=0,
            data={"seed": number},
        )

    def reset(self, problem: Problem) -> Any:
        """Begins an episode; its state is the wrapped environment."""
        environment = self._made()
        text = self._text(self._reset(environment, problem.data["seed"]))
        if text != problem.messages[-1]["content"]:
            raise ValueError(
                "reset gives another observation for the same seed, so its episodes cannot be repeated"
            )
        return environment

    def step(self, action: str, state: Any) -> Step:
        """Takes a turn of the policy."""
        try:
            made = self._made_action(action, state)
        except ValueError:
            return Step(self._mistake, self._mistake_reward)
        taken = self._taken(state.step(made))
        return Step("" if taken.done else self._text(taken.observation), taken.reward, taken.done)

    @abc.abstractmethod
    def _reset(self, environment: Any, seed: int) -> Any:
        """Resets the wrapped environment; returns its observation."""

    @abc.abstractmethod
    def _taken(self, result: Any) -> _Taken:
        """Returns what the wrapped environment's step returned."""

    def _made_action(self, text: str, environment: Any) -> Any:
        return text.strip() if self._action is None else self._action(text)

    def _made(self) -> Any:
        return called(self._factory, self._args, str(self._path), "args.environment")

    def _text(self, observation: Any) -> str:
        value = observation
        if self._field is not None:
            value = _field(observation, self._field)
        elif not isinstance(observation, str):
            fields = (_field(observation, name) for name in _FIELDS)
            value = next((field for field in fields if isinstance(field, str)), None)
        if not isinstance(value, str):
            raise TypeError(
                f"the observation {str(observation)[:80]!r} is no text; name the field that is one with"
                " task.args.observation"
            )
        return value


class Gymnasium(Seeded):
    """Environments with Gymnasium's interface: `reset(seed=...) -> (observation, info)` and `step(action) ->
    (observation, reward, terminated, truncated, info)`. Observations are texts. An action is the policy's
    text; where `action_space` is discrete, the whole number that it is. Arguments as for `Seeded`.
    """

    def _reset(self, environment: Any, seed: int) -> Any:
        observation, _ = environment.reset(seed=seed)
        return observation

    def _taken(self, result: Any) -> _Taken:
        observation, reward, terminated, truncated, _ = result
        return _Taken(observation, float(reward), bool(terminated or truncated))

    def _made_action(self, text: str, environment: Any) -> Any:
        count = getattr(getattr(environment, "action_space", None), "n", None)
        if self._action is not None or count is None:
            return super()._made_action(text, environment)
        start = int(getattr(environment.action_space, "start", 0))
        number = int(text)
        if not start <= number < start + int(count):
            raise ValueError(f"no action {number}")
        return number


class OpenEnv(Seeded):
    """Environments of OpenEnv: `reset()` and `step(action)` return a result with `observation`, `reward` and
    `done` (a client's `StepResult`), or an observation with `reward` and `done` (an environment inside its
    server). `reset` gets `seed` where it takes one. The actions of OpenEnv are objects: `action` names their
    class, or a function that makes one of a text. Arguments as for `Seeded`.
    """

    def _reset(self, environment: Any, seed: int) -> Any:
        parameters = inspect.signature(environment.reset).parameters
        takes = "seed" in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        return self._taken(environment.reset(seed=seed) if takes else environment.reset()).observation

    def _taken(self, result: Any) -> _Taken:
        observation = _field(result, "observation")
        reward = _field(result, "reward")
        done = bool(_field(result, "done"))
        return _Taken(result if observation is None else observation, float(reward or 0.0), done)


def _field(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)


def _close(environment: Any) -> None:
    close = getattr(environment, "close", None)
    if callable(close):
        close()
