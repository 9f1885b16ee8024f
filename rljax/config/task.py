"""The keys of the task: what is to be learned, and what is rewarded."""

import bisect
import itertools
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rljax.config.section import Count, CountOrOff, Section


class RewardConfig(Section):
    """One reward; a response gets the sum of all, each times its weight."""

    name: str = Field(
        min_length=1,
        description="A registered reward, such as exact or math (docs/tasks.md lists them), `task` for the"
        " task's own, or a function of yours as module:function.",
    )
    weight: float = Field(
        1.0, description="Factor in the sum. Make it negative for what the policy should stop doing."
    )
    args: dict[str, Any] = Field(
        default_factory=dict, description="Arguments of the reward, by name; see docs/tasks.md."
    )
    label: str | None = Field(
        None,
        min_length=1,
        description="Name of its metric, reward/LABEL; null takes the reward's. Needed where one is used"
        " twice.",
    )

    @property
    def metric(self) -> str:
        """Name in metrics, below `reward/`."""
        return self.label or self.name.rpartition(":")[2]


class SandboxConfig(Section):
    """Bounds of programs that come from responses, and of checkers that evaluate their formulas."""

    memory_mb: Count = Field(
        512, description="Memory of each process, in MiB. Raise for code that handles large data."
    )
    processes: Count = Field(8, description="Processes and threads at once. Raise for code that starts some.")
    file_mb: CountOrOff = Field(16, description="The largest file that may be written, in MiB.")
    allow_weak: bool = Field(
        False,
        description="Run under resource limits alone where the system has no user namespaces. Then code can"
        " read your files and use the network: only for responses that you trust.",
    )


class MixtureConfig(Section):
    """One task of a mixture."""

    name: str = Field(min_length=1, description="A registered task.")
    args: dict[str, Any] = Field(default_factory=dict, description="Its arguments, as in task.args.")
    label: str | None = Field(
        None,
        min_length=1,
        description="Begins the names of its problems; null takes the task's name. Needed where one is used"
        " twice.",
    )
    weight: float = Field(1.0, ge=0, description="Its share of the problems, against the other weights.")
    schedule: Annotated[
        tuple[Annotated[tuple[CountOrOff, Annotated[float, Field(ge=0)]], Field(strict=False)], ...],
        Field(strict=False),
    ] = Field(
        (),
        description="A curriculum: [[position, weight], ...], where a position is a number of training"
        " problems; on straight lines between, constant outside. Replaces the weight.",
    )
    rewards: Annotated[tuple[RewardConfig, ...], Field(strict=False)] = Field(
        (), description="As task.rewards, for its problems only; empty takes task.rewards."
    )

    @property
    def prefix(self) -> str:
        """Prefix of its problems' ids."""
        return self.label or self.name

    def weight_at(self, position: int) -> float:
        """Its weight when so many training problems have been given out."""
        if not self.schedule:
            return self.weight
        after = bisect.bisect_right([place for place, _ in self.schedule], position)
        if after in (0, len(self.schedule)):
            return self.schedule[min(after, len(self.schedule) - 1)][1]
        (left, low), (right, high) = self.schedule[after - 1 : after + 1]
        return low + (high - low) * (position - left) / (right - left)


class TaskConfig(Section):
    """The task: prompts and a reward that a program can check."""

    name: str = Field(min_length=1, description="Which registered task to train on.")
    args: dict[str, Any] = Field(
        default_factory=dict,
        description="Arguments of the task, by name, such as its difficulty; see docs/tasks.md.",
    )
    problems: CountOrOff = Field(
        0,
        description="Train on this many problems, which come back epoch after epoch; 0 never repeats one."
        " Set it to see what history is worth to a drafter.",
    )
    mixture: Annotated[tuple[MixtureConfig, ...], Field(strict=False)] = Field(
        (),
        description="Tasks whose problems are mixed, with task.name: mixture; the list replaces task.args.",
    )
    rewards: Annotated[tuple[RewardConfig, ...], Field(strict=False)] = Field(
        (),
        description="What a response is rewarded for, as a list of {name, weight, args, label}; empty leaves"
        " it to the task's own reward.",
    )
    reward_timeout: float = Field(
        10.0,
        gt=0,
        description="Seconds that one reward of one response may take in a worker. Raise for slow checkers.",
    )
    reward_errors: Literal["stop", "zero"] = Field(
        "stop",
        description="What a reward that raises or hangs does: stop the run with its message, or count as 0"
        " and appear in reward/errors. Use zero for long runs whose checkers now and then time out.",
    )
    reward_workers: CountOrOff = Field(
        0, description="Rewards computed at once; 0 is one for each processor. Lower where others need these."
    )
    sandbox: SandboxConfig = SandboxConfig()

    @model_validator(mode="after")
    def _check(self) -> "TaskConfig":
        problem = next(_impossible(self), None)
        if problem is not None:
            raise ValueError(problem)
        return self


def _impossible(config: TaskConfig) -> Iterator[str]:
    """One line for each thing that cannot be."""
    lists = [("task.rewards", config.rewards)]
    lists += [(f"task.mixture.{number}.rewards", item.rewards) for number, item in enumerate(config.mixture)]
    for key, rewards in lists:
        names = [reward.metric for reward in rewards]
        for number, name in enumerate(names):
            if name in names[:number] or name in ("reward", "mean", "errors"):
                yield f"{key}.{number}.label: the name {name!r} is taken; give this one a label"
    if (config.name == "mixture") != bool(config.mixture):
        yield "task.mixture: lists the tasks of task.name: mixture; set both or none"
    if config.problems and any(item.schedule for item in config.mixture):
        yield (
            "task.problems: must be 0 with a schedule in task.mixture; where the same problems come back, its"
            " positions are never reached"
        )
    if config.mixture and config.args:
        yield "task.args: a mixture has none; each task in task.mixture has its own"
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
