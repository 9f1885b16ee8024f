"""One thread that owns the engine and decodes requests as they come.

    worker = EngineWorker(engine, params, max_slots=8)
    worker.start()
    worker.submit([Job(request, deliver)])     # the thread calls deliver(piece) for every new piece
    worker.load_params(new_params, version=1)  # later tokens are sampled by the new weights
    worker.close()                             # finishes the jobs that were submitted

`rljax/rollout/decode_loop.py` decodes, in the thread of `jobs.py`. The worker adds the delivery of pieces as
they are sampled, and newer weights.
"""

import collections
from collections.abc import Mapping, Sequence

import numpy as np

from drafters.base import Outcome
from rljax.engine.engine import DecodeEngine
from rljax.environments.use import EnvironmentUse
from rljax.models.transformer import Params
from rljax.requests import DecodeStatistics
from rljax.rollout.decode_loop import LoopPolicy
from rljax.rollout.live_response import LiveResponse
from rljax.rollout.open_loop import PLAIN, open_loop, open_slots
from rljax.serving.jobs import JobThread, Piece
from rljax.speculation.no_drafts import NoDrafts
from rljax.speculation.speculator import Speculator


class _Finished:
    """Finished responses that drafters have not learned from yet; `together` as of `EngineWorker`."""

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


class EngineWorker(JobThread):
    """Decodes jobs as they arrive.

    Args:
      engine: the decode engine, used by this worker alone.
      params: weights from `engine.load_params`.
      max_slots: most jobs decoded at a time.
      max_waiting: most jobs that wait for a slot.
      steps_per_sync: plain decode steps between two host syncs, up to the engine's `decode_steps_per_sync`:
        the most tokens of a piece, and the longest wait of a new request for a free slot.
      learned_together: number of responses that drafters learn together, by prompt; 1 for other prompts.
        Drafters keep a prompt's newest rollouts, so single responses, learned as rollouts, would replace
        those of a run.
      learns: whether drafters learn from finished responses, and end with the worker; False where a training
        run has the drafters.
      environment: environment whose episodes the jobs are; None for none.

    Attributes:
      loop: the decode loop, used by the thread alone.
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
        super().__init__("engine", engine, max_waiting)
        self.speculator, self.max_slots = speculator, max_slots
        policy = LoopPolicy(sync_at_every_ending=True, most_steps=steps_per_sync)
        slots = open_slots(engine, params, speculator, version=version)
        self.loop = open_loop(slots, max_slots, environment, policy, self._deliver)
        self._learns = learns and bool(speculator.drafters)
        self._new_params: tuple[Params, int] | None = None  # with their version; not yet in the loop
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

    def load_params(self, params: Params, version: int) -> None:
        """Swaps the weights at the next host sync; does not wait for it.

        Jobs submitted afterwards are decoded by the new weights alone. Responses in flight continue with the
        new weights, over keys and values of the old ones, and record the position (`job.response.versions`).
        Of several swaps between two host syncs the last one counts.

        Args:
          params: weights from `engine.load_params`; with copy=True where a trainer donates its arrays.

        Raises:
          Closed: the worker is closing or has failed.
        """
        with self._changed:
            self._check_open()
            self._new_params = params, version
            self._changed.notify()

    def close(self, drain: bool = True, timeout: float | None = None) -> bool:
        ended = super().close(drain, timeout)
        if self._learns:
            self.speculator.close()
        return ended

    # -- the thread ------------------------------------------------------------------------------------------

    def _step(self) -> None:
        self.loop.step()

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
