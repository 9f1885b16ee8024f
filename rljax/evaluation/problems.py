"""The problems of an evaluation, and digests of the inputs of responses and judgements."""

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rljax.config import TaskConfig
from rljax.importing import is_file
from rljax.tasks.base import Problem, Split, Task

_JUDGING = ("rewards", "reward_timeout", "reward_errors", "reward_timeouts", "sandbox")
_NEITHER = ("reward_workers", "reward_parallel")


def distinct_problems(task: Task, split: Split, count: int, say: Callable[[str], None]) -> dict[int, Problem]:
    """Returns the first problems of a split by index, without repeats: a finite split starts over at its end.

    Args:
      count: number of indices to try, from 0 on.
      say: called with a line if fewer problems differ.
    """
    problems: dict[int, Problem] = {}
    seen = set()
    for index in range(count):
        problem = task.problem(split, index)
        if problem.id not in seen:
            seen.add(problem.id)
            problems[index] = problem
    if len(problems) < count:
        say(f"only {len(problems):,} of the first {count:,} {split} problems are different ones")
    return problems


def task_settings(config: TaskConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the keys of a task that responses depend on, and the keys that only judgements depend on. The
    latter include a digest of the source file of every reward of the form module:function.
    """
    settings = config.model_dump(exclude=set(_NEITHER))
    judging = {name: settings.pop(name) for name in _JUDGING}
    judging["mixture_rewards"] = parts = [part.pop("rewards") for part in settings["mixture"]]
    names = [reward["name"] for rewards in (judging["rewards"], *parts) for reward in rewards]
    judging["reward_functions"] = {name: _source_digest(name) for name in names if ":" in name}
    return settings, judging


def asked_digest(problem: Problem) -> str:
    """Returns a digest of the problem's messages."""
    return _digest(problem.messages)


def judging_digest(problem: Problem, judging: dict[str, Any]) -> str:
    """Returns a digest of everything that a response to a problem is scored by.

    Args:
      problem: the problem, with its answer and data.
    """
    return _digest([judging, problem.messages, problem.answer, problem.data])


def _source_digest(function: str) -> str | None:
    """Returns the digest of the file of a module:function or file.py:function; None if it is not found."""
    module = function.rpartition(":")[0]
    files = [Path(module).expanduser()] if is_file(module) else []
    for base in map(Path, sys.path):
        parts = base.joinpath(*module.split("."))
        files += [parts.with_suffix(".py"), parts / "__init__.py"]
    for file in files:
        if file.is_file():
            return hashlib.blake2b(file.read_bytes(), digest_size=8).hexdigest()
    return None


def _digest(value: Any) -> str:
    return hashlib.blake2b(
        json.dumps(value, sort_keys=True, default=repr).encode(), digest_size=8
    ).hexdigest()
