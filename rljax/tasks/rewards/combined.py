"""A task with the rewards of `task.rewards`: parts with weights, some computed in workers."""

import concurrent.futures
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

from rljax.config import TaskConfig
from rljax.errors import ConfigError
from rljax.sandbox.code_tests import CodeTest, check_limits, parse_tests, run_tests
from rljax.sandbox.limits import Limits
from rljax.sandbox.process import Sandbox, SandboxError
from rljax.tasks.answers import extracted_answer
from rljax.tasks.base import Problem, Rewards, Split, Task
from rljax.tasks.judging import Answered, own_reward
from rljax.tasks.rewards.checkers import Score, as_score
from rljax.tasks.rewards.endpoints import checked
from rljax.tasks.rewards.extraction import last_code_block
from rljax.tasks.rewards.failures import CheckerError, CheckerTimeout, Failures, Kind, shown
from rljax.tasks.rewards.pool import CheckerPool, checker_sandbox
from rljax.tasks.rewards.registry import Reward, make_reward
from rljax.tasks.rewards.spelling import number
from rljax.tasks.wrapper import Wrapper

_PLAIN_NUMBER = re.compile(r"-?[0-9]{1,15}(?:\.[0-9]{1,15})?")


class RewardedTask(Wrapper):
    """A task's problems, scored by a weighted sum of rewards.

    A response's parts are "reward", the sum; every reward by the name of its metric, before weighting, with
    its own parts after a slash; "errors", 1 if a reward raised or died on the response, else 0; and
    "timeouts", 1 if one took too long. A reward that declines is None, and so is the sum, unless its weight
    is 0.

    Args:
      task: source of the problems, and of the reward `task` where it has one. An attribute `checker` (name
        and arguments of one of `CHECKERS`) is this reward, computed in the sandbox.
      config: the rewards and their settings.
      report: called with a line for a reward that fails and counts 0 (`config.reward_errors` and
        `config.reward_timeouts`).
      key: config key of the list of rewards, for errors.

    Raises:
      ConfigError: an invalid reward, or a problem that a reward cannot judge.
      SandboxError: this machine cannot isolate programs as the config demands.
    """

    def __init__(
        self, task: Task, config: TaskConfig, report: Callable[[str], None] = print, key: str = "task.rewards"
    ) -> None:
        super().__init__(task)
        self._task, self._config, self._report = task, config, report
        self._rewards = [
            self._made(make_reward(reward, f"{key}.{number}")) for number, reward in enumerate(config.rewards)
        ]
        if not self._rewards:
            raise ConfigError(f"{key}: task {config.name} has no reward of its own; list at least one")
        self._failures = Failures(config, report)
        places = {reward.place for reward in self._rewards}
        limits = Limits(config.sandbox.memory_mb, config.sandbox.processes, config.sandbox.file_mb)
        self._sandbox = Sandbox(limits, config.sandbox.allow_weak)
        self._check_problems()
        if places & {"sandbox", "tests"}:
            _ = self._sandbox.strong  # raises a SandboxError where isolation is missing and not waived
        if "tests" in places:
            check_limits(self._sandbox)
        for reward in self._rewards:
            if reward.place == "endpoint":
                checked(reward.compute, reward.key, config.reward_timeout)
        self._pool = None
        if places & {"worker", "sandbox", "tests"}:
            threads = config.reward_workers or len(os.sched_getaffinity(0))
            checkers = [reward for reward in self._rewards if reward.place in ("worker", "sandbox")]
            self._pool = CheckerPool(checkers, checker_sandbox(self._sandbox), config.reward_timeout, threads)
            try:
                self._pool.check()
                self._check_formulas()
            except BaseException:
                self.close()
                raise

    def problem(self, split: Split, index: int) -> Problem:
        return self._task.problem(split, index)

    def rewards(self, answered: Sequence[Answered]) -> list[Rewards]:
        """Returns the rewards of many responses, computed in parallel.

        Raises:
          UserError: a reward failed, and `task.reward_errors` is "stop"; or it took too long, and
            `task.reward_timeouts` is.
        """
        together = [] if self._pool is None else self._pool.together
        asked = [(reward, _request(*pair)) for pair in answered for reward in together]
        scored = iter(self._pool.compute_together(asked, self._config.reward_parallel) if asked else ())
        in_flight = [
            [next(scored) if reward in together else self._begin(reward, *pair) for reward in self._rewards]
            for pair in answered
        ]
        try:
            return [self._total(pair, futures) for pair, futures in zip(answered, in_flight, strict=True)]
        finally:
            for futures in in_flight:
                for future in futures:
                    future.cancel()

    def extracted_answer(self, problem: Problem, response_text: str) -> str | None:
        """Extracts the answer by the first reward that has a rule for it, else by the task's rule."""
        for reward in self._rewards:
            if hasattr(reward.compute, "vote"):
                return reward.compute.vote(response_text)
        return extracted_answer(self._task, problem, response_text)

    def close(self) -> None:
        """Ends the workers. Without this call they end with the process."""
        super().close()
        for reward in self._rewards:
            if reward.place == "endpoint":
                reward.compute.close()
        if self._pool is not None:
            self._pool.close()

    def _made(self, reward: Reward) -> Reward:
        """Returns the reward, with the place "task" replaced by the task's checker where it has one."""
        if reward.place != "task":
            return reward
        checker = getattr(self._task, "checker", None)
        if checker is not None:
            return Reward(reward.metric, reward.weight, "sandbox", checker, reward.key)
        if not getattr(self._task, "has_reward", True):
            raise ConfigError(f"{reward.key}.name: task {self._config.name} has no reward of its own")
        return reward

    def _check_problems(self) -> None:
        """Checks that the rewards can judge each problem of a finite task."""
        for problem in self.finite_problems():
            for reward, config in zip(self._rewards, self._config.rewards, strict=True):
                if reward.place == "tests":
                    _tests(reward, problem)
                elif config.name in ("exact", "math") and not problem.answer.strip():
                    raise ConfigError(f"{problem.id}: the answer is empty, and {reward.key} judges by it")
                elif config.name == "numeric" and number(problem.answer) is None:
                    raise ConfigError(
                        f"{problem.id}: the answer {problem.answer[:60]!r} is not a number, which"
                        f" {reward.key} needs"
                    )

    def _check_formulas(self) -> None:
        """Checks that `math` can parse each answer of a finite task; it can always parse plain numbers."""
        problems: dict[str, Problem] = {}
        for problem in self.finite_problems():
            if not _PLAIN_NUMBER.fullmatch(problem.answer.strip()):
                problems.setdefault(problem.answer, problem)
        for reward, config in zip(self._rewards, self._config.rewards, strict=True):
            refused = self._pool.refused_answers(reward, list(problems)) if config.name == "math" else []
            if not refused:
                continue
            many = f"; there are {len(refused):,} such answers" if refused[1:] else ""
            message = (
                f"{problems[refused[0]].id}: math-verify finds no formula in the answer {refused[0][:60]!r},"
                f" which {reward.key} needs{many}"
            )
            if self._config.reward_errors == "stop":
                raise ConfigError(f"{message}. Leave such rows out, or set task.reward_errors: zero")
            what = "are left out" if self._failures.declines("errors") else "count as 0"
            self._report(f"{message}. Responses to them {what}")

    def _begin(self, reward: Reward, problem: Problem, text: str) -> concurrent.futures.Future:
        """Starts computing one reward of one response; cheap rewards are computed here."""
        if reward.place in ("here", "task"):
            done: concurrent.futures.Future = concurrent.futures.Future()
            try:
                done.set_result(self._own(reward, problem, text))
            except Exception as error:
                done.set_exception(CheckerError(f"raised {error!r}"))
            return done
        if reward.place == "endpoint":
            endpoint = reward.compute
            return endpoint.executor.submit(endpoint.score, problem, text, self._config.reward_timeout)
        if reward.place == "tests":
            return self._pool.executor.submit(self._run_tests, reward, problem, text)
        return self._pool.executor.submit(self._pool.ask, reward, _request(problem, text), as_score)

    def _own(self, reward: Reward, problem: Problem, text: str) -> Score:
        """Computes a reward in this process."""
        if reward.place == "task":
            parts = dict(own_reward(self._task, problem, text))
            return {"score": parts.pop("reward"), **parts}
        value = reward.compute(problem, text)
        if not hasattr(reward.compute, "vote"):
            return value
        return {"score": value, "answer_found": float(reward.compute.vote(text) is not None)}

    def _run_tests(self, reward: Reward, problem: Problem, text: str) -> Score:
        settings, tests = reward.compute, _tests(reward, problem)
        code = last_code_block(text)
        passed = run_tests(self._sandbox, code, tests, settings.seconds, self._config.reward_timeout)
        score = sum(passed) / len(passed) if settings.partial else float(all(passed))
        return {"score": score, "answer_found": float(code is not text)}

    def _total(self, answered: Answered, futures: Sequence[concurrent.futures.Future]) -> Rewards:
        total: float | None = 0.0
        parts: dict[str, float | None] = {}
        failures = {"errors": 0.0, "timeouts": 0.0}
        for reward, future in zip(self._rewards, futures, strict=True):
            try:
                score: Score = future.result()
            except (CheckerError, SandboxError) as error:
                kind: Kind = "timeouts" if isinstance(error, CheckerTimeout) else "errors"
                self._fail(reward, answered, str(error), kind)
                score, failures[kind] = None if self._failures.declines(kind) else 0.0, 1.0
            value = score["score"] if isinstance(score, dict) else score
            if isinstance(score, dict):
                parts |= {f"{reward.metric}/{name}": part for name, part in score.items() if name != "score"}
            parts[reward.metric] = value
            if value is None:
                total = total if reward.weight == 0 else None
            elif total is not None:
                total += reward.weight * value
        return {"reward": total, **parts, **failures}

    def _fail(self, reward: Reward, answered: Answered, what: str, kind: str) -> None:
        problem, text = answered
        asked = next((m["content"] for m in reversed(problem.messages) if m["role"] == "user"), "")
        message = (
            f"{reward.key} ({reward.metric}): {what}; problem {problem.id}, prompt {shown(asked)},"
            f" response {shown(text)}"
        )
        self._failures.take(message, kind)


def _request(problem: Problem, text: str) -> dict[str, Any]:
    """Returns the request to a checker."""
    return {
        "messages": list(problem.messages),
        "response": text,
        "answer": problem.answer,
        "data": dict(problem.data or {}),
    }


def _tests(reward: Reward, problem: Problem) -> list[CodeTest]:
    column = reward.compute.tests
    if problem.data is None or problem.data.get(column) is None:
        raise ConfigError(f"{problem.id}: there is no column {column!r}, which {reward.key} needs")
    try:
        return parse_tests(problem.data[column])
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{problem.id}: {column!r}: {error}") from error
