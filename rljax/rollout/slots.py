"""The slots of a decode loop: the decode state, the response in each slot, and the pass over them.

`Slots` decodes plainly. `SpeculativeSlots` extends it: drafters see all that happens to the slots and their
responses, and a pass may verify their drafts.
"""

import contextlib
import dataclasses
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from drafters.arrays import padded
from drafters.base import DraftRequest
from rljax.engine.appending import Continuation
from rljax.engine.engine import DecodeEngine
from rljax.engine.host_sync import Assignment, DecodeResult, Pending
from rljax.engine.state import DecodeState, Prefix
from rljax.models.transformer import Params
from rljax.requests import DecodeStatistics, Request
from rljax.rollout.live_response import LiveResponse
from rljax.rollout.sources.turns import Answered
from rljax.speculation.drafter_calls import drafter_call
from rljax.speculation.proposals import ActiveSlots
from rljax.speculation.speculative_pass import VerifyingPass
from rljax.speculation.speculator import Speculator


@dataclasses.dataclass(frozen=True, eq=False)
class Prefilled:
    """Prefilled prompts, with the results of the drafters' prefill (`DrafterSlots.prefill`)."""

    prefix: Prefix
    for_drafters: Mapping[str, Any]


class Pass(NamedTuple):
    """What a pass is to be."""

    slots: Sequence[int]  # all that decode
    until_active: int  # plain steps end once no more than so many slots are active
    most_steps: int | None  # plain steps at most; None for the engine's `decode_steps_per_sync`
    is_tail: bool  # no response waits for a slot
    shrinks: bool  # the batch could be smaller, once no pass is in flight
    reads_later: bool  # plain steps may begin before the last ones' results are read
    yielding_weight: float  # value of a token of a response that yields, as a share of another's


class Collected(NamedTuple):
    """What a pass over `slots` has sampled."""

    result: DecodeResult
    slots: Sequence[int]


class _Call(NamedTuple):
    """Plain steps of `slots` that were given to the device at a time."""

    pending: Pending
    slots: Sequence[int]
    begun: float


class Slots:
    """The slots, decoded by plain steps.

    Args:
      params: weights from `engine.load_params`.

    Attributes:
      state: the decode state; None while nothing is decoded.
      has_history: whether responses to one prompt may be drafted from one another.
    """

    has_history = False

    def __init__(self, engine: DecodeEngine, params: Params, version: int) -> None:
        self.engine, self.params, self.version = engine, params, version
        self.statistics = DecodeStatistics()
        self.state: DecodeState | None = None
        self._calls: list[_Call] = []  # of plain decoding in flight: none, or one where it is read later
        self._last_end = 0.0  # when the last of them was over
        self.responses: list[LiveResponse | None] = []

    @property
    def batch(self) -> int:
        """Slots of the decode state; 0 without one."""
        return 0 if self.state is None else self.state.batch

    @property
    def length(self) -> int:
        """Cache length of the decode state; 0 without one."""
        return 0 if self.state is None else self.state.cache.length

    @property
    def in_flight(self) -> Sequence[int]:
        """Slots of the pass that the device is at; none between two passes."""
        return [slot for call in self._calls for slot in call.slots]

    @property
    def busy(self) -> list[int]:
        """Slots with a response."""
        return [slot for slot, response in enumerate(self.responses) if response is not None]

    @property
    def idle(self) -> list[int]:
        """Slots without one."""
        return [slot for slot, response in enumerate(self.responses) if response is None]

    @property
    def running(self) -> list[int]:
        """Slots with a response that yields to no other."""
        return [slot for slot, response in self._decoded() if not response.yields]

    @property
    def yielding(self) -> list[LiveResponse]:
        """Responses in slots that yield to others."""
        return [response for _, response in self._decoded() if response.yields]

    def _decoded(self) -> Iterator[tuple[int, LiveResponse]]:
        return ((slot, each) for slot, each in enumerate(self.responses) if each is not None)

    # -- joining ---------------------------------------------------------------------------------------------

    def admit(
        self, waiting: Collection[LiveResponse], known: Sequence[LiveResponse], most: int, first: int
    ) -> None:
        """Makes room for `waiting` responses, as many as `most` slots take; the first state has `first` slots
        at least. All of the loop's responses are `known`; those that yield come last.
        """
        busy = len(self.busy)
        needed = min(most, busy + len(waiting))
        if needed == busy:
            return
        longest = max(response.positions for response in waiting) + 1
        if not self.batch:
            self.state = self.engine.start_state(max(needed, first), longest)
            self.responses = [None] * needed
        if self.batch < self.engine.buckets.batch_for(needed):
            self.state = self.engine.widen(self.state, needed)
        while self.length < self.engine.buckets.cache_for(longest):
            self.grow()
        if len(self.responses) < needed:
            self.responses += [None] * (self.batch - len(self.responses))

    def prefill(self, prompts: Sequence[tuple[int, ...]]) -> Prefilled:
        """Prefills prompts of one prefill length."""
        return Prefilled(self.engine.prefill(self.params, prompts), {})

    def insert(
        self, prefilled: Prefilled, rows: Sequence[tuple[int, int, LiveResponse]]
    ) -> Sequence[Assignment]:
        """Inserts prefilled rows: (row, slot, response) of each."""
        assignments = []
        for row, slot, response in rows:
            request = response.request
            assignments.append(Assignment(row, slot, request.noise_key, response.remaining, request.sampling))
            self.responses[slot], response.slot = response, slot
            response.use_version(self.version)
        self.state = self.engine.bulk_insert(prefilled.prefix, self.state, assignments)
        self._set_counts([response for *_, response in rows if response.tokens])
        return assignments

    def _set_counts(self, responses: Sequence[LiveResponse]) -> None:
        """Tells the penalties which tokens these responses have."""
        if responses and self.engine.sampling.penalizes:
            sampled = {each.slot: np.asarray(each.tokens, np.int32)[each.sampled] for each in responses}
            self.state = self.engine.set_counts(self.state, sampled)

    # -- decoding --------------------------------------------------------------------------------------------

    def decode(self, wanted: Pass) -> list[Collected]:
        """Decodes up to the next host sync. Returns what was sampled, of no pass or of one."""
        earlier, goes_on = self._calls, wanted.reads_later and not wanted.shrinks
        if goes_on or not earlier:
            start = time.perf_counter()
            self.state, pending = self.engine.begin(
                self.params, self.state, wanted.most_steps, wanted.until_active
            )
            self._calls = [*earlier, _Call(pending, wanted.slots, start)]
        return self._finished(len(earlier) if goes_on else 1)

    def finish(self) -> list[Collected]:
        """Waits for the pass in flight. Returns what it has sampled."""
        return self._finished(len(self._calls))

    def _finished(self, count: int) -> list[Collected]:
        """Waits for the first calls. Who has ended in an earlier one has sampled nothing since."""
        calls, self._calls = self._calls[:count], self._calls[count:]
        collected = []
        for call in calls:
            collected.append(
                Collected(self.engine.finish(call.pending), [s for s in call.slots if self.responses[s]])
            )
            begun, self._last_end = max(call.begun, self._last_end), time.perf_counter()
            self.statistics.device_seconds += self._last_end - begun
        return collected

    def keep(
        self, collected: Collected, responses: Sequence[LiveResponse], counts: list[int], stopped: list[int]
    ) -> None:
        """Takes over that so many of the sampled tokens were kept by each response. Those in `stopped` slots
        have ended or pause, although the device would go on; who has ended is in no slot any more.
        """
        if stopped:
            self.state = self.engine.free_resource(self.state, stopped)

    def append(self, answers: Sequence[Answered]) -> None:
        """Goes on behind answers, or ends responses where these do not fit."""
        continuations = []
        for response, ids, ending in answers:
            begin, left = response.positions - 1, response.remaining - len(ids)
            if ending is not None or left <= 0:
                response.ending = ending or "length"
                self.responses[response.slot] = response.slot = None
            else:
                continuations.append(Continuation(response.slot, begin, [response.tokens[-1], *ids], left))
                response.append(ids)
                self.statistics.tool_tokens += len(ids)
        length = max((each.length + len(each.tokens) for each in continuations), default=0)
        while self.length < length:
            self.grow()
        self.state = self.engine.append(self.params, self.state, continuations)
        self._set_counts([response for response, *_ in answers if response.slot is not None])

    def grow(self) -> None:
        """Moves to the next cache bucket."""
        self.state = self.engine.grow(self.state)

    def load_params(self, params: Params, version: int) -> None:
        """Goes on with other weights, over keys and values of the old ones."""
        self.params, self.version = params, version
        for _, response in self._decoded():
            response.use_version(version)

    def drafts_of(self, response: LiveResponse) -> tuple[int, int]:
        """Returns the draft nodes that were verified for a response so far, and the tokens from them."""
        return response.drafted, response.accepted

    # -- leaving ---------------------------------------------------------------------------------------------

    def free(self, responses: Sequence[LiveResponse]) -> None:
        """Stops decoding those of the responses that are in slots."""
        decoded = [response for response in responses if response.slot is not None]
        if decoded:
            self.state = self.engine.free_resource(self.state, [response.slot for response in decoded])
        for response in decoded:
            self.responses[response.slot] = response.slot = None

    def compact(self, batch: int) -> list[int]:
        """Moves to a smaller batch, and returns the former numbers of the slots that are kept. Responses that
        yield keep theirs as far as there is room.
        """
        running = self.running
        yielding = [response.slot for response in self.yielding]
        kept = running + yielding[: batch - len(running)]
        self.state = self.engine.compact(self.state, kept, batch)
        for slot in set(yielding) - set(kept):
            self.responses[slot].slot = None
        self.responses = [self.responses[slot] for slot in kept]
        self.responses += [None] * (self.batch - len(self.responses))
        for slot, response in self._decoded():
            response.slot = slot
        return kept

    def clear(self) -> None:
        """Drops the state: no slot has a response."""
        self.state, self.responses, self._calls = None, [], []


class SpeculativeSlots(Slots):
    """Slots that are decoded by verifying passes and plain steps.

    Args as of `Slots`, and:
      speculator: drafts, and decodes with the drafts.
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
        is_coupled = self.engine.verification == "coupled"
        return [
            DraftRequest(
                each.prompt_ids,
                each.noise_key if is_coupled else None,
                self.speculator.idle.recall(each.noise_key),
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
        self.speculator.idle.report(self.statistics)
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
