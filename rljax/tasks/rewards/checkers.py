"""Rewards that are computed in workers: they may hang, or evaluate what a response says.

A factory takes a reward's arguments and returns its checker. It is called in the worker; a ValueError is
about an argument and begins with its name. A checker takes a request, {"messages", "response", "answer",
"data"}, and returns a number. Where not every answer will do, it has a function `check_answer`, which raises
a ValueError for one that it could never judge by.
"""

import importlib
import inspect
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

Checker = Callable[[Mapping[str, Any]], float]


def format(pattern: str, whole: bool = True) -> Checker:
    """1 if the regular expression matches the response, else 0; `.` matches line breaks as well.

    In a worker since a pattern may take exponential time on some response: it then ends at the time limit.

    Args:
      pattern: in Python's syntax.
      whole: it must match all of the response, and not only a part.
    """
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except (re.error, TypeError, RecursionError) as error:
        raise ValueError(f"args.pattern: is no regular expression: {error}") from error
    match = compiled.fullmatch if whole else compiled.search
    return lambda request: float(match(request["response"].strip()) is not None)


def math() -> Checker:
    """1 if the response's last formula is mathematically equal to the answer, else 0, by math-verify.

    In the sandbox since sympy evaluates text as Python. Its own time limits need signals and are off: the
    worker bounds the time.
    """
    import logging

    from math_verify import parse, verify

    logging.disable(logging.WARNING)  # it warns once a process that it has no time limit

    def parsed(answer: str) -> list[Any]:
        right = parse(answer if "$" in answer or "\\boxed" in answer else f"${answer}$", parsing_timeout=None)
        if not right:
            raise ValueError(f"math-verify finds no formula in the answer {answer[:60]!r}")
        return right

    def check(request: Mapping[str, Any]) -> float:
        right = parsed(request["answer"])
        found = parse(request["response"], parsing_timeout=None)
        return float(verify(right, found, timeout_seconds=None))

    check.check_answer = parsed
    check({"answer": "\\frac{1}{2}", "response": "$0.5$"})  # what it loads when it is first used
    return check


def reasoning_gym(dataset: str, config: Mapping[str, Any], tag: str) -> Checker:
    """The environment's own score of what is in the response's last `<tag>...</tag>`, from 0 to 1.

    In the sandbox since several of these scores evaluate the answer as Python. The problem is made anew from
    its number.
    """
    from reasoning_gym import create_dataset
    from reasoning_gym.utils import extract_answer

    made = create_dataset(dataset, **config)

    def check(request: Mapping[str, Any]) -> float:
        answer = extract_answer(request["response"], tag_name=tag)
        return float(made.score_answer(answer, made[request["data"]["item"]]))

    return check


def function(path: str, args: Mapping[str, Any]) -> Checker:
    """A function of the user's, by its import path `module:function`.

    It is called with those of the keywords `response`, `answer`, `messages` and `data` that it names, and
    `args`.

    Raises:
      ValueError: it cannot be imported or called so.
    """
    module, _, name = path.partition(":")
    try:
        found = importlib.import_module(module)
    except Exception as error:
        raise ValueError(f"name: {path}: importing {module} raised {error!r}") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise ValueError(f"name: {path}: {module} has no {name}")
        found = getattr(found, part)
    if not callable(found):
        raise ValueError(f"name: {path}: is a {type(found).__name__}, not a function")
    given = ("response", "answer", "messages", "data")
    try:
        signature = inspect.signature(found)
        kinds = [parameter.kind for parameter in signature.parameters.values()]
        any_name = inspect.Parameter.VAR_KEYWORD in kinds
        wanted = [name for name in given if any_name or name in signature.parameters]
        signature.bind(**dict.fromkeys(wanted), **args)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"name: {path}: cannot be called with its args and keywords among {', '.join(given)}: {error}"
        ) from error
    if "response" not in wanted:
        raise ValueError(f"name: {path}: takes no keyword `response`")

    def check(request: Mapping[str, Any]) -> float:
        return _number(found(**{name: request[name] for name in wanted}, **args))

    return check


def _number(value: Any) -> float:
    if isinstance(value, (str, bytes)):
        raise TypeError(f"it returned {json.dumps(str(value)[:60])}, not a number")
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"it returned a {type(value).__name__}, not a number") from error


CHECKERS: dict[str, Callable[..., Checker]] = {
    checker.__name__: checker for checker in (format, math, reasoning_gym, function)
}
