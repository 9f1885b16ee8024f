"""Requests of the next rollout in idle slots: `RunAhead` (`rljax/speculation/run_ahead.py`) says which, and
keeps their tokens.
"""

import collections
import time
from collections.abc import Mapping, Sequence

from rljax.processes import agree
from rljax.requests import Completion, Request
from rljax.rollout.live_response import LiveResponse
from rljax.rollout.slots import Slots
from rljax.rollout.sources.idle import IdleSlots
from rljax.speculation.run_ahead import RunAhead, saved_per_token
from rljax.speculation.speculator import Speculator


class SamplingAhead(IdleSlots):
    """Decodes what is upcoming in the idle slots of one rollout.

    Args:
      run_ahead: what is upcoming, and what was sampled before.
      speculator: its speculator, whose passes are timed.
      takes_over: whether a further round with the same weights may take over complete responses, in which
        neither stop strings nor calls of tools are looked for.
    """

    def __init__(self, run_ahead: RunAhead, speculator: Speculator, takes_over: bool) -> None:
        self._run_ahead, self._speculator, self._takes_over = run_ahead, speculator, takes_over
        self.responses = [LiveResponse(request, yields=True) for request in run_ahead.upcoming]
        self._upcoming = collections.deque(self.responses)

    def begin(self, slots: Slots, requests: Sequence[Request]) -> Mapping[int, Completion]:
        """Returns the responses that were sampled ahead to their end with the present weights. Only an engine
        with row-invariant numerics samples the same bits in any batch.
        """
        self._run_ahead.match(requests)
        if not slots.engine.numerics.row_invariant:
            return {}
        found = {place: self._run_ahead.completion(request) for place, request in enumerate(requests)}
        completions = {place: completion for place, completion in found.items() if completion is not None}
        slots.statistics.ahead_final += sum(len(each.response_ids) for each in completions.values())
        return completions

    def fill(self, slots: Slots) -> None:
        """Puts upcoming requests into idle slots, once few others are left."""
        free = slots.idle
        if not free or not self._may_fill(slots):
            return
        start = time.perf_counter()
        prompt = self._upcoming[0].request.prompt_ids
        if len(prompt) < slots.length:
            prefilled, rows = slots.prefill([prompt]), []
            while free and self._upcoming and self._upcoming[0].request.prompt_ids == prompt:
                rows.append((0, free.pop(0), self._upcoming.popleft()))
            slots.insert(prefilled, rows)
        slots.statistics.ahead_seconds += time.perf_counter() - start

    def _may_fill(self, slots: Slots) -> bool:
        ahead, statistics = self._run_ahead, slots.statistics
        if not self._upcoming or len(slots.running) > ahead.below:
            return False
        spent, decoding = agree(statistics.ahead_seconds, statistics.host_seconds + statistics.device_seconds)
        return spent <= ahead.max_share * decoding

    def batch(self, slots: Slots, smallest: int) -> int:
        """Returns the batch bucket whose idle slots pay the most."""
        if smallest >= slots.batch:
            return smallest
        running = len(slots.running)
        available = len(slots.yielding) + (len(self._upcoming) if self._may_fill(slots) else 0)
        shape, seconds = (slots.batch, slots.length), self._saved_per_token(slots)
        arguments = slots.statistics, slots.engine.buckets, self._speculator.decoder.times
        return self._run_ahead.batch(shape, running, available, seconds, *arguments)

    def weight(self, slots: Slots) -> float:
        if not slots.yielding:
            return 0.0
        return self._run_ahead.weight(self._saved_per_token(slots), slots.statistics)

    def passed(self, slots: Slots, steps: int) -> None:
        """Adds the time by which so many passes took longer, because the batch is wide for sampling ahead."""
        smallest = slots.engine.buckets.batch_for(max(len(slots.running), 1))
        if smallest >= slots.batch or not slots.yielding:
            return
        times = self._speculator.decoder.times
        seconds = times.plain(slots.batch, slots.length) - times.plain(smallest, slots.length)
        slots.statistics.ahead_pass_seconds += steps * max(seconds, 0.0)

    def end(self, slots: Slots, requests: Sequence[Request]) -> None:
        """Counts what the rollout had of the tokens that were sampled ahead for it, and keeps those that were
        sampled in it.
        """
        statistics = slots.statistics
        statistics.ahead_tokens += sum(len(response.tokens) for response in self.responses)
        seconds = self._run_ahead.measure(self._saved_per_token(slots), statistics)
        statistics.ahead_saved_seconds += seconds
        if self.responses:
            steps = {request.step for request in requests}
            self._run_ahead.keep([self._kept(response, steps) for response in self.responses])

    def _kept(self, response: LiveResponse, steps: set[int]) -> tuple[Request, list[int], Completion | None]:
        """Returns a sample in the form of `RunAhead.keep`. One of this rollout's step may be taken over by a
        further round once it is complete.
        """
        ended = response.ending == "eos" or not response.remaining
        final = self._takes_over and ended and response.request.step in steps
        return response.request, response.tokens, response.completion(False) if final else None

    def _saved_per_token(self, slots: Slots) -> float:
        """Returns the seconds that a token saves once it is accepted as a draft (`saved_per_token`)."""
        speculator, buckets = self._speculator, slots.engine.buckets
        length = slots.length or buckets.cache[0]
        return saved_per_token(
            slots.statistics, length, buckets, speculator.decoder.times, speculator.max_batch
        )
