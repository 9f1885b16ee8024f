"""A process that computes rewards: JSON lines in, JSON lines out.

The first line is the setup, {"rewards": [[name, args], ...], "fork", "seconds"}; a name is one of `CHECKERS`,
or the import path of another factory, `module:function`. The reply is {"together"}, the numbers of the
rewards that score several responses together, or {"error", "number"} with the number of the invalid reward.
Every further line is a request, {"number", "messages", "response", "answer", "data"}; the reply is {"value"},
{"error"} or {"timeout"}. It may also be {"number", "answers"}: the value is then the number of leading
answers that the reward can judge by. A request to coroutine functions is {"together": requests, "parallel"}:
the value is the list of their replies. Other factories have requests and values of their own.

With `fork`, a child process computes each reply and ends at the time limit. The sandbox needs this: a
response may take over the process that evaluates it, and that process must not judge the next response.
"""

import asyncio
import contextlib
import ctypes
import inspect
import json
import math
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rljax.importing import load
from rljax.tasks.rewards.checkers import CHECKERS, Checker, as_score

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4
_MAX_ANSWER = 1 << 16


def main() -> None:
    """Replies until the input ends."""
    with contextlib.suppress(AttributeError, OSError):  # Linux
        prctl = ctypes.CDLL(None).prctl
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # the worker ends with the run, even while it hangs
        prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)  # no child can trace the worker
    requests = sys.stdin.buffer
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # text printed by a reward must not mix with replies
    setup = json.loads(requests.readline())
    made = _set_up(setup["rewards"])
    if isinstance(made, dict):
        _send(answers, made)
        return
    together = [number for number, checker in enumerate(made) if inspect.iscoroutinefunction(checker)]
    _send(answers, {"together": together})
    runner = asyncio.Runner()  # one loop for all requests: what a function opens stays open
    for line in requests:
        request = json.loads(line)
        if "together" in request:
            reply = {"value": runner.run(_together(made, request, setup["seconds"]))}
        elif setup["fork"]:
            reply = _in_child(made[request["number"]], request, setup["seconds"])
        else:
            reply = _check(made[request["number"]], request)
        _send(answers, reply)


def _send(answers: Any, answer: Mapping[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def _set_up(rewards: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Checker] | dict[str, Any]:
    """Makes the checkers; returns a reply with the error if one of them is invalid."""
    made = []
    for number, (name, args) in enumerate(rewards):
        try:
            maker = load(name, "name") if ":" in name else CHECKERS[name]
            made.append(maker(**args))
        except ValueError as error:
            return {"error": str(error), "number": number}
        except Exception as error:
            return {"error": f"name: {name} raised {error!r}", "number": number}
    return made


def _check(checker: Checker, request: Mapping[str, Any]) -> dict[str, Any]:
    try:
        value = _judgeable(checker, request["answers"]) if "answers" in request else checker(request)
    except Exception as error:
        return {"error": f"raised {str(repr(error))[:300]}"}
    return _reply(value)


def _reply(value: Any) -> dict[str, Any]:
    """Returns the reply with a checker's value; an error where a number of a `Score` is not finite."""
    numbers = value if isinstance(value, Mapping) and "score" in value else {"score": value}
    for name, number in numbers.items():
        if isinstance(number, float) and not math.isfinite(number):
            return {"error": f"returned {number}" + ("" if name == "score" else f" as {name}")}
    return {"value": value}


async def _together(
    checkers: Sequence[Checker], request: Mapping[str, Any], seconds: float
) -> list[dict[str, Any]]:
    """Computes several rewards, each within so many seconds, at most `parallel` at a time."""
    free = asyncio.Semaphore(request["parallel"])

    async def scored(each: Mapping[str, Any]) -> dict[str, Any]:
        async with free:
            try:
                async with asyncio.timeout(seconds) as limit:
                    return _reply(await checkers[each["number"]](each))
            except Exception as error:
                if limit.expired():
                    return {"timeout": seconds}
                return {"error": f"raised {str(repr(error))[:300]}"}

    return await asyncio.gather(*map(scored, request["together"]))


def _judgeable(checker: Checker, answers: Sequence[str]) -> int:
    for place, answer in enumerate(answers):
        try:
            checker.check_answer(answer)
        except ValueError:
            return place
    return len(answers)


def _in_child(checker: Checker, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setpgid(0, 0)
            os.close(0)
            os.closerange(3, write)
            os.closerange(write + 1, 256)
            bound = int(seconds) + 1
            resource.setrlimit(resource.RLIMIT_CPU, (bound, bound))
            os.write(write, json.dumps(_check(checker, request)).encode())
        finally:
            os._exit(0)
    os.close(write)
    deadline, answer, closed = time.monotonic() + seconds, b"", False
    while not closed and len(answer) <= _MAX_ANSWER:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([read], [], [], left)[0]:
            break
        part = os.read(read, _MAX_ANSWER)
        answer, closed = answer + part, not part
    os.close(read)
    _end(child)
    if not closed:
        return {"timeout": seconds}
    try:
        reply = json.loads(answer)
        if set(reply) == {"value"}:
            return _reply(as_score(reply["value"]))
        return {"error": str(reply["error"])[:300]}
    except (ValueError, TypeError, KeyError, RecursionError):
        return {"error": "died without an answer"}


def _end(child: int) -> None:
    """Ends a child, its process group, and in the strong jail all other processes that it has started.

    The worker is process number 2 only in the jail's pid namespace: elsewhere the run and the jail's launcher
    are its ancestors in the same namespace. So it signals all processes only inside the jail.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    if os.getpid() == 2:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
    os.waitpid(child, 0)


if __name__ == "__main__":
    main()
