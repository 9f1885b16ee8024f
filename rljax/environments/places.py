"""Where an environment runs: in this process, or in worker processes that can be ended.

The environments of this package run here, in the decode loop: a step takes microseconds. Those of users,
and those that adapters wrap, run in the processes of rewards (`rljax/tasks/rewards/pool.py`), each of which
keeps the episodes that began in it.
"""

import zlib
from collections.abc import Mapping
from typing import Any, Protocol

from rljax.environments.base import Environment
from rljax.environments.episodes import Episodes
from rljax.sandbox.process import Sandbox
from rljax.tasks.rewards.failures import CheckerError
from rljax.tasks.rewards.pool import CheckerPool
from rljax.tasks.rewards.registry import Reward


class Place(Protocol):
    """Answers the requests of `Episodes.answer`; several threads call in parallel."""

    def ask(self, key: str, request: Mapping[str, Any]) -> dict[str, Any]:
        """Answers a request about the episode `key`.

        Raises:
          CheckerTimeout: the environment took too long.
          CheckerError: the environment raised or died.
        """
        ...

    def close(self) -> None:
        """Ends what runs."""
        ...


class Here:
    """An environment in this process."""

    def __init__(self, environment: Environment) -> None:
        self._episodes = Episodes(environment)

    def ask(self, key: str, request: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return self._episodes.answer(request)
        except Exception as error:
            raise CheckerError(f"raised {error!r}") from error

    def close(self) -> None:
        pass


class Workers:
    """An environment in worker processes, which start now.

    Args:
      path: `module:Class` of the environment.
      args: its arguments, `seed` among them.
      seconds: time limit of one request.
      processes: number of processes; an episode stays in one of them.

    Raises:
      ConfigError: the environment cannot be made.
    """

    def __init__(self, path: str, args: Mapping[str, Any], seconds: float, processes: int) -> None:
        answers = ("rljax.environments.loading:answers", {"path": path, "args": args})
        self._environment = Reward(path, 1.0, "worker", answers, "task")
        self._pools = [CheckerPool([self._environment], Sandbox(), seconds, 1) for _ in range(processes)]
        try:
            for pool in self._pools:
                pool.check()
        except BaseException:
            self.close()
            raise

    def ask(self, key: str, request: Mapping[str, Any]) -> dict[str, Any]:
        pool = self._pools[zlib.crc32(key.encode()) % len(self._pools)]
        return pool.executor.submit(pool.ask, self._environment, request, dict).result()

    def close(self) -> None:
        for pool in self._pools:
            pool.close()
