"""A process that computes rewards: JSON lines in, JSON lines out.

The first line is the setup, {"rewards": [[name, args], ...], "fork", "seconds"}; the reply is {"ok": true} or
{"error", "number"} with the number of the invalid reward. Every further line is a request, {"number",
"messages", "response", "answer", "data"}; the reply is {"value"}, {"error"} or {"timeout"}. It may also be
{"number", "answers"}: the value is then the number of leading answers that the reward can judge by. Requests
to an environment, and the values of its replies, are those of `rljax.environments.episodes.Episodes.answer`.

With `fork`, a child process computes each reply and ends at the time limit. The sandbox needs this: a
response may take over the process that evaluates it, and that process must not judge the next response.
"""

import contextlib
import ctypes
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

from rljax.tasks.rewards.checkers import CHECKERS, Checker

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
    _send(answers, made if isinstance(made, dict) else {"ok": True})
    for line in requests:
        request = json.loads(line)
        checker = made[request["number"]]
        _send(
            answers,
            _in_child(checker, request, setup["seconds"]) if setup["fork"] else _check(checker, request),
        )


def _send(answers: Any, answer: Mapping[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def _set_up(rewards: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Checker] | dict[str, Any]:
    """Makes the checkers; returns a reply with the error if one of them is invalid."""
    made = []
    for number, (name, args) in enumerate(rewards):
        try:
            made.append(CHECKERS[name](**args))
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
    if isinstance(value, Mapping):  # of an environment
        return {"value": value}
    return {"value": value} if math.isfinite(value) else {"error": f"returned {value}"}


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
            value = float(reply["value"])
            return {"value": value} if math.isfinite(value) else {"error": f"returned {value}"}
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
