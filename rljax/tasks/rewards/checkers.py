"""Rewards that are computed in workers, because they may hang or evaluate text of a response.

A factory takes the arguments of a reward and returns its checker. The worker calls it; a ValueError is about
an argument and begins with the argument's name. A checker takes a request, {"messages", "response", "answer",
"data"}, and returns a `Score`; those of environments and agents take and return other mappings. A checker
that cannot judge by every reference answer has a function `check_answer`, which raises a ValueError for an
answer that it cannot use. A checker that scores several responses together is a coroutine function.
"""

import asyncio
import inspect
import json
import math as mathematics
import numbers
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rljax.importing import load
from rljax.tasks.rewards.extraction import last_formula
from rljax.tasks.rewards.spelling import plain

Checker = Callable[[Mapping[str, Any]], Any]

Score = float | dict[str, float | None] | None
"""A number; {"score", parts by name...}; or None, as "score" too, where the reward declines to judge. The
part "answer_found" is 1 where the response had an answer to judge, else 0.
"""


def format(pattern: str, whole: bool = True) -> Checker:
    """Rewards 1 if the regular expression matches the response, else 0; `.` matches line breaks as well.

    Runs in a worker because a pattern may take exponential time on some responses; the time limit ends it.

    Args:
      pattern: a regular expression in Python's syntax.
      whole: whether it must match the whole response, not only a part.
    """
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except (re.error, TypeError, RecursionError) as error:
        raise ValueError(f"args.pattern: is no regular expression: {error}") from error
    match = compiled.fullmatch if whole else compiled.search

    def check(request: Mapping[str, Any]) -> Score:
        found = float(match(request["response"].strip()) is not None)
        return {"score": found, "answer_found": found}

    return check


def math() -> Checker:
    """Rewards 1 if the response's last formula is mathematically equal to the answer, else 0, by math-verify.

    `last_formula` says where it stands. Where there is no box, math-verify takes what follows the last
    "answer is", else the last formula or number.

    Runs in the sandbox because sympy evaluates text as Python. The time limits of math-verify need signals
    and are off: the worker bounds the time.
    """
    import logging

    from math_verify import parse, verify

    logging.disable(logging.WARNING)  # math-verify warns in every process that it has no time limit

    def parsed(answer: str) -> list[Any]:
        formula = answer if "$" in answer or "\\boxed" in answer else f"${answer}$"
        reference = parse(plain(formula), parsing_timeout=None)
        if not reference:
            raise ValueError(f"math-verify finds no formula in the answer {answer[:60]!r}")
        return reference

    def check(request: Mapping[str, Any]) -> Score:
        reference = parsed(request["answer"])
        response = parse(plain(last_formula(request["response"])), parsing_timeout=None)
        equal = verify(reference, response, timeout_seconds=None)
        return {"score": float(equal), "answer_found": float(bool(response))}

    check.check_answer = parsed
    check({"answer": "\\frac{1}{2}", "response": "$0.5$"})  # loads modules that the first use imports
    return check


def reasoning_gym(dataset: str, config: Mapping[str, Any], tag: str) -> Checker:
    """Scores the content of the response's last `<tag>...</tag>` by the environment, from 0 to 1.

    Runs in the sandbox because several environments evaluate the answer as Python. The problem is made again
    from its number.
    """
    from reasoning_gym import create_dataset
    from reasoning_gym.utils import extract_answer

    environment = create_dataset(dataset, **config)

    def check(request: Mapping[str, Any]) -> Score:
        answer = extract_answer(request["response"], tag_name=tag)
        score = environment.score_answer(answer, environment[request["data"]["item"]])
        return {"score": float(score), "answer_found": float(answer is not None)}

    return check


def function(path: str, args: Mapping[str, Any]) -> Checker:
    """Calls a function of the user's, by its import path `module:function`.

    The function gets `args`, and the keywords among `response`, `answer`, `messages` and `data` that its
    signature names. It returns a `Score`; other parts than numbers are left out. It may be a coroutine
    function.

    Raises:
      ValueError: the function cannot be imported, or cannot be called with these arguments.
    """
    target = load(path, "name")
    keywords = _keywords(target, path, args, ("response", "answer", "messages", "data"), "name")
    if "response" not in keywords:
        raise ValueError(f"name: {path}: takes no keyword `response`")

    async def check_async(request: Mapping[str, Any]) -> Score:
        return as_score(await target(**{name: request[name] for name in keywords}, **args))

    def check(request: Mapping[str, Any]) -> Score:
        return as_score(target(**{name: request[name] for name in keywords}, **args))

    called = target if inspect.isroutine(target) else type(target).__call__
    return check_async if inspect.iscoroutinefunction(called) else check


def agent(path: str, args: Mapping[str, Any]) -> Checker:
    """Runs an agent of the user's (`rljax/agents`), a function or coroutine function by its import path.

    It gets `args`, and the keywords among `base_url`, `model`, `api_key` and `problem` that its signature
    names; it returns the reward, or None where it has reported one itself. The answer is {"reward"}.

    Raises:
      ValueError: the function cannot be imported, or cannot be called with these arguments.
    """
    target = load(path, "agent")
    keywords = _keywords(target, path, args, ("base_url", "model", "api_key", "problem"), "agent")
    if "base_url" not in keywords:
        raise ValueError(f"agent: {path}: takes no keyword `base_url`")

    def play(request: Mapping[str, Any]) -> dict[str, float | None]:
        reward = target(**{name: request[name] for name in keywords}, **args)
        if inspect.isawaitable(reward):
            reward = asyncio.run(_awaited(reward))
        return {"reward": None if reward is None else _finite(_number(reward))}

    return play


async def _awaited(value: Any) -> Any:
    return await value


def _finite(value: float) -> float:
    if not mathematics.isfinite(value):
        raise ValueError(f"it returned {value}, no finite number")
    return value


def _keywords(
    target: Any, path: str, args: Mapping[str, Any], available: Sequence[str], where: str
) -> list[str]:
    """Returns the keywords among those available that a function takes besides its arguments.

    Raises:
      ValueError: it is no function, or cannot be called with them; the message begins with `where`.
    """
    if not callable(target):
        raise ValueError(f"{where}: {path}: is a {type(target).__name__}, not a function")
    try:
        signature = inspect.signature(target)
        kinds = [parameter.kind for parameter in signature.parameters.values()]
        any_name = inspect.Parameter.VAR_KEYWORD in kinds
        keywords = [name for name in available if any_name or name in signature.parameters]
        signature.bind(**dict.fromkeys(keywords), **args)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{where}: {path}: cannot be called with its args and keywords among {', '.join(available)}:"
            f" {error}"
        ) from error
    return keywords


def as_score(value: Any) -> Score:
    """Returns what a function has returned as a `Score`; raises a TypeError where it is none."""
    if not isinstance(value, Mapping):
        return None if value is None else _number(value)
    if "score" not in value:
        raise TypeError(f"it returned a mapping without 'score', only {', '.join(map(repr, value))}")
    parts = {str(name): float(part) for name, part in value.items() if isinstance(part, numbers.Real)}
    return {**parts, "score": None if value["score"] is None else _number(value["score"])}


def _number(value: Any) -> float:
    if isinstance(value, (str, bytes)):
        raise TypeError(f"it returned {json.dumps(str(value)[:60])}, not a number")
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"it returned a {type(value).__name__}, not a number") from error


CHECKERS: dict[str, Callable[..., Checker]] = {
    checker.__name__: checker for checker in (format, math, reasoning_gym, function, agent)
}
