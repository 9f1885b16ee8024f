"""Slots that are decoded with drafts: drafters see all that happens to the slots and their responses."""

import contextlib
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from drafters.arrays import padded
from drafters.base import DraftRequest
from rljax.engine.host_sync import Assignment
from rljax.models.transformer import Params
from rljax.requests import Request
from rljax.rollout.live_response import LiveResponse
from rljax.rollout.slots import Collected, Pass, Prefilled, Slots
from rljax.rollout.sources.turns import Answered
from rljax.speculation.drafter_calls import drafter_call
from rljax.speculation.proposals import ActiveSlots
from rljax.speculation.speculative_pass import VerifyingPass
from rljax.speculation.speculator import Speculator


class SpeculativeSlots(Slots):
    """Slots that are decoded by verifying passes and plain steps.

    Args:
      speculator: drafts, and decodes with the drafts.
      params: weights from the engine's `load_params`.
      overlap: draft for one half of the slots while the device verifies the other.
    """

    def __init__(self, speculator: Speculator, params: Params, version: int, overlap: bool) -> None:
        super().__init__(speculator.engine, params, version)
        self.speculator, self._overlap = speculator, overlap
        self._drafters, self._decoder = speculator.slots, speculator.decoder
        self.has_history = speculator.has_history
        self._registered: list[LiveResponse] = []  # with the drafters, by number; none before the first
        self._passes: list[VerifyingPass] = []  # in flight: none, or one where drafting overlaps

    @contextlib.contextmanager
    def _on_host(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.statistics.host_seconds += time.perf_counter() - start

    # -- joining ---------------------------------------------------------------------------------------------

    def admit(
        self, waiting: Collection[LiveResponse], known: Sequence[LiveResponse], most: int, first: int
    ) -> None:
        before = self.batch
        super().admit(waiting, known, most, first)
        is_first = not self._registered
        if self.batch != before and not is_first:
            (self._drafters.widen if before else self._drafters.start)(self.batch)
        if all(response.number is not None for response in waiting):
            return
        requests, begun = [each.request for each in known], [each for each in known if each.tokens]
        current = sum(not response.yields for response in known)
        if is_first:
            self._begin(requests[:current])
        self._take_counts(self._registered)
        self._registered = list(known)
        for number, response in enumerate(known):
            response.number = number
        with self._on_host():
            self._decoder.expect(len(requests))
            self._drafters.call_all("begin", self._draft_requests(requests, current))
            if is_first:
                self._drafters.start(self.batch)
            if begun:  # those on the device keep the slots that they know
                self._observe(begun, *padded([response.tokens for response in begun]))

    def _begin(self, requests: Sequence[Request]) -> None:
        """The first requests have come."""
        is_training, step = any(each.training for each in requests), max(each.step for each in requests)
        self.speculator.manager.begin(is_training, step)
        self.speculator.decisions.begin()
        self._refresh()
        for proposer in self.speculator.proposers:
            proposer.forget()
        self._decoder.begin(self.statistics)

    def _draft_requests(self, requests: Sequence[Request], current: int) -> list[DraftRequest]:
        """The requests as drafters know them. Only the coupled rule lets them know the noise, and nothing is
        trained on responses that nobody waits for.
        """
        is_coupled, run_ahead = self.engine.verification == "coupled", self.speculator.run_ahead
        return [
            DraftRequest(
                each.prompt_ids,
                each.noise_key if is_coupled else None,
                None if run_ahead is None else run_ahead.recall(each.noise_key),
                each.training and index < current,
            )
            for index, each in enumerate(requests)
        ]

    def _take_counts(self, responses: Sequence[LiveResponse]) -> None:
        """Adds the drafts of the present registration, and ends it."""
        for response in responses:
            response.drafted, response.accepted = self.drafts_of(response)
            response.number = None

    def drafts_of(self, response: LiveResponse) -> tuple[int, int]:
        drafted, accepted = super().drafts_of(response)
        if response.number is None:
            return drafted, accepted
        decoder, number = self._decoder, response.number
        return drafted + int(decoder.drafted[number]), accepted + int(decoder.accepted[number])

    def prefill(self, prompts: Sequence[tuple[int, ...]]) -> Prefilled:
        prefix = super().prefill(prompts).prefix
        self._decoder.clock.dispatched()
        prefilled = Prefilled(prefix, self._drafters.prefill(prefix, prompts))
        self._decoder.clock.host_waited()  # some drafters wait for the prefill
        return prefilled

    def insert(
        self, prefilled: Prefilled, rows: Sequence[tuple[int, int, LiveResponse]]
    ) -> Sequence[Assignment]:
        assignments, numbers = super().insert(prefilled, rows), [response.number for *_, response in rows]
        self._drafters.insert(prefilled.for_drafters, assignments, numbers)
        return assignments

    # -- decoding --------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> Sequence[int]:
        return [slot for each in self._passes for slot in each.active.slots]

    def decode(self, wanted: Pass) -> list[Collected]:
        if wanted.is_tail:
            self._train()
        if self._overlap:
            return self._alternate(wanted)
        active = self._active(wanted, wanted.slots)
        self.state, result = self._decoder.decode(
            self.params, self.state, active, wanted.until_active, wanted.most_steps
        )
        return [Collected(result, wanted.slots)]

    def _train(self) -> None:
        """Trains drafters a little, once few responses are running."""
        for name, training in self.speculator.training.items():
            start = time.perf_counter()
            if len(self.running) > training.below:
                continue
            with drafter_call(name, "train"):
                trained = training.train()
            if trained:
                self.statistics.train_seconds += self._decoder.clock.finished() - start

    def _alternate(self, wanted: Pass) -> list[Collected]:
        """Drafts for slots that the device is not at, and queues their pass behind the one in flight; then
        returns the results of that one.
        """
        earlier, taken = self._passes, set(self.in_flight)
        half = [slot for slot in wanted.slots if slot not in taken][: -(-len(wanted.slots) // 2)]
        following = None
        if half and not (earlier and wanted.shrinks):
            active = self._active(wanted, half)
            self.state, following = self._decoder.start(self.params, self.state, active)
        self._passes = [] if following is None else [following]
        if earlier or self._passes:
            return self._finished(earlier)
        # No pass is in flight: plain steps of all slots.
        active = self._active(wanted, wanted.slots)
        self.state, result = self._decoder.decode_plainly(
            self.params, self.state, active, wanted.until_active, wanted.most_steps
        )
        return [Collected(result, wanted.slots)]

    def finish(self) -> list[Collected]:
        passes, self._passes = self._passes, []
        return self._finished(passes)

    def _finished(self, passes: Sequence[VerifyingPass]) -> list[Collected]:
        return [Collected(self._decoder.finish(each), each.active.slots) for each in passes]

    def _active(self, wanted: Pass, slots: Sequence[int]) -> ActiveSlots:
        """Returns the decoder's view of `slots`, which are all that decode, or a part."""
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
        self, collected: Collected, responses: Sequence[LiveResponse], counts: list[int], stopped: list[int]
    ) -> None:
        with self._on_host():
            tokens = collected.result.tokens[collected.slots]
            self._observe(responses, tokens, np.asarray(counts, np.int32), self._decoder.draft_counts)
        super().keep(collected, responses, counts, stopped)

    def append(self, answers: Sequence[Answered]) -> None:
        responses = [answer.response for answer in answers]
        slots, sizes = zip(*((each.slot, each.positions) for each in responses), strict=True)
        lengths = [len(response.tokens) for response in responses]
        super().append(answers)
        with self._on_host():
            appended = padded([each.tokens[length:] for each, length in zip(responses, lengths, strict=True)])
            self._drafters.append(slots, sizes, *appended)
            self._observe(responses, *appended)

    def _observe(
        self,
        responses: Sequence[LiveResponse],
        tokens: np.ndarray,
        counts: np.ndarray,
        draft_counts: Mapping[str, tuple[np.ndarray, np.ndarray]] = MappingProxyType({}),
    ) -> None:
        """Shows drafters new tokens, and takes the counts of drafts of responses that have ended."""
        numbers = np.asarray([response.number for response in responses], np.int32)
        ended = np.asarray([response.ending is not None for response in responses], bool)
        self._drafters.observe(numbers, tokens, counts, ended, draft_counts)
        if self.speculator.run_ahead is not None:
            self.speculator.run_ahead.report(self.statistics)
        self._take_counts([response for response in responses if response.ending is not None])

    def load_params(self, params: Params, version: int) -> None:
        super().load_params(params, version)
        if self._registered:
            self._refresh()

    def _refresh(self) -> None:
        start = time.perf_counter()
        for proposer in self.speculator.proposers:
            proposer.refresh(self.params)
        self.statistics.draft_seconds += time.perf_counter() - start

    # -- leaving ---------------------------------------------------------------------------------------------

    def free(self, responses: Sequence[LiveResponse]) -> None:
        super().free(responses)
        self._take_counts(responses)

    def compact(self, batch: int) -> list[int]:
        kept = super().compact(batch)
        self._drafters.compact(kept, self.batch)
        return kept
