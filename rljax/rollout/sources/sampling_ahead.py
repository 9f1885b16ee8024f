"""Requests of the next rollout in idle slots: `RunAhead` (`rljax/speculation/run_ahead.py`) says which, and
keeps their tokens.

They take idle slots of the present bucket, and no more are added once putting them into slots has taken
`max_share` of the rollout. The batch shrinks later where that pays: where the tokens that a wider pass
samples ahead are expected to save more time than the wider pass costs. Both sides are measured: the times of
passes, and the share of earlier tokens that were accepted as drafts. While nothing is measured, only the
bucket that the running responses need anyway is filled. What is sampled ahead is dropped when the batch
shrinks below it or the rollout ends.
"""

import collections
import time
from collections.abc import Mapping, Sequence

from rljax.engine.buckets import Buckets
from rljax.processes import agree
from rljax.requests import Completion, DecodeStatistics, Request
from rljax.rollout.live_response import LiveResponse
from rljax.rollout.slots import Slots
from rljax.rollout.sources.idle import IdleSlots
from rljax.speculation.run_ahead import RunAhead
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
        self._times = speculator.decoder.times
        self.responses = [LiveResponse(request, yields=True) for request in run_ahead.upcoming]
        self._waiting = collections.deque(self.responses)

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
        prompt = self._waiting[0].request.prompt_ids
        if len(prompt) < slots.length:
            prefilled, rows = slots.prefill([prompt]), []
            while free and self._waiting and self._waiting[0].request.prompt_ids == prompt:
                rows.append((0, free.pop(0), self._waiting.popleft()))
            slots.insert(prefilled, rows)
        slots.statistics.ahead_seconds += time.perf_counter() - start

    def _may_fill(self, slots: Slots) -> bool:
        ahead, statistics = self._run_ahead, slots.statistics
        if not self._waiting or len(slots.running) > ahead.below:
            return False
        spent, decoding = agree(statistics.ahead_seconds, statistics.host_seconds + statistics.device_seconds)
        return spent <= ahead.max_share * decoding

    def batch(self, slots: Slots, smallest: int) -> int:
        """Returns the batch bucket, no larger than the present one, whose idle slots pay the most.

        A bucket costs what its plain step takes longer than that of the smallest bucket for the running
        responses. It brings a token ahead for every idle slot that can be filled. A bucket whose passes have
        less room for drafts of the running responses than passes verified so far is left out.
        """
        if smallest >= slots.batch:
            return smallest
        buckets, statistics, running = slots.engine.buckets, slots.statistics, len(slots.running)
        available = len(slots.yielding) + (len(self._waiting) if self._may_fill(slots) else 0)
        value = self._run_ahead.accepted_share * self._saved_per_token(slots)
        verified = statistics.drafted / max(statistics.verified_slots, 1)
        needed = min(verified, _free_nodes(buckets, smallest, running))

        def gain(batch: int) -> float:
            return value * min(batch - running, available) - self._longer(slots, batch, smallest)

        fitting = [batch for batch in buckets.batch if smallest < batch <= slots.batch]
        fitting = [batch for batch in fitting if _free_nodes(buckets, batch, running) >= needed]
        return max([smallest, *fitting], key=gain)  # of equal ones the smallest

    def weight(self, slots: Slots) -> float:
        """The value of a token that is sampled ahead now, as a share of a current token's: its expected
        saving against the mean time of a token in this rollout.
        """
        spent = _decoding_seconds(slots.statistics) if slots.yielding else 0.0
        if not spent:
            return 0.0
        saving = self._run_ahead.accepted_share * self._saved_per_token(slots)
        return saving * slots.statistics.tokens / spent

    def passed(self, slots: Slots, steps: int) -> None:
        """Adds the time by which so many passes took longer, because the batch is wide for sampling ahead."""
        smallest = slots.engine.buckets.batch_for(max(len(slots.running), 1))
        if smallest < slots.batch and slots.yielding:
            slots.statistics.ahead_pass_seconds += steps * self._longer(slots, slots.batch, smallest)

    def _longer(self, slots: Slots, batch: int, smallest: int) -> float:
        """Returns the seconds by which a plain step of a batch takes longer than that of the smallest."""
        seconds = self._times.plain(batch, slots.length) - self._times.plain(smallest, slots.length)
        return max(seconds, 0.0)

    def end(self, slots: Slots, requests: Sequence[Request]) -> None:
        """Counts what the rollout had of the tokens that were sampled ahead for it, and keeps those that were
        sampled in it.
        """
        statistics = slots.statistics
        offered, accepted, final = statistics.ahead_offered, statistics.ahead_accepted, statistics.ahead_final
        statistics.ahead_tokens += sum(len(response.tokens) for response in self.responses)
        if offered + final:
            self._run_ahead.count(offered + final, accepted + final)
        seconds = accepted * self._saved_per_token(slots)
        seconds += final * _decoding_seconds(statistics) / max(statistics.tokens - final, 1)
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
        """Returns the estimated seconds that a token saves once it is accepted as a draft: the mean time of a
        token in this rollout, all drafts included, less the time of a row in the largest verifying pass.
        """
        buckets, statistics = slots.engine.buckets, slots.statistics
        batches = buckets.verified_batches(self._speculator.max_batch)
        if not batches or not statistics.tokens:
            return 0.0
        batch, length = batches[-1], slots.length or buckets.cache[0]
        rows, _ = buckets.passes(batch)[-1]
        row = (self._times.verify(batch, length, rows) - self._times.plain(batch, length)) / (rows - batch)
        return max(_decoding_seconds(statistics) / statistics.tokens - max(row, 0.0), 0.0)


def _decoding_seconds(statistics: DecodeStatistics) -> float:
    """Returns the time that a rollout has decoded, drafting and choosing included."""
    (seconds,) = agree(statistics.host_seconds + statistics.device_seconds + statistics.draft_seconds)
    return seconds


def _free_nodes(buckets: Buckets, batch: int, running: int) -> float:
    """Draft nodes that a pass over a full batch can have for each running response."""
    passes = buckets.passes(batch)
    return max((min(nodes, (rows - batch) / max(running, 1)) for rows, nodes in passes), default=0.0)
