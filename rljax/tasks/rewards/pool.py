"""The workers that compute a run's rewards: bounded in time, ended when they hang, and restarted."""

import concurrent.futures
import json
import os
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import rljax
from rljax.errors import ConfigError
from rljax.sandbox.process import Process, Sandbox, start_unconfined
from rljax.tasks.rewards.checkers import as_score
from rljax.tasks.rewards.failures import CheckerError, CheckerTimeout
from rljax.tasks.rewards.registry import Reward

_START_SECONDS = 120.0  # a user's module may import many packages
_GRACE_SECONDS = 5.0  # on top of the time limit, which a sandboxed worker enforces itself
_MAX_ANSWER = 1 << 20
_JUDGED_TOGETHER = 1024  # responses per request to a coroutine function
_CHECKED_TOGETHER = 32  # answers per request: starting a child takes as long as parsing a few answers
_WORKER = "rljax.tasks.rewards.worker"
_Value = TypeVar("_Value")


class CheckerPool:
    """Threads with one worker process per place and thread, started when first needed.

    Args:
      rewards: rewards of the places "worker" and "sandbox"; workers know them by their position.
      sandbox: sandbox of the rewards of the place "sandbox".
      seconds: time limit of one reward of one response.
      key: config key of the time limit, for errors.

    Attributes:
      together: the rewards that score several responses together (`compute_together`), once `check` has run.
      close: ends all workers; also called when the pool is garbage-collected.
    """

    def __init__(
        self,
        rewards: Sequence[Reward],
        sandbox: Sandbox,
        seconds: float,
        threads: int,
        key: str = "task.reward_timeout",
    ) -> None:
        self._rewards, self._key = list(rewards), key
        self._sandbox = sandbox
        self._seconds = seconds
        self.executor = concurrent.futures.ThreadPoolExecutor(threads, "rljax-reward")
        self._loop = concurrent.futures.ThreadPoolExecutor(1, "rljax-async-reward")
        self._workers = threading.local()
        self._started: list[Process] = []
        self.together: list[Reward] = []
        self._lock = threading.Lock()
        self.close = weakref.finalize(self, _end, (self.executor, self._loop), self._started)

    def check(self) -> None:
        """Starts one worker for each place; raises a ConfigError for an invalid reward."""
        for place in ("worker", "sandbox"):
            if any(reward.place == place for reward in self._rewards):
                self.executor.submit(self._worker, place).result()

    def compute_together(
        self, asked: Sequence[tuple[Reward, Mapping[str, Any]]], parallel: int
    ) -> list[concurrent.futures.Future]:
        """Computes rewards that are coroutine functions (`together`), on one loop.

        Args:
          asked: rewards, each with a request.
          parallel: most of them in flight.

        Returns:
          A future for each, with its `Score` or the error of `ask`.
        """
        futures: list[concurrent.futures.Future] = [concurrent.futures.Future() for _ in asked]
        places = {reward.place: self._rewards_at(reward.place) for reward, _ in asked}
        requests = [{"number": places[reward.place].index(reward), **each} for reward, each in asked]
        for begin in range(0, len(asked), _JUDGED_TOGETHER):
            part = slice(begin, begin + _JUDGED_TOGETHER)
            self._loop.submit(self._judge, requests[part], futures[part], parallel)
        return futures

    def _judge(
        self,
        requests: Sequence[Mapping[str, Any]],
        futures: Sequence[concurrent.futures.Future],
        parallel: int,
    ) -> None:
        seconds = -(-len(requests) // parallel) * self._seconds + _GRACE_SECONDS
        try:
            data = {"together": requests, "parallel": parallel}
            replies: list[Any] = self._exchange("worker", data, list, seconds)
        except CheckerError as error:
            if len(requests) > 1:  # one of them ended the worker, or blocks the loop
                half = len(requests) // 2
                self._judge(requests[:half], futures[:half], parallel)
                self._judge(requests[half:], futures[half:], parallel)
                return
            replies = [error]
        except Exception as error:
            replies = [error] * len(requests)
        for future, reply in zip(futures, replies, strict=True):
            try:
                if isinstance(reply, Exception):
                    raise reply
                future.set_result(as_score(self._value(reply)))
            except Exception as error:
                if not future.cancelled():
                    future.set_exception(error)

    def ask(self, reward: Reward, request: Mapping[str, Any], kind: Callable[[Any], _Value]) -> _Value:
        """Returns a reward's answer to a request, from the calling thread's worker; call it within
        `executor`.

        Args:
          request: JSON values.
          kind: type of the answer.

        Raises:
          CheckerTimeout: the reward took too long.
          CheckerError: the reward raised or died.
        """
        number = self._rewards_at(reward.place).index(reward)
        seconds = self._seconds + (_GRACE_SECONDS if reward.place == "sandbox" else 0.0)
        return self._exchange(reward.place, {"number": number, **request}, kind, seconds)

    def _exchange(
        self, place: str, request: Mapping[str, Any], kind: Callable[[Any], _Value], seconds: float
    ) -> _Value:
        worker = self._worker(place)
        data = json.dumps(request, default=str).encode() + b"\n"
        finished = worker.exchange(data, seconds, _MAX_ANSWER, line=True)
        if finished.ending == "timeout":
            self._drop(place)
            raise CheckerTimeout(self._seconds, self._key)
        try:
            return kind(self._value(json.loads(finished.output)))
        except (ValueError, TypeError, KeyError, RecursionError):
            self._drop(place)
            raise CheckerError("ended its worker process") from None

    def _value(self, reply: Mapping[str, Any]) -> Any:
        """Returns the value of a reply; see `ask` for what it raises."""
        if set(reply) == {"timeout"}:
            raise CheckerTimeout(self._seconds, self._key)
        if "error" in reply:
            raise CheckerError(str(reply["error"]))
        return reply["value"]

    def refused_answers(self, reward: Reward, answers: Sequence[str]) -> list[str]:
        """Returns the answers that the reward cannot judge by (`check_answer`) or takes too long to parse."""
        parts = [answers[i : i + _CHECKED_TOGETHER] for i in range(0, len(answers), _CHECKED_TOGETHER)]
        in_flight = [self.executor.submit(self._refused, reward, part) for part in parts]
        return [answer for part in in_flight for answer in part.result()]

    def _refused(self, reward: Reward, answers: Sequence[str]) -> list[str]:
        refused: list[str] = []
        while answers:
            try:
                accepted = self.ask(reward, {"answers": answers}, int)
            except CheckerError:
                if len(answers) > 1:  # one of them is at fault
                    half = len(answers) // 2
                    return (
                        refused
                        + self._refused(reward, answers[:half])
                        + self._refused(reward, answers[half:])
                    )
                accepted = 0
            refused += answers[accepted : accepted + 1]
            answers = answers[accepted + 1 :]
        return refused

    def _rewards_at(self, place: str) -> list[Reward]:
        return [reward for reward in self._rewards if reward.place == place]

    def _worker(self, place: str) -> Process:
        worker = getattr(self._workers, place, None)
        if worker is None:
            worker = self._start(place)
            setattr(self._workers, place, worker)
            with self._lock:
                self._started.append(worker)
        return worker

    def _drop(self, place: str) -> None:
        worker = getattr(self._workers, place)
        setattr(self._workers, place, None)
        with self._lock:
            self._started.remove(worker)
        worker.close()

    def _start(self, place: str) -> Process:
        rewards = self._rewards_at(place)
        if place == "sandbox":
            process = self._sandbox.start(f"from {_WORKER} import main; main()")
        else:
            paths = os.pathsep.join(path for path in sys.path if path)
            # A reward function that uses JAX must not take the accelerator from the run.
            env = {**os.environ, "PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}
            process = start_unconfined([sys.executable, "-m", _WORKER], env)
        setup = {
            "rewards": [reward.compute for reward in rewards],
            "fork": place == "sandbox",
            "seconds": self._seconds,
        }
        finished = process.exchange(
            json.dumps(setup).encode() + b"\n", _START_SECONDS, _MAX_ANSWER, line=True
        )
        try:
            answer = json.loads(finished.output)
        except ValueError:
            process.close()
            output = finished.output[:200] or b"nothing"
            names = ", ".join(reward.metric for reward in rewards)
            raise ConfigError(
                f"{rewards[0].key}: a worker for {names} did not start ({finished.ending}; it said"
                f" {output!r})"
            ) from None
        if "error" in answer:
            process.close()
            raise ConfigError(f"{rewards[answer['number']].key}.{answer['error']}")
        if place == "worker":
            self.together = [rewards[number] for number in answer["together"]]
        return process


def _end(executors: Sequence[concurrent.futures.Executor], started: list[Process]) -> None:
    for executor in executors:
        executor.shutdown(wait=False, cancel_futures=True)
    for process in started:
        process.close()


def checker_sandbox(sandbox: Sandbox) -> Sandbox:
    """Returns the sandbox with the packages that checkers import: site-packages and rljax, read-only."""
    paths = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    packages = [os.path.realpath(path) for path in paths if os.path.isdir(path)]
    source = Path(rljax.__file__).resolve().parent
    return Sandbox(
        sandbox.limits, sandbox.allow_weak, (*packages, str(source)), (*packages, str(source.parent))
    )
