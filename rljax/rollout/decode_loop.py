"""The decode loop: continuous batching over an open queue of requests.

    loop = DecodeLoop(engine, params, max_slots=64, on_sync=deliver)
    loop.submit([LiveResponse(request)])        # between any two calls of `step`
    while loop.waiting or loop.running:
        loop.step()                             # up to the next host sync

Requests join and leave at any host sync. Waiting ones take free slots, in a state that is widened and
lengthened for them; a prompt is prefilled once for all its requests. Once nothing waits, the batch is
compacted into ever smaller buckets, and the cache grows bucket by bucket. None of it changes a token, only
the time that it takes: a token depends on its request and its prefix alone (see `rljax/sampling/noise.py`).

`Scheduler` decodes a list to its end with it, and `rljax/serving/worker.py` serves.
"""

import collections
import dataclasses
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import numpy as np

from rljax.engine.appending import Continuation
from rljax.engine.buckets import Buckets
from rljax.engine.engine import DecodeEngine
from rljax.engine.host_sync import Assignment, DecodeResult
from rljax.engine.state import DecodeState
from rljax.environments.use import EnvironmentUse
from rljax.errors import PolicyError
from rljax.models.transformer import Params
from rljax.processes import agree
from rljax.requests import DecodeStatistics, PartialResponse, Request
from rljax.response_lengths import ResponseLengths
from rljax.rollout.environment_turns import EnvironmentTurns
from rljax.rollout.live_response import LiveResponse
from rljax.rollout.prefill_queue import Prefilled, PrefillQueue
from rljax.rollout.running import RunningRequests
from rljax.rollout.tool_turns import Pauses, ToolTurns
from rljax.speculation.proposals import ActiveSlots
from rljax.speculation.run_ahead import saved_per_token
from rljax.speculation.speculative_pass import VerifyingPass
from rljax.speculation.speculator import Speculator
from rljax.tools.markup import ToolCall
from rljax.tools.use import ToolUse

OnSync = Callable[[Sequence[LiveResponse]], None]
"""Called after every host sync with the responses that got tokens, ended, or were cancelled."""

_REFILL_SHARE = 8
_TOOL_WAIT = 0.02  # seconds in which a loop that others may join waits for a tool while nothing decodes


@dataclasses.dataclass(frozen=True)
class LoopPolicy:
    """The choices in which a list that is decoded to its end and a server differ.

    Attributes:
      sync_at_every_ending: a host sync as soon as any response ends, so that it is delivered at once and its
        slot is free for a newcomer. False syncs when an eighth of the slots can be refilled or, once nothing
        waits, when the active slots fit a smaller batch bucket: fewer syncs, more throughput.
      most_steps: plain decode steps between two host syncs; None for the engine's `decode_steps_per_sync`.
      start_full: the first state has all slots, and a cache for the longest prompt that waits, so that
        prompts are inserted into states of one batch bucket only. False makes it as large as needed.
      longest_first: starts prompts in the order of their expected length; None in the order of arrival.
    """

    sync_at_every_ending: bool = False
    most_steps: int | None = None
    start_full: bool = False
    longest_first: ResponseLengths | None = None


def check_request(request: Request, buckets: Buckets) -> None:
    """Raises a ValueError for an empty prompt, no response tokens, or more positions than the largest cache
    bucket.
    """
    prompt, response, limit = len(request.prompt_ids), request.max_response, buckets.cache[-1]
    if not prompt or response < 1:
        raise ValueError("a request needs a prompt and room for at least one response token")
    if prompt + response > limit:
        raise ValueError(
            f"a request of {prompt} + {response} tokens exceeds the largest cache bucket, {limit}"
        )


class DecodeLoop:
    """Decodes requests that join and leave at any host sync. All methods are for one thread.

    Args:
      engine: the decode engine.
      params: weights from `engine.load_params`; with copy=True where a trainer goes on with them.
      max_slots: responses decoded at a time.
      speculator: decodes with drafts; None for plain decoding.
      overlap: draft for one half of the slots while the device verifies the other.
      tools: tools that responses may call, or the environment whose episodes they are; None for neither.
      policy: see `LoopPolicy`.
      on_sync: see `OnSync`.
      version: the number of the weights.

    Attributes:
      statistics: counts of all decoding so far.
      running_over_time: number of running responses over time.
      state: the decode state; None while nothing is decoded.
      slots: the response in each slot.
      expects_more: whether others will be submitted soon, although nothing waits: then the batch is not
        compacted, and a host sync comes as if they waited.
    """

    expects_more = False

    def __init__(
        self,
        engine: DecodeEngine,
        params: Params,
        max_slots: int,
        speculator: Speculator | None = None,
        overlap: bool = False,
        tools: ToolUse | EnvironmentUse | None = None,
        policy: LoopPolicy = LoopPolicy(),
        on_sync: OnSync | None = None,
        version: int = 0,
    ) -> None:
        self.engine, self.params, self.max_slots = engine, params, max_slots
        self.speculator, self.overlap = speculator, overlap and speculator is not None
        self.policy, self.on_sync, self.version = policy, on_sync, version
        self.statistics = DecodeStatistics()
        self.running_over_time = RunningRequests()
        self.state: DecodeState | None = None
        self.slots: list[LiveResponse | None] = []
        self._tools: Pauses | None = None
        if isinstance(tools, EnvironmentUse):
            self._tools = EnvironmentTurns(tools, self.statistics, engine.eos_token_ids)
        elif tools is not None:
            self._tools = ToolTurns(tools, self.statistics)
        self._run_ahead = None if speculator is None else speculator.run_ahead
        self._live: dict[LiveResponse, None] = {}  # waiting and decoded, in the order of arrival
        self._queue = PrefillQueue(engine, max_slots, speculator, self.statistics, policy.longest_first)
        self._upcoming: collections.deque[LiveResponse] = collections.deque()  # to be sampled ahead
        self._ahead: list[LiveResponse] = []
        self._known: list[LiveResponse] = []  # to drafters, by number
        self._begun = self._news = False
        self._under_way: VerifyingPass | None = None

    # -- who is in the loop ----------------------------------------------------------------------------------

    def submit(self, responses: Sequence[LiveResponse]) -> None:
        """Takes responses, new ones or such that began elsewhere (`LiveResponse.resume`). Those that arrive
        together with the same tokens share one prefill.

        Raises:
          ValueError: a request that cannot fit, sampling settings that the engine does not take, or a
            response that has ended already.
        """
        for response in responses:
            check_request(response.request, self.engine.buckets)
            self.engine.check_sampling(response.request.sampling)
            if response.remaining < 1 or (
                response.tokens and response.tokens[-1] in self.engine.eos_token_ids
            ):
                raise ValueError("the response has ended: nothing is left to decode")
        self._live.update(dict.fromkeys(responses))
        self._queue.add(responses)
        self._news = True

    def sample_ahead(self, requests: Sequence[Request]) -> None:
        """Decodes these in idle slots, as drafts for a later rollout, in this order; see `RunAhead`."""
        self._ahead = [LiveResponse(request, ahead=True) for request in requests]
        self._upcoming = collections.deque(self._ahead)

    def sampled_ahead(self) -> list[LiveResponse]:
        """Returns the responses to the requests of `sample_ahead`, as far as they have been sampled."""
        return self._ahead

    def measure_ahead(self) -> None:
        """Counts what this rollout had of the tokens that were sampled ahead for it."""
        if self._run_ahead is not None and self._begun:
            seconds = self._run_ahead.measure(self._saved_per_token(), self.statistics)
            self.statistics.ahead_saved_seconds += seconds

    def cancel(self, responses: Iterable[LiveResponse]) -> None:
        """Ends responses as "cancelled", unless they have ended; their slots are free."""
        self.finish_pass()
        cancelled = [response for response in responses if response in self._live]
        self._remove(cancelled)
        for response in cancelled:
            response.ending = "cancelled"
        self._tell(cancelled)

    def withdraw(self, response: LiveResponse) -> PartialResponse | None:
        """Takes a response out, for another loop to go on with (`LiveResponse.resume`).

        Returns:
          The response so far; None where it has just ended.

        Raises:
          ValueError: it waits for a tool, whose answer would be lost.
        """
        self.finish_pass()
        if response not in self._live:
            return None
        if response in self._paused:
            raise ValueError(
                "a response that waits for a tool cannot be taken out before the tool has answered"
            )
        self._remove([response])
        return response.partial()

    def load_params(self, params: Params, version: int) -> None:
        """Swaps the weights between two host syncs. Responses under way go on with the new ones, over keys
        and values of the old ones, and record the position (`LiveResponse.versions`).

        Args:
          params: weights from `engine.load_params`.
          version: their number.
        """
        self.finish_pass()
        self.params, self.version = params, version
        for response in self._decoded():
            response.use_version(version)
        self._queue.prefill_again()
        if self._begun:
            start = time.perf_counter()
            for proposer in self.speculator.proposers:
                proposer.refresh(params)
            self.statistics.draft_seconds += time.perf_counter() - start

    @property
    def live(self) -> Collection[LiveResponse]:
        """Responses that wait or are decoded."""
        return self._live.keys()

    @property
    def waiting(self) -> bool:
        """Whether a response waits for a slot."""
        return bool(self._queue)

    @property
    def running(self) -> list[int]:
        """Slots with a response, without those that are sampled ahead."""
        return [slot for slot in self._busy if not self.slots[slot].ahead]

    @property
    def _busy(self) -> list[int]:
        return [slot for slot, response in enumerate(self.slots) if response is not None]

    @property
    def _paused(self) -> set[LiveResponse]:
        """Responses that wait for a tool."""
        return set() if self._tools is None else self._tools.paused

    @property
    def _decoding(self) -> list[int]:
        """Slots with a response that does not wait for a tool."""
        paused = self._paused
        return [slot for slot in self._busy if self.slots[slot] not in paused]

    def _decoded(self) -> Iterator[LiveResponse]:
        return (response for response in self.slots if response is not None)

    # -- a round ---------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Fills free slots, decodes up to the next host sync, and takes over what was sampled."""
        self._fill()
        if self._under_way is None:
            self._compact()
        self._fill_ahead()
        if self._tools is not None and self._busy:
            self._append_answers(alone=self._under_way is None and not self._decoding)
        if self._under_way is None and not self._decoding:  # all wait for tools, or have ended
            self._drop_state()
            return
        if self.speculator is not None and not self.waiting:
            self.speculator.spare(len(self.running))
        if self.overlap:
            self._alternate()
        else:
            decoding = self._decoding
            self._collect(self._decode(decoding), decoding)
        self._drop_state()

    def finish_pass(self) -> None:
        """Waits for the pass that overlap has under way, if there is one."""
        if self._under_way is not None:
            under_way, self._under_way = self._under_way, None
            self._collect(self.speculator.decoder.finish(under_way), under_way.active.slots)

    def _drop_state(self) -> None:
        if not self.waiting and not self._busy:
            self.state, self.slots = None, []

    def _decode(self, decoding: Sequence[int]) -> DecodeResult:
        until_active, most_steps = self._sync_when_active(), self.policy.most_steps
        if self.speculator is not None:
            self.state, result = self.speculator.decoder.decode(
                self.params, self.state, self._active(decoding), until_active, most_steps
            )
            return result
        start = time.perf_counter()
        self.state, result = self.engine.generate(self.params, self.state, most_steps, until_active)
        self.statistics.device_seconds += time.perf_counter() - start
        return result

    def _alternate(self) -> None:
        """Drafts for slots that the device is not at, and queues their pass behind the one under way; then
        collects the results of that one.
        """
        under_way = self._under_way
        taken = () if under_way is None else under_way.active.slots
        decoding = self._decoding
        idle = [slot for slot in decoding if slot not in taken]
        half = idle[: -(-len(decoding) // 2)]
        following = None
        if half and (under_way is None or not self._compacts_to()):
            self.state, following = self.speculator.decoder.start(self.params, self.state, self._active(half))
        self._under_way = following
        if under_way is not None:
            self._collect(self.speculator.decoder.finish(under_way), under_way.active.slots)
        elif following is None:  # no pass is under way: plain steps of all slots
            until_active, active = self._sync_when_active(), self._active(decoding)
            self.state, result = self.speculator.decoder.decode_plainly(
                self.params, self.state, active, until_active, self.policy.most_steps
            )
            self._collect(result, decoding)

    def _active(self, slots: Sequence[int]) -> ActiveSlots:
        """Returns the speculator's view of `slots`."""
        responses = [self.slots[slot] for slot in slots]
        wanted = np.asarray([not response.ahead for response in responses], bool)
        decoding = sum(not self.slots[slot].ahead for slot in self._decoding)
        return ActiveSlots(
            np.asarray(slots, np.int32),
            np.asarray([response.number for response in responses], np.int32),
            np.asarray([response.positions for response in responses], np.int32),
            wanted,
            decoding - int(wanted.sum()),
            0.0 if wanted.all() else self._run_ahead.weight(self._saved_per_token(), self.statistics),
        )

    def _sync_when_active(self) -> int:
        """Returns the number of active slots at which decoding stops for a host sync."""
        active = len(self._decoding)
        if self.policy.sync_at_every_ending:
            return active - 1
        if self.waiting or self.expects_more:
            return active - max(1, len(self.slots) // _REFILL_SHARE)
        if len(self._busy) > len(self.running):
            return active - 1  # the next to end may be one that is not sampled ahead
        smaller = [bucket for bucket in self.engine.buckets.batch if bucket < min(active, self.state.batch)]
        return smaller[-1] if smaller else 0

    # -- joining ---------------------------------------------------------------------------------------------

    def _fill(self) -> None:
        """Puts waiting responses into free slots."""
        if not self.waiting:
            return
        if self._news:
            self.finish_pass()  # its results are by the old numbers
        self._end_ahead()
        self._reserve()
        if self._news:
            self._register()
            self._news = False
        free = [slot for slot, response in enumerate(self.slots) if response is None]
        free = free[: max(self.max_slots - len(self._busy), 0)]
        while free and self.waiting:
            prefilled, rows = self._queue.take(self.params, len(free), self.state.batch)
            slots, free = free[: len(rows)], free[len(rows) :]
            self._insert(
                prefilled, [(row, slot, each) for (row, each), slot in zip(rows, slots, strict=True)]
            )

    def _reserve(self) -> None:
        """Makes room in the decode state for as many waiting responses as may be decoded."""
        engine, busy = self.engine, len(self._busy)
        waiting = list(self._queue)
        needed = min(self.max_slots, busy + len(waiting))
        if needed == busy:
            return
        longest = max(response.positions for response in waiting) + 1
        if self.state is None:
            self.state = engine.start_state(self.max_slots if self.policy.start_full else needed, longest)
            self.slots = [None] * needed
            if self._begun:
                self.speculator.restart(self.state.batch)
        if self.state.batch < engine.buckets.batch_for(needed):
            self.finish_pass()
            self.state = engine.widen(self.state, needed)
            if self._begun:
                self.speculator.widen(self.state.batch)
        while self.state.cache.length < engine.buckets.cache_for(longest):
            self.state = engine.grow(self.state)
        if len(self.slots) < needed:
            self.slots += [None] * (self.state.batch - len(self.slots))

    def _register(self) -> None:
        """Numbers the responses of the loop, and tells drafters of them."""
        if self.speculator is None:
            return
        for response in self._known:
            self._take_counts(response)
        wanted = list(self._live)
        self._known = [*wanted, *self._ahead]
        for number, response in enumerate(self._known):
            response.number = number
        requests, tokens = [each.request for each in self._known], [each.tokens for each in self._known]
        if not self._begun:
            self._begun = True
            batch = self.state.batch
            self.speculator.begin(self.params, requests, len(wanted), batch, self.statistics)
            if not any(tokens):
                return
        # Nothing is trained on what is only sampled ahead.
        requests[len(wanted) :] = [
            dataclasses.replace(request, training=False) for request in requests[len(wanted) :]
        ]
        self.speculator.admit(requests, tokens)

    def _take_counts(self, response: LiveResponse) -> None:
        """Adds the drafts of the present registration, and ends it."""
        if self.speculator is not None and response.number is not None:
            drafted, accepted = self.speculator.counts(response.number)
            response.drafted, response.accepted = response.drafted + drafted, response.accepted + accepted
            response.number = None

    def _insert(self, prefilled: Prefilled, rows: Sequence[tuple[int, int, LiveResponse]]) -> None:
        """Inserts prefilled rows: (row, slot, response) of each."""
        assignments = []
        for row, slot, response in rows:
            request = response.request
            assignments.append(Assignment(row, slot, request.noise_key, response.remaining, request.sampling))
            self.slots[slot], response.slot = response, slot
            response.use_version(self.version)
        self.state = self.engine.bulk_insert(prefilled.prefix, self.state, assignments)
        self._set_counts([response for *_, response in rows if response.tokens])
        if self.speculator is not None:
            numbers = [response.number for *_, response in rows]
            self.speculator.insert(prefilled.for_drafters, assignments, numbers)

    def _set_counts(self, responses: Sequence[LiveResponse]) -> None:
        """Tells the penalties which tokens these responses have."""
        if responses and self.engine.sampling.penalizes:
            sampled = {
                response.slot: np.asarray(response.tokens, np.int32)[response.sampled]
                for response in responses
            }
            self.state = self.engine.set_counts(self.state, sampled)

    # -- sampling ahead --------------------------------------------------------------------------------------

    def _fill_ahead(self) -> None:
        """Puts upcoming requests into idle slots, once few others are left."""
        free = [slot for slot, response in enumerate(self.slots) if response is None]
        if not free or not self._may_fill_ahead():
            return
        start = time.perf_counter()
        prompt = self._upcoming[0].request.prompt_ids
        if len(prompt) < self.state.cache.length:
            prefilled, rows = self._queue.prefill(self.params, [prompt]), []
            while free and self._upcoming and self._upcoming[0].request.prompt_ids == prompt:
                rows.append((0, free.pop(0), self._upcoming.popleft()))
            self._insert(prefilled, rows)
        self.statistics.ahead_seconds += time.perf_counter() - start

    def _may_fill_ahead(self) -> bool:
        """Whether upcoming requests may be put into idle slots now."""
        ahead, statistics = self._run_ahead, self.statistics
        if ahead is None or self.waiting or not self._upcoming or len(self.running) > ahead.below:
            return False
        spent, decoding = agree(statistics.ahead_seconds, statistics.host_seconds + statistics.device_seconds)
        return spent <= ahead.max_share * decoding

    def _saved_per_token(self) -> float:
        """Returns the seconds that a token saves once it is accepted as a draft (`saved_per_token`)."""
        speculator, buckets = self.speculator, self.engine.buckets
        length = buckets.cache[0] if self.state is None else self.state.cache.length
        return saved_per_token(
            self.statistics, length, buckets, speculator.decoder.times, speculator.max_batch
        )

    def _count_wide(self, steps: int) -> None:
        """Adds the time by which so many passes took longer, because the batch is wide for sampling ahead."""
        smallest = self.engine.buckets.batch_for(max(len(self.running), 1))
        if self.waiting or smallest >= self.state.batch or len(self._busy) == len(self.running):
            return
        times, length = self.speculator.decoder.times, self.state.cache.length
        seconds = times.plain(self.state.batch, length) - times.plain(smallest, length)
        self.statistics.ahead_pass_seconds += steps * max(seconds, 0.0)

    def _end_ahead(self) -> None:
        """Frees the slots of responses that are sampled ahead: others wait for them."""
        ahead = [response for response in self._decoded() if response.ahead]
        if ahead:
            self.finish_pass()
            self._free([response for response in ahead if response.slot is not None])

    # -- results ---------------------------------------------------------------------------------------------

    def _collect(self, result: DecodeResult, slots: Sequence[int]) -> None:
        """Takes over the tokens of `slots`, frees those of ended responses, makes room for the rest."""
        statistics = self.statistics
        self.running_over_time.add(len(self.running))
        statistics.steps += result.steps
        statistics.rows += result.rows
        statistics.host_syncs += 1
        if self._run_ahead is not None:
            self._count_wide(result.steps)
        if not np.isfinite(result.logprobs[slots]).all():
            raise PolicyError(
                "policy: sampled a token with a log-probability that is not finite: what its weights compute"
                " overflows; go on from an earlier checkpoint, with a smaller optimizer.learning_rate"
            )

        # Tokens, and what ends responses.
        stopped, kept, responses = [], [], [self.slots[slot] for slot in slots]
        for slot, response in zip(slots, responses, strict=True):
            sampled = result.tokens[slot][result.tokens[slot] >= 0]
            known = len(response.tokens)
            response.tokens.extend(sampled.tolist())
            response.logprobs.extend(result.logprobs[slot][: len(sampled)].tolist())
            end, call = self._find_end(response, known)
            if end is not None:
                del response.tokens[end:], response.logprobs[end:]
                if result.active[slot]:
                    stopped.append(slot)
            count = len(response.tokens) - known
            kept.append(count)
            if result.steps == 1 and (accepted := min(count, len(sampled) - 1)) > 0:  # verified drafts
                response.accepted_spans.append((known, known + accepted))
            if response.ahead:
                statistics.ahead_tokens += count
            else:
                statistics.tokens += count
            room = end is not None and end < response.request.max_response
            if call is not None and not response.ahead and (room or self._tools.takes_last):
                self._tools.call(response, call)
                continue
            if end is None and result.active[slot]:
                continue
            if response.tokens[-1] in self.engine.eos_token_ids:
                response.ending = "eos"
            else:
                response.ending = "length" if end is None or call is not None else "stop"
            self.slots[slot] = response.slot = None

        # Drafters, then whoever waits for the responses.
        if self.speculator is not None:
            numbers = np.asarray([response.number for response in responses], np.int32)
            ended = np.asarray([response.slot is None for response in responses], bool)
            self.speculator.observe(numbers, result.tokens[slots], np.asarray(kept, np.int32), ended)
        if stopped:
            self.state = self.engine.free_resource(self.state, stopped)
        self._tell(responses)

        # Room for the rest.
        paused = self._paused
        busy = [slot for slot in slots if self.slots[slot] is not None and self.slots[slot] not in paused]
        full = [slot for slot in busy if result.lengths[slot] >= self.state.cache.length]
        if any(not self.slots[slot].ahead for slot in full):
            self.state = self.engine.grow(self.state)
        else:  # what is sampled ahead ends there
            self._free([self.slots[slot] for slot in full])

    def _tell(self, responses: Sequence[LiveResponse]) -> None:
        """Lets go of responses that have ended, and hands on what all of them got."""
        for response in responses:
            if response.ending is not None and response in self._live:
                self._take_counts(response)
                del self._live[response]
        if self.on_sync is not None:
            self.on_sync([response for response in responses if not response.ahead])

    def _find_end(self, response: LiveResponse, known: int) -> tuple[int | None, ToolCall | None]:
        """Returns the end of a response that a stop string or a call ends behind its first `known` tokens, or
        None; and the call.
        """
        end = None
        if response.stop is not None:
            end = response.stop.find(response.tokens, known, response.turn_begin)
        call = None if self._tools is None else self._tools.find(response, known, end)
        return (end, None) if call is None else (call.end, call)

    def _append_answers(self, alone: bool) -> None:
        """Goes on behind the answers that tools have given, or ends responses where these do not fit."""
        answers = self._tools.answers(alone, _TOOL_WAIT if self.policy.sync_at_every_ending else None)
        if not answers:
            return
        slots, sizes, appended, continuations = [], [], [], []
        responses = [response for response, *_ in answers]
        for response, ids, ending in answers:
            begin, slot, size = len(response.tokens), response.slot, response.positions
            if ending is not None or len(ids) >= response.remaining:
                ids, response.ending = [], ending or "length"
                self.slots[slot] = response.slot = None
            else:
                left = response.remaining - len(ids)
                continuations.append(Continuation(slot, size - 1, [response.tokens[-1], *ids], left))
                response.tokens.extend(ids)
                response.logprobs.extend([0.0] * len(ids))
                self._tools.appended(response, begin, begin + len(ids))
            slots.append(slot)
            sizes.append(size)
            appended.append(ids)
        length = max((each.length + len(each.tokens) for each in continuations), default=0)
        while self.state.cache.length < length:
            self.state = self.engine.grow(self.state)
        self.state = self.engine.append(self.params, self.state, continuations)
        self._set_counts([response for response in responses if response.slot is not None])
        if self.speculator is not None:
            ended = [response.slot is None for response in responses]
            numbers = [response.number for response in responses]
            self.speculator.append(slots, numbers, sizes, appended, ended)
        self._tell(responses)

    # -- leaving ---------------------------------------------------------------------------------------------

    def _remove(self, responses: Sequence[LiveResponse]) -> None:
        """Takes responses out of slots and queues."""
        self._free([response for response in responses if response.slot is not None])
        self._queue.remove(responses)
        for response in responses:
            self._take_counts(response)
            del self._live[response]
            if self._tools is not None:
                self._tools.drop(response)
        self._drop_state()

    def _free(self, responses: Sequence[LiveResponse]) -> None:
        """Stops decoding in the slots of responses."""
        if responses:
            self.state = self.engine.free_resource(self.state, [response.slot for response in responses])
        for response in responses:
            self.slots[response.slot] = response.slot = None

    def _compact(self) -> None:
        """Moves to the batch bucket that is enough (`_compacts_to`), once nothing waits. Requests that are
        sampled ahead keep their slots as far as there is room.
        """
        batch = self._compacts_to()
        if not batch:
            return
        running = self.running
        ahead = [slot for slot in self._busy if self.slots[slot].ahead]
        kept = running + ahead[: batch - len(running)]
        self.state = self.engine.compact(self.state, kept, batch)
        if self.speculator is not None:
            self.speculator.compact(kept, self.state.batch)
        for slot in set(ahead) - set(kept):
            self.slots[slot].slot = None
        self.slots = [self.slots[slot] for slot in kept]
        self.slots += [None] * (self.state.batch - len(self.slots))
        for slot in self._busy:
            self.slots[slot].slot = slot

    def _compacts_to(self) -> int:
        """Returns the smaller batch bucket that has become enough, or 0. It is not the smallest one
        where sampling ahead pays in a larger one, or where programs are still to be compiled.
        """
        if self.waiting or self.expects_more or self.state is None:
            return 0
        running = len(self.running)
        batch = self.engine.buckets.batch_for(max(running, 1))
        if self._run_ahead is not None and batch < self.state.batch:
            available = len(self._busy) - running + (len(self._upcoming) if self._may_fill_ahead() else 0)
            shape = (self.state.batch, self.state.cache.length)
            arguments = self.statistics, self.engine.buckets, self.speculator.decoder.times
            batch = self._run_ahead.batch(shape, running, available, self._saved_per_token(), *arguments)
        if batch < self.state.batch:
            batch = self.engine.smallest_batch(self.state, batch)
        return 0 if batch == self.state.batch else batch
