"""Rewards by name, with the place where each runs and its arguments."""

import dataclasses
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal

from rljax.config import RewardConfig
from rljax.errors import ConfigError, known_names
from rljax.tasks.rewards import checkers, endpoints, text

Place = Literal["here", "worker", "sandbox", "tests", "endpoint", "task"]
"""Where a reward is computed: in the training process; in a worker; in a worker within the sandbox; as unit
tests, with one sandbox per response; by a server; or by the task."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """A registered reward.

    Attributes:
      place: place where it is computed.
      factory: makes the reward from its arguments; its signature names them.
      package: the package that it imports, and the extra that installs this package.
    """

    place: Place
    factory: Callable[..., Any]
    package: tuple[str, str] | None = None


@dataclasses.dataclass(frozen=True)
class CodeReward:
    """Unit tests; see `code`."""

    tests: str
    seconds: float
    partial: bool


def code(tests: str = "tests", seconds: float = 2.0, partial: bool = False) -> CodeReward:
    """Rewards 1 if the code in the response's last fenced block passes all tests of the problem, else 0.

    Args:
      tests: column of the dataset with the tests; `rljax/sandbox/code_tests.py` describes their forms.
      seconds: time limit of one test; `task.reward_timeout` bounds the whole set.
      partial: reward the share of tests that pass, instead of all or nothing.
    """
    if not isinstance(tests, str) or not tests:
        raise ValueError(f"args.tests: should be the name of a column, not {tests!r}")
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < float("inf"):
        raise ValueError(f"args.seconds: should be a number above 0, not {seconds!r}")
    if not isinstance(partial, bool):
        raise ValueError(f"args.partial: should be true or false, not {partial!r}")
    return CodeReward(tests, float(seconds), partial)


def _task() -> None:
    """Stands for the task's reward, which has no arguments."""


REWARDS: dict[str, Kind] = {
    "exact": Kind("here", text.exact),
    "numeric": Kind("here", text.numeric),
    "length": Kind("here", text.length),
    "format": Kind("worker", checkers.format),
    "math": Kind("sandbox", checkers.math, ("math_verify", "math")),
    "code": Kind("tests", code),
    "judge": Kind("endpoint", endpoints.judge, ("httpx", "endpoints")),
    "reward_model": Kind("endpoint", endpoints.reward_model, ("httpx", "endpoints")),
    "task": Kind("task", _task),
}


@dataclasses.dataclass(frozen=True)
class Reward:
    """One reward of a run.

    Attributes:
      metric: name in metrics.
      weight: factor in the sum.
      place: place where it is computed.
      compute: a `TextReward` ("here"), a `CodeReward` ("tests"), an `Endpoint` ("endpoint"), a name or an
        import path with arguments for a worker, or None.
      key: config key, for errors.
    """

    metric: str
    weight: float
    place: Place
    compute: Any
    key: str


def make_reward(config: RewardConfig, key: str) -> Reward:
    """Makes the reward of a config.

    Args:
      key: name of the item in errors, such as "task.rewards.0".

    Raises:
      ConfigError: an unknown name or argument, an invalid value, or a package that is not installed.
    """
    if ":" in config.name:
        if config.name.startswith(":") or config.name.endswith(":"):
            raise ConfigError(f"{key}.name: write a function as module:function, not {config.name!r}")
        compute = ("function", {"path": config.name, "args": config.args})
        return Reward(config.metric, config.weight, "worker", compute, key)
    if config.name not in REWARDS:
        raise ConfigError(
            f"{key}.name: unknown reward {config.name!r}; {known_names(config.name, REWARDS)},"
            " or a function of yours as module:function"
        )
    kind = REWARDS[config.name]
    _check_arguments(config.name, kind.factory, config.args, key)
    require_package(kind.package, f"{key}.name: {config.name}")
    if kind.place == "sandbox":
        return Reward(config.metric, config.weight, kind.place, (config.name, config.args), key)
    try:
        made = kind.factory(**config.args)
    except ValueError as error:
        raise ConfigError(f"{key}.{error}") from error
    compute = (config.name, config.args) if kind.place == "worker" else made
    return Reward(config.metric, config.weight, kind.place, compute, key)


def require_package(package: tuple[str, str] | None, who: str) -> None:
    """Raises a ConfigError that names the extra, if the package of a (package, extra) is not installed."""
    if package is not None and importlib.util.find_spec(package[0]) is None:
        raise ConfigError(f"{who} needs {package[0]}: install the extra (pip install 'rljax[{package[1]}]')")


def _check_arguments(name: str, factory: Callable[..., Any], args: Mapping[str, Any], key: str) -> None:
    parameters = inspect.signature(factory).parameters
    for argument in args:
        if argument not in parameters:
            known = known_names(argument, parameters) if parameters else "it has none"
            raise ConfigError(f"{key}.args.{argument}: {name} has no such argument; {known}")
    for argument, parameter in parameters.items():
        if parameter.default is parameter.empty and argument not in args:
            raise ConfigError(f"{key}.args.{argument}: must be set for {name}")
