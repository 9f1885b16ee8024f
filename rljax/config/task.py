"""Keys of the task: its problems, its rewards and their sandbox."""

import bisect
import itertools
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rljax.config.section import Count, CountOrOff, Section


class RewardConfig(Section):
    """One reward; a response gets the weighted sum of all rewards."""

    name: str = Field(
        min_length=1,
        description="Name of a registered reward, such as exact or math (docs/tasks.md lists them), `task`"
        " for the task's reward, or a function of yours as module:function or path/to/file.py:function.",
    )
    weight: float = Field(1.0, description="Factor in the sum. Set a negative one to discourage a behaviour.")
    args: dict[str, Any] = Field(
        default_factory=dict, description="Arguments of the reward, by name; see docs/tasks.md."
    )
    label: str | None = Field(
        None,
        min_length=1,
        description="Name of the metric, reward/LABEL; null takes the name of the reward. Set it where a"
        " reward is used twice.",
    )

    @property
    def metric(self) -> str:
        """Name in metrics, below `reward/`."""
        return self.label or self.name.rpartition(":")[2]


class SandboxConfig(Section):
    """Limits of programs from responses, and of checkers that evaluate formulas of responses."""

    memory_mb: Count = Field(
        512, description="Memory of each process, in MiB. Raise it for code that handles large data."
    )
    processes: Count = Field(
        8, description="Most processes and threads at once. Raise it for code that starts some."
    )
    file_mb: CountOrOff = Field(
        16, description="Largest file that a program may write, in MiB. Raise it for code that writes data."
    )
    allow_weak: bool = Field(
        False,
        description="Run programs under resource limits alone where the system has no user namespaces. They"
        " can then read your files and use the network: set it only for responses that you"
        " trust.",
    )


class MixtureConfig(Section):
    """One task of a mixture."""

    name: str = Field(min_length=1, description="Name of a registered task.")
    args: dict[str, Any] = Field(default_factory=dict, description="Arguments of the task, as in task.args.")
    label: str | None = Field(
        None,
        min_length=1,
        description="Prefix of the names of its problems; null takes the task's name. Set it where a task is"
        " used twice.",
    )
    weight: float = Field(
        1.0,
        ge=0,
        description="Share of the problems, relative to the other weights. Raise it for more of them.",
    )
    schedule: Annotated[
        tuple[Annotated[tuple[CountOrOff, Annotated[float, Field(ge=0)]], Field(strict=False)], ...],
        Field(strict=False),
    ] = Field(
        (),
        description="A curriculum that replaces the weight: [[position, weight], ...], interpolated"
        " linearly and constant outside; a position is a number of training problems. Set it to"
        " change the mixture over time.",
    )
    rewards: Annotated[tuple[RewardConfig, ...], Field(strict=False)] = Field(
        (),
        description="Rewards of this task's problems, as in task.rewards; empty takes task.rewards. Set it"
        " where tasks need different rewards.",
    )

    @property
    def prefix(self) -> str:
        """Prefix of the ids of its problems."""
        return self.label or self.name

    def weight_at(self, position: int) -> float:
        """Returns the weight at a position in the training problems."""
        if not self.schedule:
            return self.weight
        after = bisect.bisect_right([place for place, _ in self.schedule], position)
        if after in (0, len(self.schedule)):
            return self.schedule[min(after, len(self.schedule) - 1)][1]
        (left, low), (right, high) = self.schedule[after - 1 : after + 1]
        return low + (high - low) * (position - left) / (right - left)


class TaskConfig(Section):
    """The task: prompts, and a reward that a program can check."""

    name: str = Field(min_length=1, description="Name of a registered task, or mixture; see docs/tasks.md.")
    args: dict[str, Any] = Field(
        default_factory=dict,
        description="Arguments of the task, by name, such as its difficulty; see docs/tasks.md.",
    )
    problems: CountOrOff = Field(
        0,
        description="Number of training problems, repeated epoch after epoch; 0 never repeats a problem."
        " Set it to measure the worth of history to a drafter.",
    )
    curriculum: Literal["none", "failures", "uncertain"] = Field(
        "none",
        description="Problems that are passed over when they come back, by the pass rate of their last"
        " responses: failures asks those more often that fail, uncertain those that sometimes pass. Set"
        " uncertain where many groups are all right or all wrong.",
    )
    curriculum_floor: float = Field(
        0.1,
        gt=0,
        le=1,
        description="Least probability of asking a problem again. Raise it where pass rates change fast.",
    )
    mixture: Annotated[tuple[MixtureConfig, ...], Field(strict=False)] = Field(
        (),
        description="Tasks whose problems are mixed, with task.name: mixture; the list replaces task.args."
        " Set it to train on several tasks at once.",
    )
    rewards: Annotated[tuple[RewardConfig, ...], Field(strict=False)] = Field(
        (),
        description="Rewards of a response, as a list of {name, weight, args, label}; empty takes the task's"
        " reward. Set it to combine rewards, or for a dataset.",
    )
    reward_timeout: float = Field(
        10.0,
        gt=0,
        description="Most seconds for one reward of one response in a worker. Raise it for slow checkers.",
    )
    reward_errors: Literal["stop", "zero", "decline"] = Field(
        "stop",
        description="Reaction to a reward that raises, dies or gives NaN: stop the run with its message, or"
        " count it in reward/errors and as 0, or leave the response out, as if the reward had declined. Set"
        " zero for long runs with checkers that fail occasionally, decline where that is no fault of the"
        " response.",
    )
    reward_timeouts: Literal["zero", "stop", "decline"] = Field(
        "zero",
        description="Reaction to a reward that takes longer than reward_timeout over a response: count it as"
        " 0 and in reward/timeouts, stop the run, or leave the response out. What a policy writes may take a"
        " checker any time; set stop to find a checker that hangs by itself, decline for a slow server.",
    )
    reward_workers: CountOrOff = Field(
        0,
        description="Rewards computed at once; 0 is one per processor. Lower it where other programs need the"
        " processors.",
    )
    reward_parallel: Count = Field(
        32,
        description="Most calls of rewards that are coroutine functions (async def) in flight at once. Raise"
        " it for a service that answers more at a time, lower it for one that refuses.",
    )
    sandbox: SandboxConfig = SandboxConfig()

    @model_validator(mode="after")
    def _check(self) -> "TaskConfig":
        problem = next(_impossible(self), None)
        if problem is not None:
            raise ValueError(problem)
        return self


_TAKEN = ("reward", "mean", "std", "standard_error", "declined", "errors", "timeouts", "kl_penalty")
"""Names of other metrics of rewards."""


def _impossible(config: TaskConfig) -> Iterator[str]:
    """Yields one line for each contradiction."""
    lists = [("task.rewards", config.rewards)]
    lists += [(f"task.mixture.{number}.rewards", item.rewards) for number, item in enumerate(config.mixture)]
    for key, rewards in lists:
        names = [reward.metric for reward in rewards]
        for number, name in enumerate(names):
            if name in names[:number] or name in _TAKEN:
                yield f"{key}.{number}.label: the name {name!r} is taken; give this one a label"
    prefixes = [item.prefix for item in config.mixture]
    for number, item in enumerate(config.mixture):
        key = f"task.mixture.{number}"
        if item.name == "mixture":
            yield f"{key}.name: a mixture cannot hold a mixture"
        if item.prefix in prefixes[:number] or "/" in item.prefix:
            yield f"{key}.label: {item.prefix!r} must be different from the others' and without a slash"
        positions = [position for position, _ in item.schedule]
        if any(a >= b for a, b in itertools.pairwise(positions)):
            yield f"{key}.schedule: its positions {positions} must ascend"
    if config.mixture:
        places = sorted({0, *(position for item in config.mixture for position, _ in item.schedule)})
        for place in places:
            if not sum(item.weight_at(place) for item in config.mixture):
                yield f"task.mixture: all weights are 0 at problem {place}"
