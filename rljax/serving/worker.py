"""One thread that owns the engine and decodes requests as they come.

    worker = EngineWorker(engine, params, max_slots=8)
    worker.start()
    worker.submit([Job(request, deliver)])     # the thread calls deliver(piece) for every new piece
    worker.load_params(new_params, version=1)  # later tokens are sampled by the new weights
    worker.close()                             # finishes the jobs that were submitted

`rljax/rollout/decode_loop.py` decodes. The worker adds the thread, a bounded queue, the delivery of pieces as
they are sampled, and an error for every job if decoding fails.
"""

import collections
import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from drafters.base import Outcome
from rljax.engine.engine import DecodeEngine
from rljax.environments.use import EnvironmentUse
from rljax.models.transformer import Params
from rljax.requests import DecodeStatistics, Request
from rljax.rollout.decode_loop import LoopPolicy, check_request
from rljax.rollout.live_response import Ending, LiveResponse
from rljax.rollout.open_loop import PLAIN, open_loop, open_slots
from rljax.rollout.stop_strings import StopStrings
from rljax.speculation.no_drafts import NoDrafts
from rljax.speculation.speculator import Speculator


class QueueFull(Exception):
    """The queue has no room for the requests."""


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
      request: the request.
      deliver: called from the worker's thread with every `Piece`, or with the exception that ended the
        worker.
      stop: texts that end the response.

    Attributes:
      response: the response so far.
      cancelled: whether nobody waits for it any more; see `EngineWorker.cancel`.
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

    @property
    def tokens(self) -> list[int]:
        """Token ids sampled so far."""
        return self.response.tokens

    @property
    def drafted(self) -> int:
        """Number of draft nodes verified for the response; valid once it has ended."""
        return self.response.drafted

    @property
    def accepted(self) -> int:
        """Number of tokens accepted from drafts; valid once the response has ended."""
        return self.response.accepted


class _Finished:
    """Finished responses that drafters have not learned from yet.

    Args:
      together: see `EngineWorker`.
    """

    def __init__(self, together: Mapping[tuple[int, ...], int]) -> None:
        self._together = together
        self._few: dict[tuple[int, ...], list[Outcome]] = {}
        self._complete: list[Outcome] = []

    def add(self, outcome: Outcome) -> None:
        prompt = outcome.prompt_ids
        self._few.setdefault(prompt, []).append(outcome)
        if len(self._few[prompt]) >= self._together.get(prompt, 1):
            self._complete += self._few.pop(prompt)

    def take(self) -> list[Outcome]:
        """Returns the responses to learn from now."""
        complete, self._complete = self._complete, []
        return complete


class EngineWorker:
    """Decodes jobs as they arrive.

    Args:
      engine: the decode engine, used by this worker alone.
      params: weights from `engine.load_params`.
      max_slots: most jobs decoded at a time.
      speculator: speculator for decoding with drafts.
      max_waiting: most jobs that wait for a slot.
      steps_per_sync: plain decode steps between two host syncs, up to the engine's `decode_steps_per_sync`:
        the most tokens of a piece, and the longest wait of a new request for a free slot.
      learned_together: number of responses that drafters learn at once, by prompt; 1 for other prompts.
        Drafters keep a prompt's newest rollouts, so single responses, learned as rollouts, would replace
        those of a run.
      learns: whether drafters learn from finished responses, and end with the worker; False where a training
        run has the drafters.
      version: number of the weights.
      environment: environment whose episodes the jobs are; None for none.

    Attributes:
      loop: the decode loop, used by the thread alone.
      endings: number of ended jobs, by ending.
      error: exception that ended the worker, or None.
    """

    def __init__(
        self,
        engine: DecodeEngine,
        params: Params,
        max_slots: int,
        speculator: Speculator | NoDrafts = PLAIN,
        max_waiting: int = 256,
        steps_per_sync: int = 4,
        learned_together: Mapping[tuple[int, ...], int] | None = None,
        learns: bool = True,
        version: int = 0,
        environment: EnvironmentUse | None = None,
    ) -> None:
        self.engine, self.speculator = engine, speculator
        self.max_slots, self.max_waiting = max_slots, max_waiting
        policy = LoopPolicy(sync_at_every_ending=True, most_steps=steps_per_sync)
        slots = open_slots(engine, params, speculator, version=version)
        self.loop = open_loop(slots, max_slots, environment, policy, self._deliver)
        self._learns = learns and bool(speculator.drafters)
        self.endings: collections.Counter[Ending] = collections.Counter()
        self.error: BaseException | None = None
        self._changed = threading.Condition()
        self._waiting: collections.deque[Job] = collections.deque()
        self._live: dict[LiveResponse, Job] = {}  # the jobs in the loop
        self._new_params: tuple[Params, int] | None = None  # with their version; not yet in the loop
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._finished = _Finished(learned_together or {})

    @property
    def statistics(self) -> DecodeStatistics:
        """Counts of all decoding."""
        return self.loop.statistics

    @property
    def params(self) -> Params:
        """The weights that decode now."""
        return self.loop.slots.params

    # -- from other threads ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def submit(self, jobs: Sequence[Job]) -> None:
        """Adds jobs, all or none. Jobs of one call with the same prompt share a prefill.

        Raises:
          ValueError: a request that cannot fit, or sampling settings that the engine does not take.
          QueueFull: too many jobs are waiting.
          Closed: the worker is closing or has failed.
        """
        for job in jobs:
            check_request(job.request, self.engine.buckets)
            self.engine.check_sampling(job.request.sampling)
        with self._changed:
            self._check_open()
            free = self.max_slots - self.active
            if len(self._waiting) + len(jobs) > self.max_waiting + free:
                raise QueueFull(f"{len(self._waiting)} requests are waiting already")
            self._waiting.extend(jobs)
            self._changed.notify()

    def cancel(self, jobs: Sequence[Job]) -> None:
        """Cancels jobs that have not ended; their slots become free at the next host sync."""
        with self._changed:
            for job in jobs:
                job.cancelled = True
            self._changed.notify()

    def load_params(self, params: Params, version: int) -> None:
        """Swaps the weights at the next host sync; does not wait for it.

        Jobs submitted afterwards are decoded by the new weights alone. Responses under way continue with the
        new weights, over keys and values of the old ones, and record the position (`job.response.versions`).
        Of several swaps between two host syncs the last one counts.

        Args:
          params: weights from `engine.load_params`; with copy=True where a trainer donates its arrays.
          version: number of the weights.

        Raises:
          Closed: the worker is closing or has failed.
        """
        with self._changed:
            self._check_open()
            self._new_params = params, version
            self._changed.notify()

    def close(self, drain: bool = True, timeout: float | None = None) -> bool:
        """Accepts no more jobs and ends the thread; returns whether the thread has ended.

        Args:
          drain: finish the jobs of the worker; False cancels them.
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
        if self._learns:
            self.speculator.close()
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
                self.loop.step()
        except BaseException as error:
            with self._changed:
                self.error = error
                left = [*self._live.values(), *self._waiting]
                self._live, self._waiting = {}, collections.deque()
            for job in left:
                job.deliver(error)

    def _take(self) -> bool:
        """Waits for work, and passes jobs, cancellations and weights to the loop; returns False at the
        end.
        """
        with self._changed:
            while not (self._waiting or self._live or self._new_params):
                if self._closing:
                    return False
                self._changed.wait()
            new_params, self._new_params = self._new_params, None
            dropped = [job for job in self._waiting if job.cancelled]
            jobs = [job for job in self._waiting if not job.cancelled]
            taken = jobs[: self.max_slots - len(self._live)]
            self._waiting = collections.deque(jobs[len(taken) :])
            cancelled = [response for response, job in self._live.items() if job.cancelled]
            self._live |= {job.response: job for job in taken}
        for job in dropped:
            self._end(job, [], [], "cancelled")
        if new_params is not None:  # first: what is submitted below must not be prefilled by the old weights
            self.loop.load_params(*new_params)
        if cancelled:
            self.loop.cancel(cancelled)
        if taken:
            if self._learns:
                self.speculator.decisions.take()  # a server does not log decisions; drop them
                # Also with no responses: drafters discard trees of a rollout that `learn` has not followed.
                self.speculator.learn(self._finished.take())
            self.loop.submit([job.response for job in taken])
        return True

    def _deliver(self, responses: Sequence[LiveResponse]) -> None:
        """Delivers the new tokens of responses after a host sync."""
        for response in responses:
            job = self._live[response]
            tokens, logprobs = response.tokens[job._delivered :], response.logprobs[job._delivered :]
            job._delivered += len(tokens)
            if response.ending is None:
                if tokens:
                    job.deliver(Piece(tokens, logprobs))
                continue
            with self._changed:
                del self._live[response]
            if self._learns and response.ending != "cancelled":
                ids = np.asarray(response.tokens, np.int32)
                self._finished.add(Outcome(job.request.prompt_ids, ids, 0.0))
            self._end(job, tokens, logprobs, response.ending)

    def _end(self, job: Job, tokens: list[int], logprobs: list[float], ending: Ending) -> None:
        self.endings[ending] += 1
        job.deliver(Piece(tokens, logprobs, ending))
