"""Slots that are decoded with drafts: drafters hear of all that happens to the slots and their responses."""

import dataclasses
import time
from collections.abc import Collection, Sequence

import numpy as np

from rljax.engine.host_sync import Assignment
from rljax.models.transformer import Params
from rljax.rollout.live_response import LiveResponse
from rljax.rollout.slots import Appended, Collected, Pass, Prefilled, Slots
from rljax.rollout.sources.turns import Answered
from rljax.speculation.proposals import ActiveSlots
from rljax.speculation.speculative_pass import VerifyingPass
from rljax.speculation.speculator import Speculator


class SpeculativeSlots(Slots):
    """Slots that are decoded by verifying passes and plain steps.

    Args:
      speculator: drafts, and decodes with the drafts.
      params: weights from the engine's `load_params`.
      version: the number of the weights.
      overlap: draft for one half of the slots while the device verifies the other.
    """

    def __init__(self, speculator: Speculator, params: Params, version: int, overlap: bool) -> None:
        super().__init__(speculator.engine, params, version)
        self.speculator, self._overlap = speculator, overlap
        self.has_history = speculator.has_history
        self._known: list[LiveResponse] = []  # to drafters, by number
        self._begun = False
        self._passes: list[VerifyingPass] = []  # under way: none, or one where drafting overlaps

    # -- joining ---------------------------------------------------------------------------------------------

    def admit(
        self, waiting: Collection[LiveResponse], known: Sequence[LiveResponse], most: int, first: int
    ) -> None:
        super().admit(waiting, known, most, first)
        for response in self._known:
            self._take_counts(response)
        self._known = list(known)
        for number, response in enumerate(known):
            response.number = number
        requests, tokens = [each.request for each in known], [each.tokens for each in known]
        current = sum(not response.yields for response in known)
        if not self._begun:
            self._begun = True
            self.speculator.begin(self.params, requests, current, self.batch, self.statistics)
            if not any(tokens):
                return
        # Nothing is trained on responses that nobody waits for.
        requests[current:] = [dataclasses.replace(each, training=False) for each in requests[current:]]
        self.speculator.admit(requests, tokens)

    def _take_counts(self, response: LiveResponse) -> None:
        """Adds the drafts of the present registration, and ends it."""
        if response.number is not None:
            drafted, accepted = self.speculator.counts(response.number)
            response.drafted, response.accepted = response.drafted + drafted, response.accepted + accepted
            response.number = None

    def _start(self, slots: int, longest: int) -> None:
        super()._start(slots, longest)
        if self._begun:
            self.speculator.restart(self.batch)

    def _widen(self, slots: int) -> None:
        super()._widen(slots)
        if self._begun:
            self.speculator.widen(self.batch)

    def prefill(self, prompts: Sequence[tuple[int, ...]]) -> Prefilled:
        prefix = self.engine.prefill(self.params, prompts)
        return Prefilled(prefix, self.speculator.prefill(prefix, prompts))

    def insert(
        self, prefilled: Prefilled, rows: Sequence[tuple[int, int, LiveResponse]]
    ) -> Sequence[Assignment]:
        assignments = super().insert(prefilled, rows)
        self.speculator.insert(
            prefilled.for_drafters, assignments, [response.number for *_, response in rows]
        )
        return assignments

    # -- decoding --------------------------------------------------------------------------------------------

    @property
    def under_way(self) -> Sequence[int]:
        return [slot for each in self._passes for slot in each.active.slots]

    def decode(self, wanted: Pass) -> list[Collected]:
        if wanted.is_tail:
            self.speculator.spare(len(self.running))
        if self._overlap:
            return self._alternate(wanted)
        active = self._active(wanted, wanted.slots)
        self.state, result = self.speculator.decoder.decode(
            self.params, self.state, active, wanted.until_active, wanted.most_steps
        )
        return [Collected(result, wanted.slots)]

    def _alternate(self, wanted: Pass) -> list[Collected]:
        """Drafts for slots that the device is not at, and queues their pass behind the one under way; then
        returns the results of that one.
        """
        decoder, earlier = self.speculator.decoder, self._passes
        taken = set(self.under_way)
        half = [slot for slot in wanted.slots if slot not in taken][: -(-len(wanted.slots) // 2)]
        following = None
        if half and not (earlier and wanted.shrinks):
            active = self._active(wanted, half)
            self.state, following = decoder.start(self.params, self.state, active)
        self._passes = [] if following is None else [following]
        if earlier or self._passes:
            return self._finished(earlier)
        # No pass is under way: plain steps of all slots.
        active = self._active(wanted, wanted.slots)
        self.state, result = decoder.decode_plainly(
            self.params, self.state, active, wanted.until_active, wanted.most_steps
        )
        return [Collected(result, wanted.slots)]

    def finish(self) -> list[Collected]:
        passes, self._passes = self._passes, []
        return self._finished(passes)

    def _finished(self, passes: Sequence[VerifyingPass]) -> list[Collected]:
        return [Collected(self.speculator.decoder.finish(each), each.active.slots) for each in passes]

    def _active(self, wanted: Pass, slots: Sequence[int]) -> ActiveSlots:
        """Returns the speculator's view of `slots`, which are all that decode, or a part."""
        responses = [self.responses[slot] for slot in slots]
        current = np.asarray([not response.yields for response in responses], bool)
        decoding = sum(not self.responses[slot].yields for slot in wanted.slots)
        return ActiveSlots(
            np.asarray(slots, np.int32),
            np.asarray([response.number for response in responses], np.int32),
            np.asarray([response.positions for response in responses], np.int32),
            current,
            decoding - int(current.sum()),
            wanted.yielding_weight,
        )

    def keep(
        self,
        collected: Collected,
        responses: Sequence[LiveResponse],
        counts: Sequence[int],
        stopped: Sequence[int],
    ) -> None:
        ended = [response.slot is None for response in responses]
        numbers = np.asarray([response.number for response in responses], np.int32)
        tokens = collected.result.tokens[collected.slots]
        self.speculator.observe(numbers, tokens, np.asarray(counts, np.int32), np.asarray(ended, bool))
        super().keep(collected, responses, counts, stopped)
        self._take_counts_of_ended(responses)

    def append(self, answers: Sequence[Answered]) -> Sequence[Appended]:
        done = super().append(answers)
        responses, slots, sizes, tokens = zip(*done, strict=True)
        ended = [response.slot is None for response in responses]
        self.speculator.append(slots, [response.number for response in responses], sizes, tokens, ended)
        self._take_counts_of_ended(responses)
        return done

    def _take_counts_of_ended(self, responses: Sequence[LiveResponse]) -> None:
        for response in responses:
            if response.slot is None:
                self._take_counts(response)

    def load_params(self, params: Params, version: int) -> None:
        super().load_params(params, version)
        if self._begun:
            start = time.perf_counter()
            for proposer in self.speculator.proposers:
                proposer.refresh(params)
            self.statistics.draft_seconds += time.perf_counter() - start

    # -- leaving ---------------------------------------------------------------------------------------------

    def free(self, responses: Sequence[LiveResponse]) -> None:
        super().free(responses)
        self._take_counts_of_ended(responses)

    def _compact(self, kept: Sequence[int], batch: int) -> None:
        super()._compact(kept, batch)
        self.speculator.compact(kept, self.batch)
