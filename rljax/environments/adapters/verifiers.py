"""Environments with the interface of `verifiers` (its `MultiTurnEnv`, up to version 0.1), without its client.

    task: {name: verifiers, args: {environment: "my_module:load_environment"}}

Of the object are used: its dataset (`get_dataset()` or `dataset`, and the same of `eval_dataset` for held-out
problems) with rows of `prompt` (messages, or a text) or `question`, and `answer`, `info` and `task`;
`setup_state(state)`, `env_response(messages, state)`, `is_completed(messages, state)` or
`is_completed(state)`, synchronous or not; and `rubric` with reward functions and their weights. `verifiers`
samples from a client of its own: here the run samples, and the object says what comes next.
"""

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rljax.environments.base import Step
from rljax.errors import ConfigError
from rljax.importing import called, load
from rljax.tasks.base import Problem, Split, is_heldout, problem_random

Message = Mapping[str, str]


class Verifiers:
    """The adapter. Its arguments are those of `task.args` in a config.

    Args:
      seed: the run seed; it orders the problems of every epoch.
      environment: `module:name` of a class, or of a function such as `load_environment`; or the object.
    """

    def __init__(self, seed: int, environment: str | Any, args: Mapping[str, Any] | None = None) -> None:
        self.seed = seed
        if isinstance(environment, str):
            target = load(environment, "args.environment")
            environment = called(target, dict(args or {}), environment, "args.environment")
        self._environment, self._loop = environment, asyncio.new_event_loop()
        for method in ("env_response", "is_completed"):
            if not callable(getattr(environment, method, None)):
                raise ConfigError(f"args.environment: {type(environment).__name__} has no method {method}")
        self._rewards = list(_reward_functions(getattr(environment, "rubric", None)))
        if not self._rewards:
            raise ConfigError("args.environment: its rubric has no reward function")
        train, heldout = (_rows(environment, name) for name in ("dataset", "eval_dataset"))
        if not heldout or heldout == train:  # without one, some versions return the other
            # One of eight, by its prompt.
            held = [is_heldout(json.dumps(self._messages(row), sort_keys=True)) for row in train]
            heldout = [row for row, is_held in zip(train, held, strict=True) if is_held]
            train = [row for row, is_held in zip(train, held, strict=True) if not is_held]
        if not train:
            raise ConfigError("args.environment: its dataset has no rows")
        self._splits = {"train": train, "heldout": heldout or train, "warm_start": train}
        self.size = len(train)

    def problem(self, split: Split, index: int) -> Problem:
        """Returns problem `index` of a split; see `Task.problem`. Every epoch has an order of its own."""
        rows = self._splits[split]
        epoch, place = (
            (index // len(rows), index % len(rows)) if split != "heldout" else (0, index % len(rows))
        )
        source = problem_random(self.seed, split, epoch)
        keys = [source.random() for _ in rows]
        number = sorted(range(len(rows)), key=keys.__getitem__)[place]
        row = rows[number]
        info = row.get("info")
        return Problem(
            id=f"{'heldout' if split == 'heldout' else 'train'}/{number}",
            messages=tuple(self._messages(row)),
            answer=str(row.get("answer") or ""),
            difficulty=0,
            data={
                "info": json.loads(info) if isinstance(info, str) and info else info or {},
                "task": str(row.get("task") or "default"),
            },
        )

    def reset(self, problem: Problem) -> dict[str, Any]:
        """Begins an episode; its state is that of `verifiers`."""
        state: dict[str, Any] = {
            "id": 0,
            "example_id": 0,
            "prompt": [dict(message) for message in problem.messages],
            "completion": [],
            "answer": problem.answer,
            "task": problem.data["task"],
            "info": problem.data["info"],
            "responses": [],
            "trajectory": [],
            "turn": 0,
            "timing": {"generation_ms": 0.0, "scoring_ms": 0.0, "total_ms": 0.0},
        }
        setup = getattr(self._environment, "setup_state", None)
        return state if setup is None else self._result(setup(state)) or state

    def step(self, action: str, state: dict[str, Any]) -> Step:
        """Takes a turn of the policy."""
        state["completion"].append({"role": "assistant", "content": action})
        state["trajectory"].append({"completion": state["completion"][-1:]})
        state["turn"] += 1
        if self._completed(state):
            return self._scored(state)
        answer = self._result(self._environment.env_response(_all(state), state))
        if isinstance(answer, tuple):  # with the state, which it has changed or made anew
            answer, new_state = answer
            if new_state is not state:
                kept = dict(new_state)
                state.clear()
                state.update(kept)
        messages = [{"role": "user", "content": answer}] if isinstance(answer, str) else list(answer)
        state["completion"] += messages
        if self._completed(state):
            return self._scored(state)
        return Step([{"role": each["role"], "content": each["content"]} for each in messages])

    def cut_off(self, state: dict[str, Any]) -> Step:
        """Scores an episode that a limit ends, as `verifiers` does."""
        return self._scored(state)

    def _scored(self, state: dict[str, Any]) -> Step:
        """Returns the last step of an episode: the weighted sum of the rewards, and each by its name."""
        available = {name: state[name] for name in ("prompt", "completion", "answer", "task", "info")} | {
            "state": state,
            "parser": getattr(self._environment, "parser", None),
        }
        total, parts = 0.0, {}
        for function, weight in self._rewards:
            parameters = inspect.signature(function).parameters
            takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
            named = {name: value for name, value in available.items() if takes_all or name in parameters}
            value = float(self._result(function(**named)))
            parts[getattr(function, "__name__", "reward_function")] = value
            total += weight * value
        return Step(reward=total, done=True, info=parts)

    def _completed(self, state: dict[str, Any]) -> bool:
        is_completed = self._environment.is_completed
        positional = [
            each
            for each in inspect.signature(is_completed).parameters.values()
            if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
        ]
        arguments = (_all(state), state) if len(positional) > 1 else (state,)
        return bool(self._result(is_completed(*arguments)))

    def _result(self, value: Any) -> Any:
        return self._loop.run_until_complete(value) if inspect.isawaitable(value) else value

    def _messages(self, row: Mapping[str, Any]) -> list[dict[str, str]]:
        prompt = row.get("prompt")
        if prompt is None:  # not formatted by the library
            system = getattr(self._environment, "system_prompt", None)
            messages = [{"role": "system", "content": system}] if system else []
            return [*messages, {"role": "user", "content": str(row["question"])}]
        if isinstance(prompt, str):
            return [{"role": "user", "content": prompt}]
        return [{"role": each["role"], "content": each["content"]} for each in prompt]


def _all(state: Mapping[str, Any]) -> list[Message]:
    return [*state["prompt"], *state["completion"]]


def _rows(environment: Any, name: str) -> list[Mapping[str, Any]]:
    """Returns the rows of a dataset of an environment; none where it has no such dataset."""
    rows = getattr(environment, name, None)
    if rows is None:  # it may be made when it is first needed
        get = getattr(environment, f"get_{name}", None)
        try:
            rows = None if get is None else get()
        except (ValueError, AssertionError):  # it has none
            rows = None
    return [] if rows is None else [dict(row) for row in rows]


def _reward_functions(rubric: Any) -> Sequence[tuple[Callable[..., Any], float]]:
    """Returns the reward functions of a rubric, or of a group of rubrics, with their weights."""
    found: list[tuple[Callable[..., Any], float]] = []
    for each in getattr(rubric, "rubrics", None) or [rubric]:
        functions = _first(each, "reward_funcs", "funcs")
        weights = _first(each, "reward_weights", "weights") or [1.0] * len(functions)
        found += [(function, float(weight)) for function, weight in zip(functions, weights, strict=True)]
    return found


def _first(value: Any, *names: str) -> Sequence[Any]:
    return next((getattr(value, name) for name in names if getattr(value, name, None)), ())
