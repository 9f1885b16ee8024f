"""Decodes requests as they come on the workers of a cluster: what a server has in place of `EngineWorker`.

    worker = ClusterWorker(cluster, engine, params)
    worker.start()
    worker.submit([Job(request, deliver)])     # a thread calls deliver(piece) for every new piece

All requests are one rollout that does not end (`Begin.renewed` in `rljax/cluster/messages.py`): they join
workers that decode others. A worker that is lost changes no token. Drafters of the workers know what the run
has taught them, and learn nothing from what is served.
"""

import collections
import threading
from collections.abc import Callable, Sequence

from rljax.cluster.decoder import ClusterDecoder
from rljax.cluster.messages import Key
from rljax.engine.engine import DecodeEngine
from rljax.models.transformer import Params
from rljax.requests import DecodeStatistics, accumulate
from rljax.rollout.decode_loop import check_request
from rljax.rollout.live_response import Ending
from rljax.serving.worker import Closed, Job, Piece, QueueFull

_LOOK = 0.02  # seconds that a new request waits for the thread, at most


class ClusterWorker:
    """See the module's docstring. What is not described here is as in `EngineWorker`.

    Args:
      cluster: its workers build, or have built, what this process's engine is.
      engine: of this process; it decodes nothing.
      params: weights from `engine.load_params`.
      slots: most responses that a worker decodes at a time.
      max_waiting: most jobs that wait for a slot.
      end: ends the workers' processes.

    Attributes:
      params: see the arguments.
      endings: number of ended jobs, by ending.
      error: exception that ended the thread, or None.
    """

    def __init__(
        self,
        cluster: ClusterDecoder,
        engine: DecodeEngine,
        params: Params,
        slots: int,
        max_waiting: int = 256,
        end: Callable[[], None] = lambda: None,
    ) -> None:
        self.engine, self.max_waiting = engine, max_waiting
        self.endings: collections.Counter[Ending] = collections.Counter()
        self.error: BaseException | None = None
        self._cluster, self.params, self._slots, self._end = cluster, params, slots, end
        self._changed = threading.Lock()
        self._waiting: list[list[Job]] = []  # as they were submitted; not yet in the rollout
        self._live: dict[Key, Job] = {}
        self._rollout = 0  # its number, once there is one
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="cluster", daemon=True)

    @property
    def statistics(self) -> DecodeStatistics:
        """Counts of all decoding, by all workers."""
        counts, rollout = DecodeStatistics(), self._cluster.coordinator.rollouts.open.get(self._rollout)
        for each, _ in dict(rollout.statistics if rollout is not None else {}).values():
            accumulate(counts, each)
        return counts

    @property
    def max_slots(self) -> int:
        """Most jobs decoded at a time, by the workers that there are."""
        return self._slots * max(self._cluster.coordinator.ready, 1)

    @property
    def alive(self) -> bool:
        """Whether jobs are accepted."""
        return self.error is None and not self._closing

    @property
    def active(self) -> int:
        """Number of jobs that are decoded, or are on their way."""
        return min(len(self._live), self.max_slots)

    @property
    def waiting(self) -> int:
        """Number of jobs that wait for a slot."""
        return sum(map(len, self._waiting)) + len(self._live) - self.active

    # -- from other threads ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def submit(self, jobs: Sequence[Job]) -> None:
        """Adds jobs, all or none; raises as `EngineWorker.submit`."""
        for job in jobs:
            check_request(job.request, self.engine.buckets)
            self.engine.check_sampling(job.request.sampling)
        with self._changed:
            if self.error is not None:
                raise Closed(f"decoding has failed: {self.error}")
            if self._closing:
                raise Closed("the server is shutting down")
            if self.waiting + len(jobs) > self.max_waiting + self.max_slots - self.active:
                raise QueueFull(f"{self.waiting} requests are waiting already")
            self._waiting.append(list(jobs))

    def cancel(self, jobs: Sequence[Job]) -> None:
        """Cancels jobs that have not ended."""
        with self._changed:
            for job in jobs:
                job.cancelled = True

    def close(self, drain: bool = True, timeout: float | None = None) -> bool:
        """Accepts no more jobs, ends the thread and the workers; returns whether the thread has ended.
        Arguments as of `EngineWorker.close`.
        """
        with self._changed:
            self._closing = True
            if not drain:
                for job in (*self._live.values(), *(job for jobs in self._waiting for job in jobs)):
                    job.cancelled = True
        if self._thread.ident is not None:
            self._thread.join(timeout)
        ended = not self._thread.is_alive()
        if ended:
            self._end()
        return ended

    def wait(self) -> BaseException | None:
        """Waits until the thread has ended; returns the exception that ended it, or None after `close`."""
        self._thread.join()
        return self.error

    # -- the thread ------------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while self._take():
                self._cluster.listen(_LOOK)
                self._deliver()
        except BaseException as error:
            with self._changed:
                self.error = error
                left = [*self._live.values(), *(job for jobs in self._waiting for job in jobs)]
                self._live, self._waiting = {}, []
            for job in left:
                job.deliver(error)

    def _take(self) -> bool:
        """Hands new jobs to the cluster, and gives up those that are cancelled; returns False at the end."""
        with self._changed:  # so that `close` finds every job among those that wait or those that are live
            if self._closing and not (self._waiting or self._live):
                return False
            given_up = {key: job for key, job in self._live.items() if job.cancelled}
            dropped = [job for jobs in self._waiting for job in jobs if job.cancelled]
            while self._waiting:
                wanted = [job for job in self._waiting[0] if not job.cancelled]
                if wanted:
                    begun = self._cluster.begin(
                        self.params, [job.request for job in wanted], version=0, renewed=True
                    )
                    self._rollout = begun.number
                    self._live |= dict(zip(begun.keys, wanted, strict=True))
                del self._waiting[0]  # now that nothing can go wrong with it
        self._release(given_up)
        for job in (*dropped, *given_up.values()):
            self._ended(job, [], [], "cancelled")
        return True

    def _deliver(self) -> None:
        """Delivers what has come of responses."""
        over = {}
        for key, job in self._live.items():
            entry, response = self._cluster.coordinator.ledger[key], job.response
            known, ending = len(response.tokens), entry.ending
            response.tokens += entry.tokens[known:]
            response.logprobs += entry.logprobs[known:]
            if len(response.tokens) == known and ending is None:
                continue
            end = None if response.stop is None else response.stop.find(response.tokens, known)
            if end is not None:  # by a string of this request alone, or of all
                del response.tokens[end:], response.logprobs[end:]
                ending = "stop"
            response.drafted, response.accepted = entry.drafted, entry.accepted
            piece = response.tokens[known:], response.logprobs[known:]
            if ending is None:
                job.deliver(Piece(*piece))
            else:
                over[key] = job, *piece, ending
        self._release(over)
        for job, *rest in over.values():
            self._ended(job, *rest)

    def _release(self, keys: Sequence[Key]) -> None:
        if keys:
            self._cluster.release(self._rollout, list(keys))
            self._cluster.timeline()  # not read here
            with self._changed:
                for key in keys:
                    del self._live[key]

    def _ended(self, job: Job, tokens: list[int], logprobs: list[float], ending: Ending) -> None:
        job.response.ending = ending
        self.endings[ending] += 1
        job.deliver(Piece(tokens, logprobs, ending))
