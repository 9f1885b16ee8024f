"""The episodes of one environment, for callers that know an episode by its problem and its turns so far."""

import collections
import dataclasses
import json
import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from rljax.environments.base import Environment, Step
from rljax.tasks.base import Problem

_MOST_LIVE = 1024  # episodes whose states are kept; those that a token limit ended are never needed again


class Episodes:
    """Plays episodes of an environment. Requests and answers are JSON values, so that a worker process can
    serve them.

    A request names the problem and all turns of the policy so far. The state of an episode is kept between
    its turns; where it is missing, after a worker was lost, the earlier turns are played again.
    """

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._live: collections.OrderedDict[str, tuple[int, Any]] = collections.OrderedDict()  # turns, state
        self._lock = threading.Lock()

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Answers a request: {"call": "problem", "demonstration", "size", "fingerprint" or "step", ...}."""
        call, environment = request["call"], self._environment
        match call:
            case "problem":
                made = environment.problem(request["split"], request["index"])
                return json.loads(json.dumps(dataclasses.asdict(made), default=str))
            case "demonstration":
                demonstrate = getattr(environment, "demonstration", None)
                turns = None if demonstrate is None else list(demonstrate(problem_of(request["problem"])))
                return {"turns": turns}
            case "size":
                return {"size": getattr(environment, "size", None)}
            case "fingerprint":
                return getattr(environment, "fingerprint", dict)()
            case "step":
                problem = problem_of(request["problem"])
                return self.step(request["key"], problem, request["actions"], request["last"])
        raise ValueError(f"no such call: {call!r}")

    def step(self, key: str, problem: Problem, actions: Sequence[str], last: bool) -> dict[str, Any]:
        """Plays the last of an episode's turns.

        Args:
          actions: the policy's turns so far, at least one.
          last: whether a limit ends the episode after this turn.

        Returns:
          "messages", "reward", "done" and "info" of the step; see `Step`.

        Raises:
          TypeError, ValueError: the environment returned no `Step`, or numbers that are not finite.
        """
        with self._lock:
            turns, state = self._live.pop(key, (-1, None))
        if turns != len(actions) - 1:
            state = self._environment.reset(problem)
            for action in actions[:-1]:
                self._environment.step(action, state)
        step = _checked(self._environment.step(actions[-1], state))
        if last and not step.done and hasattr(self._environment, "cut_off"):
            more = _checked(self._environment.cut_off(state))
            step = dataclasses.replace(
                step, reward=step.reward + more.reward, info={**step.info, **more.info}
            )
        if step.done or last:
            _close(state)
        else:
            with self._lock:
                self._live[key] = len(actions), state
                dropped = self._live.popitem(last=False)[1][1] if len(self._live) > _MOST_LIVE else None
            _close(dropped)
        return {
            "messages": [dict(message) for message in _messages(step.observation)],
            "reward": float(step.reward),
            "done": bool(step.done),
            "info": {name: float(value) for name, value in step.info.items()},
        }


def problem_of(content: Mapping[str, Any]) -> Problem:
    """Returns a problem from its fields as JSON values."""
    return Problem(**{**content, "messages": tuple(content["messages"])})


def _close(state: Any) -> None:
    close = getattr(state, "close", None)
    if callable(close):
        close()


def _messages(observation: str | Sequence[Mapping[str, str]]) -> Sequence[Mapping[str, str]]:
    return ({"role": "user", "content": observation},) if isinstance(observation, str) else observation


def _checked(step: Step) -> Step:
    if not isinstance(step, Step):
        raise TypeError(f"step returned a {type(step).__name__}, not a Step")
    for name, value in (("reward", step.reward), *step.info.items()):
        if not math.isfinite(value):
            raise ValueError(f"step returned {name} {value!r}, no finite number")
    for message in _messages(step.observation):
        if not (isinstance(message, Mapping) and {"role", "content"} <= message.keys()):
            raise TypeError(f"step returned the message {message!r}, without role and content")
        if not isinstance(message["content"], str):
            raise TypeError(f"step returned a message whose content is {message['content']!r}, not a text")
    if not step.done and not _messages(step.observation):
        raise ValueError("step returned no message, and the episode continues")
    return step
