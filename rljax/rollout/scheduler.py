"""Continuous batching: which request decodes in which slot, and when.

The host loop around `DecodeEngine`. Waiting requests take freed slots; a prompt is prefilled once for all
its requests; when nothing waits, the batch is compacted into ever smaller buckets as responses end, and the
cache grows bucket by bucket. None of it changes a token (see `rljax/sampling/noise.py`), only the time they
take.
"""

import collections
import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rljax.engine.appending import Continuation
from rljax.engine.engine import DecodeEngine
from rljax.engine.host_sync import Assignment, DecodeResult
from rljax.engine.state import DecodeState, Prefix
from rljax.errors import PolicyError
from rljax.models.transformer import Params
from rljax.requests import Completion, DecodeStatistics, Request
from rljax.response_lengths import ResponseLengths
from rljax.rollout.running import RunningRequests
from rljax.rollout.stop_strings import StopStrings
from rljax.rollout.tool_turns import ToolTurns
from rljax.speculation.proposals import ActiveSlots
from rljax.speculation.speculative_pass import VerifyingPass
from rljax.speculation.speculator import Speculator
from rljax.tools.markup import ToolCall
from rljax.tools.use import ToolUse

OnProgress = Callable[[int, int], None]
"""Called at every look from the host with (tokens sampled, requests finished)."""

OnFinished = Callable[[int, Completion], None]
"""Called with each request's place in the list and its response, as soon as that has ended."""

_REFILL_SHARE = 8  # with requests waiting, look when an eighth of the slots is free


class Scheduler:
    """Decodes a list of requests to the end.

    Args:
      engine: the decode engine.
      max_slots: requests decoded at a time.
      stop_strings: see `StopStrings`; None for none.
      speculator: decodes with drafts; None for plain decoding.
      overlap: draft for one half of the slots while the device verifies the other.
      tools: what responses may call; None for nothing.
    """

    def __init__(
        self,
        engine: DecodeEngine,
        max_slots: int,
        stop_strings: StopStrings | None = None,
        speculator: Speculator | None = None,
        overlap: bool = False,
        tools: ToolUse | None = None,
    ) -> None:
        self.engine = engine
        self.max_slots = max_slots
        self.stop_strings = stop_strings
        self.speculator = speculator
        self.overlap = overlap
        self.tools = tools
        # With drafts: of training rollouts, which checkpoints keep; the order decides what is drafted from.
        self.lengths = ResponseLengths() if speculator is None else speculator.lengths

    def run(
        self,
        params: Params,
        requests: Sequence[Request],
        on_progress: OnProgress | None = None,
        on_finished: OnFinished | None = None,
    ) -> tuple[list[Completion], DecodeStatistics]:
        """Completions in the order of `requests`.

        Args:
          params: weights from `engine.load_params`.
          requests: what to sample.
          on_progress: see `OnProgress`.
          on_finished: see `OnFinished`.

        Raises:
          ValueError: a request that cannot fit: an empty prompt, no response tokens, or more positions than
            the largest cache bucket.
        """
        limit = self.engine.buckets.cache[-1]
        for request in requests:
            if not request.prompt_ids or request.max_response < 1:
                raise ValueError("a request needs a prompt and room for at least one response token")
            if len(request.prompt_ids) + request.max_response > limit:
                raise ValueError(
                    f"a request of {len(request.prompt_ids)} + {request.max_response} tokens exceeds the "
                    f"largest cache bucket, {limit}"
                )
        return _Run(self, params, requests, on_progress, on_finished).finish()


@dataclasses.dataclass(frozen=True, eq=False)
class _Prefilled:
    """Prompts that can be inserted, and what drafters want to know of them."""

    prefix: Prefix
    for_drafters: list[Any]


class _Run:
    """The state of one `Scheduler.run`."""

    def __init__(
        self,
        scheduler: Scheduler,
        params: Params,
        requests: Sequence[Request],
        on_progress: OnProgress | None,
        on_finished: OnFinished | None,
    ) -> None:
        self.engine = scheduler.engine
        self.max_slots = scheduler.max_slots
        self.stop_strings = scheduler.stop_strings
        self.speculator = scheduler.speculator
        self.overlap = scheduler.overlap and scheduler.speculator is not None
        self.lengths = scheduler.lengths
        self.params = params
        self.run_ahead = None if self.speculator is None else self.speculator.run_ahead
        upcoming = () if self.run_ahead is None else self.run_ahead.upcoming
        self.wanted = len(requests)  # the others are only sampled ahead
        self.requests = requests = [*requests, *upcoming]
        self.on_progress, self.on_finished = on_progress, on_finished
        self.statistics = DecodeStatistics()
        self.turns = None if scheduler.tools is None else ToolTurns(scheduler.tools, self.statistics)
        self.running_over_time = RunningRequests()
        by_prompt: dict[tuple[int, ...], list[int]] = {}
        for index, request in enumerate(requests[: self.wanted]):
            by_prompt.setdefault(request.prompt_ids, []).append(index)
        longest_first = sorted(by_prompt.items(), key=lambda item: -scheduler.lengths.expected(item[0]))
        self.prompts = collections.deque(longest_first)  # not yet prefilled
        self.upcoming = collections.deque(range(self.wanted, len(requests)))
        self.ready: collections.deque[tuple[_Prefilled, int, int]] = collections.deque()  # row, request
        self.slots: list[int | None] = [None] * min(scheduler.max_slots, self.wanted)
        self.tokens: list[list[int]] = [[] for _ in requests]
        self.logprobs: list[list[float]] = [[] for _ in requests]
        self.reasons: list[str | None] = [None] * len(requests)
        self.finished = 0

    @property
    def waiting(self) -> bool:
        return bool(self.ready or self.prompts)

    @property
    def busy(self) -> list[int]:
        """Slots with a request."""
        return [slot for slot, request in enumerate(self.slots) if request is not None]

    @property
    def decoding(self) -> list[int]:
        """Slots with a request that does not wait for a tool."""
        paused = () if self.turns is None else self.turns.paused
        return [slot for slot in self.busy if self.slots[slot] not in paused]

    @property
    def running(self) -> list[int]:
        """Slots with a request that is wanted now."""
        return [slot for slot in self.busy if self.slots[slot] < self.wanted]

    def finish(self) -> tuple[list[Completion], DecodeStatistics]:
        if self.wanted:
            longest = max(len(request.prompt_ids) for request in self.requests[: self.wanted])
            state = self.engine.init_state(self.max_slots, longest + 1)
            if self.speculator is not None:
                self.speculator.begin(self.params, self.requests, self.wanted, state.batch, self.statistics)
            under_way = None
            while self.waiting or self.running:
                state = self.fill(state)
                if under_way is None:
                    state = self.compact(state)
                state = self.fill_ahead(state)
                if self.turns is not None:
                    state = self.answer(state, alone=under_way is None and not self.decoding)
                    if under_way is None and not self.decoding:
                        continue
                if self.speculator is not None and not self.waiting:
                    self.speculator.spare(len(self.running))
                if self.overlap:
                    state, under_way = self.alternate(state, under_way)
                else:
                    decoding = self.decoding
                    state, result = self.decode(state)
                    state = self.collect(state, result, decoding)
            if under_way is not None:  # over requests that were only sampled ahead
                self.collect(state, self.speculator.finish(under_way), under_way.active.slots)
            if self.wanted < len(self.requests):
                ahead = range(self.wanted, len(self.requests))
                self.run_ahead.keep([(self.requests[index], self.tokens[index]) for index in ahead])
            self.statistics.running.append(self.running_over_time.points())
        completions = [self.completion(index) for index in range(self.wanted)]
        if self.speculator is None:
            for request, completion in zip(self.requests, completions, strict=True):
                self.lengths.learn(request.prompt_ids, len(completion.response_ids))
        return completions, self.statistics

    def completion(self, index: int) -> Completion:
        return Completion(
            response_ids=np.asarray(self.tokens[index], np.int32),
            logprobs=np.asarray(self.logprobs[index], np.float32),
            finish_reason=self.reasons[index],
            own=None if self.turns is None else self.turns.own(index, len(self.tokens[index])),
            **self.draft_counts(index),
        )

    def draft_counts(self, index: int) -> dict[str, int]:
        if self.speculator is None:
            return {}
        drafted, accepted = self.speculator.counts(index)
        return {"drafted": drafted, "accepted": accepted}

    def decode(self, state: DecodeState) -> tuple[DecodeState, DecodeResult]:
        """The next tokens of every slot, and the time for it."""
        until_active = self.look_when_active(state)
        if self.speculator is not None:
            return self.speculator.decode(self.params, state, self.active(self.decoding), until_active)
        start = time.perf_counter()
        state, result = self.engine.generate(self.params, state, until_active=until_active)
        self.statistics.device_seconds += time.perf_counter() - start
        return state, result

    def alternate(
        self, state: DecodeState, under_way: VerifyingPass | None
    ) -> tuple[DecodeState, VerifyingPass | None]:
        """Drafts for slots that the device is not at, and gives it their pass behind the one under way; then
        takes over what that one brought.
        """
        taken = () if under_way is None else under_way.active.slots
        decoding = self.decoding
        idle = [slot for slot in decoding if slot not in taken]
        half = idle[: -(-len(decoding) // 2)]
        following = None
        if half and (under_way is None or not self.compacts_to(state)):
            state, following = self.speculator.start(self.params, state, self.active(half))
        if under_way is not None:
            state = self.collect(state, self.speculator.finish(under_way), under_way.active.slots)
        elif following is None:  # nobody is under way: a plain step of all slots
            until_active = self.look_when_active(state)
            active = self.active(decoding)
            state, result = self.speculator.decode_plainly(self.params, state, active, until_active)
            state = self.collect(state, result, decoding)
        return state, following

    def active(self, slots: Sequence[int]) -> ActiveSlots:
        """What the speculator is told of `slots`."""
        slots = np.asarray(slots, np.int32)
        requests = np.asarray([self.slots[slot] for slot in slots], np.int32)
        positions = [len(self.requests[i].prompt_ids) + len(self.tokens[i]) for i in requests]
        wanted = requests < self.wanted
        decoding = sum(self.slots[slot] < self.wanted for slot in self.decoding)
        standing_by = decoding - int(wanted.sum())
        return ActiveSlots(slots, requests, np.asarray(positions, np.int32), wanted, standing_by)

    def look_when_active(self, state: DecodeState) -> int:
        """How few active slots are a reason to look: enough free ones to refill, or a smaller bucket to move
        to.
        """
        active = len(self.decoding)
        if self.waiting:
            return active - max(1, len(self.slots) // _REFILL_SHARE)
        if len(self.busy) > len(self.running):
            return active - 1  # it may be a wanted one that ends
        smaller = [bucket for bucket in self.engine.buckets.batch if bucket < min(active, state.batch)]
        return smaller[-1] if smaller else 0

    def fill(self, state: DecodeState) -> DecodeState:
        """Waiting requests into free slots."""
        free = collections.deque(slot for slot, request in enumerate(self.slots) if request is None)
        while free and self.waiting:
            if not self.ready:
                self.make_ready(len(free))
            prefilled = self.ready[0][0]
            rows = []
            while free and self.ready and self.ready[0][0] is prefilled:
                _, row, index = self.ready.popleft()
                rows.append((row, free.popleft(), index))
            state = self.insert(state, prefilled, rows)
        return state

    def insert(
        self, state: DecodeState, prefilled: _Prefilled, rows: Sequence[tuple[int, int, int]]
    ) -> DecodeState:
        """Prompts into slots: (row, slot, request) of each."""
        assignments = []
        for row, slot, index in rows:
            request = self.requests[index]
            assignments.append(Assignment(row, slot, request.noise_key, request.max_response))
            self.slots[slot] = index
        state = self.engine.bulk_insert(prefilled.prefix, state, assignments)
        if self.speculator is not None:
            self.speculator.insert(prefilled.for_drafters, assignments, [index for _, _, index in rows])
        return state

    def fill_ahead(self, state: DecodeState) -> DecodeState:
        """Upcoming requests into idle slots, once few wanted ones are left."""
        ahead, statistics = self.run_ahead, self.statistics
        free = [slot for slot, request in enumerate(self.slots) if request is None]
        if ahead is None or self.waiting or not self.upcoming or not free or len(self.running) > ahead.below:
            return state
        spent = statistics.host_seconds + statistics.device_seconds
        if statistics.ahead_seconds > ahead.max_share * spent:
            return state
        start = time.perf_counter()
        prompt = self.requests[self.upcoming[0]].prompt_ids
        if len(prompt) < state.cache.length:
            prefilled, rows = self.prefill([prompt]), []
            while free and self.upcoming and self.requests[self.upcoming[0]].prompt_ids == prompt:
                rows.append((0, free.pop(0), self.upcoming.popleft()))
            state = self.insert(state, prefilled, rows)
        statistics.ahead_seconds += time.perf_counter() - start
        return state

    def prefill(self, prompts: Sequence[tuple[int, ...]]) -> _Prefilled:
        """Prompts of one prefill length."""
        prefix = self.engine.prefill(self.params, prompts)
        return _Prefilled(prefix, self.speculator.prefill(prefix, prompts) if self.speculator else [])

    def make_ready(self, wanted: int) -> None:
        """Prefills prompts: enough for `wanted` slots or, where samples of a prompt draft from one another,
        one for every slot there is.
        """
        batch: list[tuple[tuple[int, ...], list[int]]] = []
        members, mates = 0, self.speculator is not None and self.speculator.has_history
        while self.prompts and (len(batch) < self.max_slots if mates else members < wanted):
            batch.append(self.prompts.popleft())
            members += len(batch[-1][1])
        by_length: dict[int, list[tuple[tuple[int, ...], list[int]]]] = {}
        for prompt, indices in batch:
            by_length.setdefault(self.engine.prefill_length(len(prompt)), []).append((prompt, indices))
        rows = []
        for alike in by_length.values():
            prefilled = self.prefill([prompt for prompt, _ in alike])
            self.statistics.prefilled_tokens += sum(len(prompt) for prompt, _ in alike)
            rows += [[(prefilled, row, index) for index in own] for row, (_, own) in enumerate(alike)]
        if mates:  # the first samples of all these prompts: the others draft from them
            self.ready.extend(own.pop(0) for own in rows)
        self.ready.extend(itertools.chain.from_iterable(rows))

    def collect(self, state: DecodeState, result: DecodeResult, slots: Sequence[int]) -> DecodeState:
        """Takes over what was sampled in `slots`, frees those of ended responses, makes room for the rest."""
        statistics = self.statistics
        self.running_over_time.add(len(self.running))
        statistics.steps += result.steps
        statistics.rows += result.rows
        statistics.visits += 1
        if not np.isfinite(result.logprobs[slots]).all():
            raise PolicyError(
                "policy: sampled a token with a log-probability that is not finite: what its weights compute"
                " overflows; go on from an earlier checkpoint, with a smaller optimizer.learning_rate"
            )
        stopped, kept = [], []
        requests = np.asarray([self.slots[slot] for slot in slots], np.int32)
        for slot in slots:
            index = self.slots[slot]
            sampled = result.tokens[slot][result.tokens[slot] >= 0]
            tokens, logprobs = self.tokens[index], self.logprobs[index]
            known = len(tokens)
            tokens.extend(sampled.tolist())
            logprobs.extend(result.logprobs[slot][: len(sampled)].tolist())
            end, call = self.find_end(index, known)
            if end is not None:
                del tokens[end:], logprobs[end:]
                if result.active[slot]:
                    stopped.append(slot)
            kept.append(len(tokens) - known)
            if call is not None and index < self.wanted and end < self.requests[index].max_response:
                self.turns.call(index, call)
                continue
            if end is None and result.active[slot]:
                continue
            if tokens[-1] in self.engine.eos_token_ids:
                self.reasons[index] = "eos"
            else:
                self.reasons[index] = "length" if end is None or call is not None else "stop"
            self.slots[slot] = None
            self.finished += index < self.wanted
        wanted = int(np.asarray(kept)[requests < self.wanted].sum())
        statistics.tokens += wanted
        statistics.ahead_tokens += sum(kept) - wanted
        if self.speculator is not None:
            ended = np.asarray([self.slots[slot] is None for slot in slots], bool)
            self.speculator.observe(requests, result.tokens[slots], np.asarray(kept, np.int32), ended)
        self.report_finished(slots, requests.tolist())
        if self.on_progress is not None:
            self.on_progress(statistics.tokens, self.finished)
        return self.grow(self.engine.free_resource(state, stopped) if stopped else state, result, slots)

    def report_finished(self, slots: Sequence[int], requests: Sequence[int]) -> None:
        """Hands out the responses of these requests, each in its slot until now, that have ended."""
        if self.on_finished is not None:
            for slot, index in zip(slots, requests, strict=True):
                if self.slots[slot] is None and index < self.wanted:
                    self.on_finished(index, self.completion(index))

    def find_end(self, index: int, known: int) -> tuple[int | None, ToolCall | None]:
        """Where a stop string or a call ends what a request has sampled behind its first `known` tokens, if
        one does; and the call.
        """
        tokens, first, call = self.tokens[index], 0, None
        if self.turns is not None:
            first, call = self.turns.begin(index), self.turns.find(index, tokens, known)
        end = None if self.stop_strings is None else self.stop_strings.find(tokens, known, first)
        if call is not None and (end is None or call.end < end):
            return call.end, call
        return end, None

    def answer(self, state: DecodeState, alone: bool) -> DecodeState:
        """Responses go on behind the answers that their tools have given, or end where these do not fit."""
        slot_of = {index: slot for slot, index in enumerate(self.slots)}
        answers = self.turns.answers(alone)
        if not answers:
            return state
        slots, sizes, appended, continuations = [], [], [], []
        for index, ids in answers:
            request, tokens = self.requests[index], self.tokens[index]
            begin, slot = len(tokens), slot_of[index]
            size = len(request.prompt_ids) + begin
            if begin + len(ids) >= request.max_response:
                ids, self.reasons[index], self.slots[slot] = [], "length", None
                self.finished += 1
            else:
                left = request.max_response - begin - len(ids)
                continuations.append(Continuation(slot, size - 1, [tokens[-1], *ids], left))
                self.turns.answered(index, begin, begin + len(ids))
                tokens.extend(ids)
                self.logprobs[index].extend([0.0] * len(ids))
            slots.append(slot)
            sizes.append(size)
            appended.append(ids)
        length = max((each.length + len(each.tokens) for each in continuations), default=0)
        while state.cache.length < length:
            state = self.engine.grow(state)
        state = self.engine.append(self.params, state, continuations)
        if self.speculator is not None:
            indices = [index for index, _ in answers]
            ended = [self.slots[slot] is None for slot in slots]
            self.speculator.append(slots, indices, sizes, appended, ended)
        self.report_finished(slots, [index for index, _ in answers])
        if self.on_progress is not None:
            self.on_progress(self.statistics.tokens, self.finished)
        return state

    def compact(self, state: DecodeState) -> DecodeState:
        """Moves to the smallest batch bucket once nothing waits; what is sampled ahead takes what room is
        left.
        """
        batch = self.compacts_to(state)
        if not batch:
            return state
        running = self.running
        ahead = [slot for slot in self.busy if self.slots[slot] >= self.wanted]
        kept = running + ahead[: batch - len(running)]
        state = self.engine.compact(state, kept)
        if self.speculator is not None:
            self.speculator.compact(kept, state.batch)
        self.slots = [self.slots[slot] for slot in kept]
        self.slots += [None] * (state.batch - len(self.slots))
        return state

    def compacts_to(self, state: DecodeState) -> int:
        """The smaller batch bucket that has become enough, or 0."""
        batch = self.engine.buckets.batch_for(max(len(self.running), 1))
        return 0 if self.waiting or batch == state.batch else batch

    def grow(self, state: DecodeState, result: DecodeResult, slots: Sequence[int]) -> DecodeState:
        """Moves to the next cache bucket once a response has filled this one; what is sampled ahead ends
        there.
        """
        paused = () if self.turns is None else self.turns.paused
        busy = [slot for slot in slots if self.slots[slot] is not None and self.slots[slot] not in paused]
        full = [slot for slot in busy if result.lengths[slot] >= state.cache.length]
        if any(self.slots[slot] < self.wanted for slot in full):
            return self.engine.grow(state)
        for slot in full:
            self.slots[slot] = None
        return self.engine.free_resource(state, full) if full else state
