"""Decodes requests as they come on the workers of a cluster: what a server has in place of `EngineWorker`.

    worker = ClusterWorker(cluster, engine, params)
    worker.start()
    worker.submit([Job(request, deliver)])     # a thread calls deliver(piece) for every new piece

All requests are one rollout that does not end (`Begin.renewed` in `rljax/cluster/messages.py`): they join
workers that decode others. A worker that is lost changes no token. Drafters of the workers know what the run
has taught them, and learn nothing from what is served.
"""

from collections.abc import Callable, Sequence

from rljax.cluster.decoder import ClusterDecoder
from rljax.cluster.messages import Key
from rljax.engine.engine import DecodeEngine
from rljax.models.transformer import Params
from rljax.requests import DecodeStatistics, accumulate
from rljax.serving.jobs import JobThread, Piece

_LOOK = 0.02  # seconds that a new request waits for the thread, at most


class ClusterWorker(JobThread):
    """See the module's docstring.

    Args:
      cluster: its workers build, or have built, what this process's engine is.
      engine: of this process; it decodes nothing.
      params: weights from `engine.load_params`.
      slots: most responses that a worker decodes at a time.
      max_waiting: most jobs that wait for a slot.
      end: ends the workers' processes.
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
        super().__init__("cluster", engine, max_waiting)
        self._cluster, self.params, self._slots, self._stop = cluster, params, slots, end
        self._rollout = 0  # its number, once there is one

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
    def active(self) -> int:
        """Number of jobs that are decoded, or are on their way."""
        return min(len(self._live), self.max_slots)

    @property
    def waiting(self) -> int:
        """Number of jobs that wait for a slot."""
        return len(self._waiting) + len(self._live) - self.active

    def close(self, drain: bool = True, timeout: float | None = None) -> bool:
        """As of `JobThread`; with the thread, the workers end."""
        ended = super().close(drain, timeout)
        if ended:
            self._stop()
        return ended

    # -- the thread ------------------------------------------------------------------------------------------

    def _step(self) -> None:
        self._cluster.listen(_LOOK)
        self._deliver()

    def _take(self) -> bool:
        with self._changed:  # so that `close` finds every job among those that wait or those that are live
            if self._closing and not (self._waiting or self._live):
                return False
            given_up = {key: job for key, job in self._live.items() if job.cancelled}
            dropped = [job for job in self._waiting if job.cancelled]
            wanted = [job for job in self._waiting if not job.cancelled]
            if wanted:
                requests = [job.request for job in wanted]
                begun = self._cluster.begin(self.params, requests, version=0, renewed=True)
                self._rollout = begun.number
                self._live |= dict(zip(begun.keys, wanted, strict=True))
            self._waiting.clear()  # now that nothing can go wrong with them
        self._release(given_up)
        for job in (*dropped, *given_up.values()):
            job.response.ending = "cancelled"
            self._end(job, [], [], "cancelled")
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
        for job, tokens, logprobs, ending in over.values():
            job.response.ending = ending
            self._end(job, tokens, logprobs, ending)

    def _release(self, keys: Sequence[Key]) -> None:
        if keys:
            self._cluster.release(self._rollout, list(keys))
            self._cluster.timeline()  # not read here
            with self._changed:
                for key in keys:
                    del self._live[key]
