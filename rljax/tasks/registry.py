"""Makes a config's task by name, and checks its arguments before anything expensive starts."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rljax.config import ExperimentConfig, RewardConfig, TaskConfig
from rljax.environments.registry import ADAPTERS, ENVIRONMENTS, is_environment, make_environment_task
from rljax.errors import ConfigError, known_names
from rljax.tasks.arguments import check_arguments
from rljax.tasks.base import Task
from rljax.tasks.chain_arithmetic import ChainArithmetic
from rljax.tasks.curriculum import Curriculum
from rljax.tasks.dataset import Dataset
from rljax.tasks.epochs import EpochTask
from rljax.tasks.instructions import Instructions
from rljax.tasks.mixture import Mixture
from rljax.tasks.reasoning_gym import ReasoningGym
from rljax.tasks.rewards.combined import RewardedTask
from rljax.tasks.tool_arithmetic import ToolArithmetic
from rljax.tasks.worded_arithmetic import WordedArithmetic
from rljax.tasks.wrapper import finite_problems

TASKS: dict[str, Callable[..., Task]] = {
    "chain_arithmetic": ChainArithmetic,
    "dataset": Dataset,
    "instructions": Instructions,
    "reasoning_gym": ReasoningGym,
    "tool_arithmetic": ToolArithmetic,
    "worded_arithmetic": WordedArithmetic,
}

Report = Callable[[str], None]


def make_task(name: str, seed: int, **args: Any) -> Task:
    """Builds a task, without the rewards of a config: see `configured_task`.

    Args:
      name: a key of `TASKS`.
      seed: the run seed; with the split and the index it determines every problem.
      **args: arguments of the task (`task.args` of a config).

    Raises:
      ConfigError: an unknown name or argument (with the nearest known one), or a value the task cannot take.
    """
    _check_names(name, args)
    return TASKS[name](seed=seed, **args)


def check_names(config: TaskConfig) -> None:
    """Checks the names of a config's tasks and of their arguments, as `configured_task` does, without reading
    data: a command does so before it imports JAX.
    """
    if config.mixture:
        for number, item in enumerate(config.mixture):
            with _named_in_mixture(number):
                _check_names(item.name, item.args)
    elif not is_environment(config.name):
        _check_names(config.name, config.args)
    elif config.name in (known := ENVIRONMENTS | ADAPTERS):
        check_arguments(config.name, known[config.name], config.args)


def _check_names(name: str, args: Mapping[str, Any]) -> None:
    if name not in TASKS:
        known = [*TASKS, *ENVIRONMENTS, *ADAPTERS, "mixture"]
        raise ConfigError(f"task.name: unknown task {name!r}; {known_names(name, known)}")
    check_arguments(name, TASKS[name], args)


@contextlib.contextmanager
def _named_in_mixture(number: int) -> Iterator[None]:
    """Names the keys of a mixture in errors that name those of a task alone."""
    key = f"task.mixture.{number}"
    try:
        yield
    except ConfigError as error:
        message = str(error).replace("task.name:", f"{key}.name:").replace("task.args", f"{key}.args")
        raise ConfigError(message) from error


def configured_task(config: TaskConfig, seed: int, report: Report = print, judged: bool = True) -> Task:
    """Returns the task of a config with its rewards, as a mixture or in epochs where the config says so.

    Args:
      config: the section.
      seed: the run seed.
      report: called with a line for each reward that fails without stopping the run.
      judged: whether its rewards are needed; False where agents judge.
    """
    if not judged and is_environment(config.name):
        raise ConfigError(
            f"task.name: {config.name} is an environment, which agents cannot play; take a task"
        )
    if not judged and not config.mixture:
        task = make_task(config.name, seed, **config.args)
    elif config.mixture:
        task = Mixture(
            seed, [(item, _part(config, number, seed, report)) for number, item in enumerate(config.mixture)]
        )
    elif is_environment(config.name):
        task = make_environment_task(config, seed, report)
    else:
        task = _rewarded(make_task(config.name, seed, **config.args), config, report, "task.rewards")
    return EpochTask(task, config.problems) if config.problems else task


def checked_task(config: ExperimentConfig, report: Report = print) -> Task:
    """Returns the task of an experiment, after making a first problem of every split that it uses."""
    task = configured_task(config.task, config.seed, report, judged=config.agents is None)
    splits = ["train"]
    splits += ["heldout"] if config.evaluation.problems else []
    splits += ["warm_start"] if config.warm_start is not None else []
    for split in splits:
        task.problem(split, 0)
    return task


def make_curriculum(config: ExperimentConfig, task: Task) -> Curriculum | None:
    """Returns the curriculum of an experiment; None without one.

    Raises:
      ConfigError: no problem of the task comes back.
    """
    section = config.task
    if section.curriculum == "none":
        return None
    if not section.problems and not finite_problems(task):
        raise ConfigError(
            f"task.curriculum: {section.curriculum} needs problems that come back, and {section.name} makes"
            " new ones all the time; set task.problems"
        )
    return Curriculum(section.curriculum, section.curriculum_floor, config.seed)


def _part(config: TaskConfig, number: int, seed: int, report: Report) -> Task:
    """Returns one task of a mixture."""
    item = config.mixture[number]
    key = f"task.mixture.{number}"
    if is_environment(item.name):
        raise ConfigError(f"{key}.name: {item.name} is an environment, which a mixture cannot hold")
    part_config = config.model_copy(
        update={
            "name": item.name,
            "args": item.args,
            "mixture": (),
            "rewards": item.rewards or config.rewards,
        }
    )
    with _named_in_mixture(number):
        task = make_task(item.name, seed, **item.args)
    return _rewarded(task, part_config, report, f"{key}.rewards" if item.rewards else "task.rewards")


def _rewarded(task: Task, config: TaskConfig, report: Report, key: str) -> Task:
    if not config.rewards and hasattr(task, "checker"):
        config = config.model_copy(update={"rewards": (RewardConfig(name="task", label="score"),)})
    if not config.rewards and getattr(task, "has_reward", True):
        return task
    return RewardedTask(task, config, report, key)
