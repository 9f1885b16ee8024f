"""One thread that owns the engine and decodes whatever comes: continuous batching over an open queue.

    worker = EngineWorker(engine, params, max_slots=8)
    worker.start()
    worker.submit([Job(request, deliver)])     # deliver(piece) is called from the thread, again and again
    worker.close()                             # finishes what there is

`rljax/rollout/scheduler.py` decodes a list of requests to its end; here requests join and leave at any time.
The state is widened for new ones and compacted when few are left. As a token depends on its request alone,
nobody notices who else is there.
"""

import collections
import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np

from drafters.base import Outcome
from rljax.engine.engine import DecodeEngine
from rljax.engine.host_sync import Assignment, DecodeResult
from rljax.engine.state import DecodeState
from rljax.errors import PolicyError
from rljax.models.transformer import Params
from rljax.requests import DecodeStatistics, FinishReason, Request
from rljax.rollout.stop_strings import StopStrings
from rljax.speculation.proposals import ActiveSlots
from rljax.speculation.speculator import Speculator

Ending = FinishReason | Literal["cancelled"]


class QueueFull(Exception):
    """So many requests are waiting that no more are taken."""


class Closed(Exception):
    """The worker takes no requests any more; the message says why."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """What a response got since the last piece.

    Attributes:
      tokens: ids; with the one that ended it.
      logprobs: of each, under the distribution really sampled.
      ending: why it is over; None if more will come.
    """

    tokens: list[int]
    logprobs: list[float]
    ending: Ending | None = None


class Job:
    """A response to be sampled.

    Args:
      request: what to sample.
      deliver: called from the worker's thread with every `Piece`, or last with the exception that ended the
        worker.
      stop: texts that end the response.

    Attributes:
      tokens: sampled so far.
      drafted: draft nodes that were verified for it.
      accepted: how many of its tokens came from them.
    """

    def __init__(
        self,
        request: Request,
        deliver: Callable[[Piece | BaseException], None],
        stop: StopStrings | None = None,
    ) -> None:
        self.request, self.deliver, self.stop = request, deliver, stop
        self.tokens: list[int] = []
        self.drafted = self.accepted = 0
        self._cancelled = False


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
        """What is to be learned now."""
        complete, self._complete = self._complete, []
        return complete


class EngineWorker:
    """Decodes jobs as they come.

    Args:
      engine: the decode engine; nobody else may use it.
      params: weights from `engine.load_params`.
      max_slots: jobs decoded at a time.
      speculator: decodes with drafts; None for plain decoding.
      max_waiting: jobs that may wait for a slot.
      steps_per_look: plain decode steps between two looks, up to the engine's `decode_steps_per_visit`: how
        many tokens a piece has, and how long a new request waits.
      learned_together: by prompt, how many responses drafters learn together, where it is not one. They keep
        a prompt's newest rollouts: single responses, each learned as one, would drive out what a run learned.

    Attributes:
      statistics: of all decoding.
      endings: how many jobs ended how.
      error: what ended the worker, if something did.
    """

    def __init__(
        self,
        engine: DecodeEngine,
        params: Params,
        max_slots: int,
        speculator: Speculator | None = None,
        max_waiting: int = 256,
        steps_per_look: int = 4,
        learned_together: Mapping[tuple[int, ...], int] | None = None,
    ) -> None:
        self.engine, self.params, self.speculator = engine, params, speculator
        self.max_slots, self.max_waiting, self.steps_per_look = max_slots, max_waiting, steps_per_look
        self.statistics = DecodeStatistics()
        self.endings: collections.Counter[Ending] = collections.Counter()
        self.error: BaseException | None = None
        self._changed = threading.Condition()
        self._waiting: collections.deque[Job] = collections.deque()
        self._live: list[Job] = []  # those that are decoded
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._state: DecodeState | None = None
        self._slots: list[Job | None] = []
        self._known: list[Job | None] = []  # to the speculator, by index; None where it is over
        self._finished = _Finished(learned_together or {})
        self._begun = False

    # -- from other threads ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def submit(self, jobs: Sequence[Job]) -> None:
        """Takes jobs, all or none. Those with the same prompt that come together are prefilled once.

        Raises:
          ValueError: a request that cannot fit.
          QueueFull: too many are waiting.
          Closed: the worker is closing or has failed.
        """
        limit = self.engine.buckets.cache[-1]
        for job in jobs:
            length, response = len(job.request.prompt_ids), job.request.max_response
            if not length or response < 1:
                raise ValueError("a request needs a prompt and room for at least one response token")
            if length + response > limit:
                raise ValueError(f"{length} + {response} tokens exceed the largest cache bucket, {limit}")
        with self._changed:
            if self.error is not None:
                raise Closed(f"decoding has failed: {self.error}")
            if self._closing:
                raise Closed("the server is shutting down")
            free = self.max_slots - self.active
            if len(self._waiting) + len(jobs) > self.max_waiting + free:
                raise QueueFull(f"{len(self._waiting)} requests are waiting already")
            self._waiting.extend(jobs)
            self._changed.notify()

    def cancel(self, jobs: Sequence[Job]) -> None:
        """Gives up jobs, if they are not over: their slots become free at the next look."""
        with self._changed:
            for job in jobs:
                job._cancelled = True
            self._changed.notify()

    def close(self, drain: bool = True, timeout: float | None = None) -> bool:
        """Takes no more jobs and ends the thread; returns whether it has ended.

        Args:
          drain: finish those there are; False cancels them.
          timeout: seconds to wait.
        """
        with self._changed:
            self._closing = True
            if not drain:
                for job in (*self._waiting, *self._live):
                    job._cancelled = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def wait(self) -> BaseException | None:
        """Waits until the thread has ended; what ended it, if not `close`."""
        self._thread.join()
        return self.error

    @property
    def alive(self) -> bool:
        """Whether jobs are taken."""
        return self.error is None and not self._closing

    @property
    def active(self) -> int:
        """Jobs that are decoded."""
        return len(self._live)

    @property
    def waiting(self) -> int:
        """Jobs that wait for a slot."""
        return len(self._waiting)

    # -- the thread ------------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while self._take():
                self._look_after_cancelled()
                if self.active:
                    self._decode()
                    self._make_room()
        except BaseException as error:
            with self._changed:
                self.error = error
                left = [*self._live, *self._waiting]
                self._live, self._waiting = [], collections.deque()
            for job in left:
                job.deliver(error)

    def _busy(self) -> list[int]:
        """Slots with a job."""
        return [slot for slot, job in enumerate(self._slots) if job is not None]

    def _take(self) -> bool:
        """Waits for something to do and puts waiting jobs into slots; False when all is done."""
        with self._changed:
            while not self._waiting and not self._live:
                self._state, self._slots = None, []
                if self._closing:
                    return False
                self._changed.wait()
            waiting, self._waiting = self._waiting, collections.deque()
            dropped = [job for job in waiting if job._cancelled]
            jobs = [job for job in waiting if not job._cancelled]
            taken = jobs[: self.max_slots - len(self._live)]
            self._waiting.extend(jobs[len(taken) :])
            self._live += taken
        for job in dropped:
            self._end(job, [], [], "cancelled")
        if taken:
            self._reserve(taken)
            if self.speculator is not None:
                self._tell_speculator()
            self._insert(taken)
        return True

    def _reserve(self, jobs: Sequence[Job]) -> None:
        """Slots for jobs, in a state that has room for them."""
        engine, busy = self.engine, len(self._busy())
        longest = max(len(job.request.prompt_ids) for job in jobs) + 1
        if not busy:
            self._state = engine.init_state(len(jobs), longest)
            self._slots = [None] * self._state.batch
            if self._begun:
                self.speculator.restart(self._state.batch)
        self._state = engine.widen(self._state, busy + len(jobs))
        if self._begun:
            self.speculator.widen(self._state.batch)
        while self._state.cache.length < engine.buckets.cache_for(longest):
            self._state = engine.grow(self._state)
        self._slots += [None] * (self._state.batch - len(self._slots))
        free = [slot for slot, job in enumerate(self._slots) if job is None]
        for slot, job in zip(free, jobs, strict=False):
            self._slots[slot] = job

    def _insert(self, jobs: Sequence[Job]) -> None:
        by_prompt: dict[tuple[int, ...], list[Job]] = {}
        for job in jobs:
            by_prompt.setdefault(job.request.prompt_ids, []).append(job)
        by_length: dict[int, list[tuple[int, ...]]] = {}
        for prompt in by_prompt:
            by_length.setdefault(self.engine.prefill_length(len(prompt)), []).append(prompt)
        slot_of = {id(job): slot for slot, job in enumerate(self._slots) if job is not None}
        # Into states of fewer slots, `DecodeEngine.warm_up` inserts from the smallest prefill only.
        batches = self.engine.buckets.batch
        whole = self._state.batch == self.engine.buckets.batch_for(self.max_slots)
        for alike in by_length.values():
            size = batches[-1] if whole else batches[0]
            for prompts in (alike[i : i + size] for i in range(0, len(alike), size)):
                prefix = self.engine.prefill(self.params, prompts)
                self.statistics.prefilled_tokens += sum(map(len, prompts))
                own = [(row, job) for row, prompt in enumerate(prompts) for job in by_prompt[prompt]]
                assignments = [
                    Assignment(row, slot_of[id(job)], job.request.noise_key, job.request.max_response)
                    for row, job in own
                ]
                self._state = self.engine.bulk_insert(prefix, self._state, assignments)
                if self.speculator is not None:
                    prefilled = self.speculator.prefill(prefix, prompts)
                    known = [self._known.index(job) for _, job in own]
                    self.speculator.insert(prefilled, assignments, known)

    def _tell_speculator(self) -> None:
        """Who is decoded from now on."""
        for index, job in enumerate(self._known):  # indices are about to mean other jobs
            if job is not None:
                self._take_counts(index, job)
        self.speculator.decisions.take()  # nobody reads them here
        self.speculator.learn(self._finished.take())  # none, too: drafters keep what they have planted
        self._known = list(self._live)
        requests = [job.request for job in self._known]
        if not self._begun:
            self._begun = True
            batch = self._state.batch
            self.speculator.begin(self.params, requests, len(requests), batch, self.statistics)
        else:
            self.speculator.admit(requests, [job.tokens for job in self._known])

    def _take_counts(self, index: int, job: Job) -> None:
        drafted, accepted = self.speculator.counts(index)
        job.drafted, job.accepted = job.drafted + drafted, job.accepted + accepted

    def _look_after_cancelled(self) -> None:
        cancelled = [slot for slot in self._busy() if self._slots[slot]._cancelled]
        if cancelled:
            self._state = self.engine.free_resource(self._state, cancelled)
        for slot in cancelled:
            self._end(self._leave(slot), [], [], "cancelled")

    def _leave(self, slot: int) -> Job:
        """A slot becomes free."""
        job, self._slots[slot] = self._slots[slot], None
        with self._changed:
            self._live.remove(job)
        if self.speculator is not None:
            index = self._known.index(job)
            self._take_counts(index, job)
            self._known[index] = None
        return job

    def _end(self, job: Job, tokens: list[int], logprobs: list[float], ending: Ending) -> None:
        self.endings[ending] += 1
        job.deliver(Piece(tokens, logprobs, ending))

    def _decode(self) -> None:
        slots = self._busy()
        until_active = len(slots) - 1  # a response that has ended should not wait to be told
        if self.speculator is None:
            self._state, result = self.engine.generate(
                self.params, self._state, self.steps_per_look, until_active
            )
        else:
            active = self._as_active(slots)
            self._state, result = self.speculator.decode(
                self.params, self._state, active, until_active, self.steps_per_look
            )
        self._collect(result, slots)

    def _as_active(self, slots: Sequence[int]) -> ActiveSlots:
        jobs = [self._slots[slot] for slot in slots]
        return ActiveSlots(
            np.asarray(slots, np.int32),
            np.asarray([self._known.index(job) for job in jobs], np.int32),
            np.asarray([len(job.request.prompt_ids) + len(job.tokens) for job in jobs], np.int32),
            np.ones(len(jobs), bool),
        )

    def _collect(self, result: DecodeResult, slots: Sequence[int]) -> None:
        """Takes over what was sampled, as `Scheduler` does, and hands it on."""
        statistics = self.statistics
        statistics.steps += result.steps
        statistics.rows += result.rows
        statistics.visits += 1
        if not np.isfinite(result.logprobs[slots]).all():
            raise PolicyError("policy: sampled a token with a log-probability that is not finite")
        known = None if self.speculator is None else self._as_active(slots).requests
        kept, ended, stopped = [], [], []
        over: list[tuple[int, list[int], list[float], Ending]] = []
        for slot in slots:
            job = self._slots[slot]
            tokens = result.tokens[slot][result.tokens[slot] >= 0].tolist()
            logprobs = result.logprobs[slot][: len(tokens)].tolist()
            before = len(job.tokens)
            job.tokens.extend(tokens)
            end = None if job.stop is None else job.stop.find(job.tokens, before)
            if end is not None:
                del job.tokens[end:], tokens[end - before :], logprobs[end - before :]
                if result.active[slot]:
                    stopped.append(slot)
            kept.append(len(tokens))
            ended.append(end is not None or not result.active[slot])
            statistics.tokens += len(tokens)
            if not ended[-1]:
                if tokens:
                    job.deliver(Piece(tokens, logprobs))
                continue
            eos = job.tokens[-1] in self.engine.eos_token_ids
            over.append((slot, tokens, logprobs, "eos" if eos else "length" if end is None else "stop"))
        if self.speculator is not None:
            kept = np.asarray(kept, np.int32)
            self.speculator.observe(known, result.tokens[slots], kept, np.asarray(ended, bool))
        for slot, tokens, logprobs, ending in over:
            job = self._leave(slot)
            if self.speculator is not None:
                response = np.asarray(job.tokens, np.int32)
                self._finished.add(Outcome(job.request.prompt_ids, response, 0.0))
            self._end(job, tokens, logprobs, ending)
        if stopped:
            self._state = self.engine.free_resource(self._state, stopped)
        if any(result.lengths[slot] >= self._state.cache.length for slot in self._busy()):
            self._state = self.engine.grow(self._state)

    def _make_room(self) -> None:
        """Fewer slots, where fewer are enough."""
        busy = self._busy()
        if self._waiting or not busy or self.engine.buckets.batch_for(len(busy)) == self._state.batch:
            return
        self._state = self.engine.compact(self._state, busy)
        if self.speculator is not None:
            self.speculator.compact(busy, self._state.batch)
        self._slots = [self._slots[slot] for slot in busy]
        self._slots += [None] * (self._state.batch - len(self._slots))
