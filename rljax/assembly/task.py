"""The task of an experiment, from its config: a task with its rewards, a mixture, or an environment. What is
wrong in the config is said before anything expensive starts.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rljax.config import ExperimentConfig, RewardConfig, TaskConfig
from rljax.environments.registry import ADAPTERS, ENVIRONMENTS, is_environment, make_environment_task
from rljax.errors import ConfigError
from rljax.tasks.arguments import check_arguments
from rljax.tasks.base import Task
from rljax.tasks.curriculum import Curriculum
from rljax.tasks.epochs import EpochTask
from rljax.tasks.mixture import Mixture
from rljax.tasks.registry import check_task, make_task
from rljax.tasks.rewards.combined import RewardedTask
from rljax.tasks.wrapper import finite_problems

Report = Callable[[str], None]


def check_names(config: TaskConfig) -> None:
    """Checks the names of a config's tasks and of their arguments, as `configured_task` does, without reading
    data: a command does so before it imports JAX.
    """
    if config.mixture:
        for number, item in enumerate(config.mixture):
            with _named_in_mixture(number):
                _check_task(item.name, item.args)
    elif not is_environment(config.name):
        _check_task(config.name, config.args)
    elif config.name in (known := ENVIRONMENTS | ADAPTERS):
        check_arguments(config.name, known[config.name], config.args)


def _check_task(name: str, args: Mapping[str, Any]) -> None:
    check_task(name, args, [*ENVIRONMENTS, *ADAPTERS, "mixture"])


def _made(name: str, seed: int, args: Mapping[str, Any]) -> Task:
    _check_task(name, args)
    return make_task(name, seed, **args)


@contextlib.contextmanager
def _named_in_mixture(number: int) -> Iterator[None]:
    """Names the keys of a mixture in errors that name those of a task alone."""
    key = f"task.mixture.{number}"
    try:
        yield
    except ConfigError as error:
        message = str(error).replace("task.name:", f"{key}.name:").replace("task.args", f"{key}.args")
        raise ConfigError(message) from error


def configured_task(
    config: TaskConfig, seed: int, report: Report = print, needs_rewards: bool = True
) -> Task:
    """Returns the task of a config with its rewards, as a mixture or in epochs where the config says so.

    Args:
      report: called with a line for each reward that fails without stopping the run.
      needs_rewards: whether its rewards are needed; False where agents judge.
    """
    if not needs_rewards and is_environment(config.name):
        raise ConfigError(
            f"task.name: {config.name} is an environment, which agents cannot play; take a task"
        )
    if not needs_rewards and not config.mixture:
        task = _made(config.name, seed, config.args)
    elif config.mixture:
        task = Mixture(
            seed, [(item, _part(config, number, seed, report)) for number, item in enumerate(config.mixture)]
        )
    elif is_environment(config.name):
        task = make_environment_task(config, seed, report)
    else:
        task = _rewarded(_made(config.name, seed, config.args), config, report, "task.rewards")
    return EpochTask(task, config.problems) if config.problems else task


def checked_task(config: ExperimentConfig, report: Report = print) -> Task:
    """Returns the task of an experiment, after making a first problem of every split that it uses."""
    task = configured_task(config.task, config.seed, report, needs_rewards=config.agents is None)
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
        task = _made(item.name, seed, item.args)
    return _rewarded(task, part_config, report, f"{key}.rewards" if item.rewards else "task.rewards")


def _rewarded(task: Task, config: TaskConfig, report: Report, key: str) -> Task:
    if not config.rewards and hasattr(task, "checker"):
        config = config.model_copy(update={"rewards": (RewardConfig(name="task", label="score"),)})
    if not config.rewards and getattr(task, "has_reward", True):
        return task
    return RewardedTask(task, config, report, key)
