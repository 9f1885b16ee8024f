"""Jobs of a server, and the thread that decodes them: what `EngineWorker` (`worker.py`) and `ClusterWorker`
(`cluster_worker.py`) have in common."""

import collections
import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

from rljax.engine.engine import DecodeEngine
from rljax.requests import Request
from rljax.rollout.decode_loop import check_request
from rljax.rollout.live_response import Ending, LiveResponse
from rljax.rollout.stop_strings import StopStrings


class QueueFull(Exception):
    """The queue has no free places for the requests."""


class Closed(Exception):
    """The worker no longer accepts requests; the message says why."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """Tokens of a response since the last piece.

    Attributes:
      tokens: token ids, including the one that ended the response.
      logprobs: logprobs of the tokens, under the sampling distribution.
      ending: reason of the response's end; None if further pieces follow.
    """

    tokens: list[int]
    logprobs: list[float]
    ending: Ending | None = None


class Job:
    """A response to be sampled.

    Args:
      deliver: called from the thread with every `Piece`, or with the exception that ended it.
      stop: texts that end the response.

    Attributes:
      cancelled: whether nobody waits for it any more; see `JobThread.cancel`.
    """

    def __init__(
        self,
        request: Request,
        deliver: Callable[[Piece | BaseException], None],
        stop: StopStrings | None = None,
    ) -> None:
        self.request, self.deliver = request, deliver
        self.response = LiveResponse(request, stop)
        self._delivered = 0
        self.cancelled = False


class JobThread:
    """A thread that decodes jobs as they arrive, with a bounded queue, and an error for every job if decoding
    fails. What extends it says how jobs are taken (`_take`) and decoded (`_step`).

    Args:
      name: the thread's.
      engine: whose requests are taken.
      max_waiting: most jobs that wait for a slot.

    Attributes:
      endings: number of ended jobs, by ending.
      error: exception that ended the thread, or None.
    """

    max_slots: int
    """Most jobs decoded at a time."""

    def __init__(self, name: str, engine: DecodeEngine, max_waiting: int) -> None:
        self.engine, self.max_waiting = engine, max_waiting
        self.endings: collections.Counter[Ending] = collections.Counter()
        self.error: BaseException | None = None
        self._changed = threading.Condition()
        self._waiting: collections.deque[Job] = collections.deque()
        self._live: dict[Any, Job] = {}  # jobs that are decoded, or are on their way
        self._closing = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    # -- from other threads ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def submit(self, jobs: Sequence[Job]) -> None:
        """Adds jobs, all or none. Jobs of one call with the same prompt share a prefill.

        Raises:
          ValueError: a request that cannot fit, or sampling settings that the engine does not take.
          QueueFull: too many jobs are waiting.
          Closed: the thread is closing or has failed.
        """
        for job in jobs:
            check_request(job.request, self.engine.buckets)
            self.engine.check_sampling(job.request.sampling)
        with self._changed:
            self._check_open()
            if self.waiting + len(jobs) > self.max_waiting + self.max_slots - self.active:
                raise QueueFull(f"{self.waiting} requests are waiting already")
            self._waiting.extend(jobs)
            self._changed.notify()

    def cancel(self, jobs: Sequence[Job]) -> None:
        """Cancels jobs that have not ended; their slots become free at the next host sync."""
        with self._changed:
            for job in jobs:
                job.cancelled = True
            self._changed.notify()

    def close(self, drain: bool = True, timeout: float | None = None) -> bool:
        """Accepts no more jobs and ends the thread; returns whether the thread has ended.

        Args:
          drain: finish the jobs; False cancels them.
          timeout: seconds to wait for the thread; None for no limit.
        """
        with self._changed:
            self._closing = True
            if not drain:
                for job in (*self._waiting, *self._live.values()):
                    job.cancelled = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def wait(self) -> BaseException | None:
        """Waits until the thread has ended; returns the exception that ended it, or None after `close`."""
        self._thread.join()
        return self.error

    @property
    def alive(self) -> bool:
        """Whether jobs are accepted."""
        return self.error is None and not self._closing

    @property
    def active(self) -> int:
        """Number of jobs that are decoded."""
        return len(self._live)

    @property
    def waiting(self) -> int:
        """Number of jobs that wait for a slot."""
        return len(self._waiting)

    def _check_open(self) -> None:
        if self.error is not None:
            raise Closed(f"decoding has failed: {self.error}")
        if self._closing:
            raise Closed("the server is shutting down")

    # -- the thread ------------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while self._take():
                self._step()
        except BaseException as error:
            with self._changed:
                self.error = error
                left = [*self._live.values(), *self._waiting]
                self._live, self._waiting = {}, collections.deque()
            for job in left:
                job.deliver(error)

    def _take(self) -> bool:
        """Takes new jobs, and gives up those that are cancelled; returns False at the end."""
        raise NotImplementedError

    def _step(self) -> None:
        """Decodes a little, and delivers what is new."""
        raise NotImplementedError

    def _end(self, job: Job, tokens: list[int], logprobs: list[float], ending: Ending) -> None:
        self.endings[ending] += 1
        job.deliver(Piece(tokens, logprobs, ending))
