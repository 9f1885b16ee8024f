"""The decode loop: continuous batching over an open queue of requests.

    loop = open_loop(slots, max_slots=64, on_sync=deliver)              # `rljax/rollout/open_loop.py`
    loop.submit([LiveResponse(request)])                                # between any two calls of `step`
    while loop.live:                                                    # somebody waits or is decoded
        loop.step()                                                     # up to the next host sync

Requests join and leave at any host sync. Waiting ones take free slots, in a state that is widened and
lengthened for them; a prompt is prefilled once for all its requests. Once nothing waits, the batch is
compacted into ever smaller buckets, and the cache grows bucket by bucket. None of it changes a token, only
the time that it takes: a token depends on its request and its prefix alone (see `rljax/sampling/noise.py`).

Three plugs do what differs: `slots.py` holds the decode state and runs the passes, with drafts or without;
`sources/turns.py` says where a response pauses or ends; `sources/idle.py` what idle slots decode.
`Scheduler` (`collector.py`) decodes a list to its end with it, and `rljax/serving/worker.py` serves.
"""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import numpy as np

from rljax.engine.buckets import Buckets
from rljax.errors import PolicyError
from rljax.models.transformer import Params
from rljax.requests import DecodeStatistics, PartialResponse, Request
from rljax.response_lengths import ResponseLengths
from rljax.rollout.live_response import LiveResponse
from rljax.rollout.running import RunningRequests
from rljax.rollout.slots import Collected, Pass, Prefilled, Slots
from rljax.rollout.sources.idle import IdleSlots
from rljax.rollout.sources.turns import Turns

OnSync = Callable[[Sequence[LiveResponse]], None]
"""Called after every host sync with the responses that got tokens, ended, or were cancelled."""

_REFILL_SHARE = 8


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
      reads_later: once nothing waits, plain steps begin before the results of the last ones are read. Only
        where every response ends by itself.
    """

    sync_at_every_ending: bool = False
    most_steps: int | None = None
    start_full: bool = False
    longest_first: ResponseLengths | None = None
    reads_later: bool = False


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
      slots: decodes the responses in them.
      turns: where responses pause and end.

    Attributes:
      slots: the decode state, and the response in each slot.
      running_over_time: number of running responses over time.
      expects_more: whether others will be submitted soon, although nothing waits: then the batch is not
        compacted, and a host sync comes as if they waited.
    """

    expects_more = False

    def __init__(
        self, slots: Slots, max_slots: int, turns: Turns, idle: IdleSlots, policy: LoopPolicy, on_sync: OnSync
    ) -> None:
        self.engine, self.slots, self.max_slots = slots.engine, slots, max_slots
        self.turns, self.idle, self.policy, self.on_sync = turns, idle, policy, on_sync
        self.running_over_time = RunningRequests()
        self._live: dict[LiveResponse, None] = {}  # waiting and decoded, in the order of arrival
        self._queue = PrefillQueue(slots, max_slots, policy.longest_first)
        self._changed = False  # whether responses have come that `slots` have not admitted

    # -- a round ---------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Fills free slots, decodes up to the next host sync, and takes over what was sampled."""
        self._fill()
        if self._decoding or self.slots.in_flight:  # else all wait for answers, or have ended
            self._decode()
        self._drop_state()

    def _fill(self) -> None:
        """Gives slots to responses that wait, then to what idle slots decode, and goes on behind answers."""
        if self.waiting:
            self._admit()
            free = self.slots.idle[: max(self.max_slots - len(self.slots.busy), 0)]
            while free and self.waiting:
                prefilled, rows = self._queue.take(len(free))
                taken, free = free[: len(rows)], free[len(rows) :]
                self.slots.insert(
                    prefilled, [(row, slot, each) for (row, each), slot in zip(rows, taken, strict=True)]
                )
        if not self.slots.in_flight and (smaller := self._smaller_batch()):
            self.slots.compact(smaller)
        if not self.waiting:
            self.idle.fill(self.slots)
        alone = not self.slots.in_flight and not self._decoding
        answers = self.turns.answers(self.statistics, alone, self.policy.sync_at_every_ending)
        if answers:
            self.slots.append(answers)
            self._tell([answer.response for answer in answers])

    def _admit(self) -> None:
        """Makes room for responses that wait."""
        if self._changed:
            self.finish_pass()  # its results are by the old numbers
            self.slots.free(self.slots.yielding)  # others wait for their slots
            self._changed = False
        first = self.max_slots if self.policy.start_full else 0
        self.slots.admit(list(self._queue), [*self._live, *self.idle.responses], self.max_slots, first)

    def _smaller_batch(self) -> int:
        """Returns the smaller batch bucket that has become enough, or 0. It is not the smallest one where
        idle slots pay in a larger one, or where programs are still to be compiled.
        """
        if self.waiting or self.expects_more or not self.slots.batch:
            return 0
        smallest = self.engine.buckets.batch_for(max(len(self.slots.running), 1))
        batch = self.idle.batch(self.slots, smallest)
        if batch < self.slots.batch:
            batch = self.engine.smallest_batch(self.slots.state, batch)
        return 0 if batch == self.slots.batch else batch

    def _decode(self) -> None:
        """Decodes up to the next host sync."""
        slots = self.slots
        wanted = Pass(
            self._decoding,
            self._sync_when_active(),
            self.policy.most_steps,
            is_tail=not self.waiting,
            shrinks=bool(slots.in_flight) and self._smaller_batch() > 0,
            reads_later=self.policy.reads_later and not self.waiting,
            yielding_weight=self.idle.weight(slots),
        )
        for collected in slots.decode(wanted):
            self._collect(collected)

    def _sync_when_active(self) -> int:
        """Returns the number of active slots at which decoding stops for a host sync."""
        active = len(self._decoding)
        if self.policy.sync_at_every_ending:
            return active - 1
        if self.waiting or self.expects_more:
            return active - max(1, len(self.slots.responses) // _REFILL_SHARE)
        if self.slots.yielding:
            return active - 1  # the next to end may be one that yields to no other
        batch = min(active, self.slots.batch)
        return max((bucket for bucket in self.engine.buckets.batch if bucket < batch), default=0)

    def _collect(self, collected: Collected) -> None:
        """Takes over what a pass has sampled, frees the slots of ended responses, makes room for the rest."""
        statistics, (result, slots) = self.statistics, collected
        self.running_over_time.add(len(self.slots.running))
        statistics.steps += result.steps
        statistics.rows += result.rows
        statistics.cached_tokens += result.steps * sum(self.slots.responses[slot].positions for slot in slots)
        statistics.host_syncs += 1
        self.idle.passed(self.slots, result.steps)
        if not np.isfinite(result.logprobs[slots]).all():
            raise PolicyError(
                "policy: sampled a token with a log-probability that is not finite: what its weights compute"
                " overflows; go on from an earlier checkpoint, with a smaller optimizer.learning_rate"
            )

        # Tokens, and what ends responses.
        stopped, kept, responses = [], [], [self.slots.responses[slot] for slot in slots]
        for slot, response in zip(slots, responses, strict=True):
            sampled = result.tokens[slot][result.tokens[slot] >= 0]
            known = len(response.tokens)
            response.tokens.extend(sampled.tolist())
            response.logprobs.extend(result.logprobs[slot][: len(sampled)].tolist())
            has_ended = self.turns.end(response, known)
            if has_ended and result.active[slot]:
                stopped.append(slot)
            count = len(response.tokens) - known
            kept.append(count)
            if result.steps == 1 and (accepted := min(count, len(sampled) - 1)) > 0:  # verified drafts
                response.accepted_spans.append((known, known + accepted))
            statistics.tokens += 0 if response.yields else count
            if response in self.turns.paused or (result.active[slot] and not has_ended):
                continue
            is_eos = response.tokens[-1] in self.engine.eos_token_ids
            response.ending = "eos" if is_eos else response.ending or "length"
            self.slots.responses[slot] = response.slot = None

        # The slots, then whoever waits for the responses.
        self.slots.keep(collected, responses, kept, stopped)
        self._tell(responses)

        # Room for the rest.
        decoding = set(self._decoding)
        full = [slot for slot in slots if slot in decoding and result.lengths[slot] >= self.slots.length]
        full = [self.slots.responses[slot] for slot in full]
        if any(not response.yields for response in full):
            self.slots.grow()
        else:  # what yields to others ends there
            self.slots.free(full)

    def _tell(self, responses: Sequence[LiveResponse]) -> None:
        """Lets go of responses that have ended, and hands on what all of them got."""
        for response in responses:
            if response.ending is not None:
                self._live.pop(response, None)
        self.on_sync([response for response in responses if not response.yields])

    def finish_pass(self) -> None:
        """Waits for the pass that is in flight, if there is one."""
        for collected in self.slots.finish():
            self._collect(collected)

    def _drop_state(self) -> None:
        if not self.waiting and not self.slots.busy:
            self.slots.clear()

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
        self._changed = True

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
          ValueError: it waits for an answer, which would be lost.
        """
        self.finish_pass()
        if response not in self._live:
            return None
        if response in self.turns.paused:
            raise ValueError("a response that waits for an answer cannot be taken out before it has come")
        self._remove([response])
        return response.partial()

    def _remove(self, responses: Sequence[LiveResponse]) -> None:
        """Takes responses out of slots and queues."""
        self.slots.free(responses)
        self._queue.remove(responses)
        for response in responses:
            del self._live[response]
            self.turns.drop(response)
        self._drop_state()

    def load_params(self, params: Params, version: int) -> None:
        """Swaps the weights between two host syncs. Responses in flight go on with the new ones, over keys
        and values of the old ones, and record the position (`LiveResponse.versions`).

        Args:
          params: weights from `engine.load_params`.
        """
        self.finish_pass()
        self._queue.prefill_again()
        self.slots.load_params(params, version)

    @property
    def statistics(self) -> DecodeStatistics:
        """Counts of all decoding so far."""
        return self.slots.statistics

    @property
    def live(self) -> Collection[LiveResponse]:
        """Responses that have not ended: they wait, or are in slots."""
        return self._live.keys()

    @property
    def waiting(self) -> bool:
        """Whether a response waits for a slot."""
        return bool(self._queue)

    @property
    def _decoding(self) -> list[int]:
        """Slots with a response that does not wait for an answer."""
        paused, responses = self.turns.paused, self.slots.responses
        return [slot for slot in self.slots.busy if responses[slot] not in paused]


_Group = tuple[tuple[int, ...], list[LiveResponse]]
"""Tokens to prefill, and the responses that continue them."""


class PrefillQueue:
    """Responses that wait for a slot, first as prompts, then prefilled. A prompt is prefilled once for all of
    them, together with prompts of about the same length.

    Args:
      slots: prefill prompts, for responses that join them.
      longest_first: expected lengths, to start the longest responses first; None for the order of arrival.
    """

    def __init__(self, slots: Slots, max_slots: int, longest_first: ResponseLengths | None) -> None:
        self._slots, self._max_slots, self._longest_first = slots, max_slots, longest_first
        self._prompts: collections.deque[_Group] = collections.deque()
        # Responses with their prefilled prompts and the rows in these.
        self._ready: collections.deque[tuple[Prefilled, int, LiveResponse]] = collections.deque()

    def __bool__(self) -> bool:
        return bool(self._ready or self._prompts)

    def __iter__(self) -> Iterator[LiveResponse]:
        prompts = itertools.chain.from_iterable(group for _, group in self._prompts)
        return itertools.chain(prompts, (response for *_, response in self._ready))

    def add(self, responses: Iterable[LiveResponse]) -> None:
        """Adds responses. Those that are added together with the same tokens share one prefill."""
        self._prompts.extend(_by_prefix(responses).items())
        lengths = self._longest_first
        if lengths is not None:
            expected = {ids: lengths.expected(group[0].request.prompt_ids) for ids, group in self._prompts}
            self._prompts = collections.deque(sorted(self._prompts, key=lambda item: -expected[item[0]]))

    def remove(self, responses: Iterable[LiveResponse]) -> None:
        """Removes those of the responses that are in the queue."""
        gone = set(responses)
        self._ready = collections.deque(item for item in self._ready if item[2] not in gone)
        groups = (
            (ids, [response for response in group if response not in gone]) for ids, group in self._prompts
        )
        self._prompts = collections.deque((ids, group) for ids, group in groups if group)

    def prefill_again(self) -> None:
        """Turns prefilled responses back into prompts, before all others; used when the weights change."""
        groups = _by_prefix(response for *_, response in self._ready)
        self._ready.clear()
        self._prompts.extendleft(reversed(groups.items()))

    def take(self, free: int) -> tuple[Prefilled, list[tuple[int, LiveResponse]]]:
        """Removes and returns the next responses that were prefilled together, with their rows in
        `Prefilled`.

        Args:
          free: number of free slots, the largest number of responses.
        """
        if not self._ready:
            self._make_ready(free)
        prefilled, rows = self._ready[0][0], []
        while len(rows) < free and self._ready and self._ready[0][0] is prefilled:
            _, row, response = self._ready.popleft()
            rows.append((row, response))
        return prefilled, rows

    def _make_ready(self, free: int) -> None:
        """Prefills the prompts that `free` slots need, and as many more as the padding has room for: with one
        free slot and prefills of two rows, the first prompt, and the second if it is about as long. If
        responses to a prompt draft from one another, a prompt for every slot is needed.
        """
        engine, mates = self._slots.engine, self._slots.has_history
        # For states of fewer slots, `Shapes` has insertion from the smallest prefill only.
        is_full = self._slots.batch == engine.buckets.batch_for(self._max_slots)
        sizes = engine.prefill_rows if is_full else engine.prefill_rows[:1]
        taken: list[_Group] = []
        places: dict[int, list[int]] = {}  # in `taken`, by prefill length
        responses = needed = 0
        while self._prompts:
            ids, group = self._prompts[0]
            alike = places.setdefault(engine.prefill_length(len(ids)), [])
            if len(taken) < self._max_slots if mates else responses < free:
                needed += 1
            elif sum(_parts(len(alike) + 1, sizes)) > sum(_parts(len(alike), sizes)):
                break
            alike.append(len(taken))
            taken.append(self._prompts.popleft())
            responses += len(group)
        ready: list[tuple[int, list[tuple[Prefilled, int, LiveResponse]]]] = []
        for alike in places.values():
            rest = iter(alike)
            for size in _parts(len(alike), sizes):
                together = list(itertools.islice(rest, size))
                prompts = [taken[place][0] for place in together]
                prefilled = self._slots.prefill(prompts)
                self._slots.statistics.prefilled_tokens += sum(map(len, prompts))
                for row, place in enumerate(together):
                    ready.append((place, [(prefilled, row, response) for response in taken[place][1]]))
        # What is needed starts prefill by prefill; then what the padding had room for, in the queue's order.
        ready.sort(key=lambda pair: max(pair[0], needed - 1))
        groups = [group for _, group in ready]
        if mates:  # one response to every prompt first: the others draft from it
            self._ready.extend(group.pop(0) for group in groups)
        self._ready.extend(itertools.chain.from_iterable(groups))


def _parts(count: int, sizes: Sequence[int]) -> list[int]:
    """Splits prompts among prefills so that few rows are padding: 12 are two prefills of 8 where the next
    larger one has 32 rows.

    Args:
      sizes: numbers of rows that a prefill can have, in ascending order.
    """
    parts, rest = [sizes[-1]] * (count // sizes[-1]), count % sizes[-1]
    while rest > 0:
        size = next(size for size in sizes if size >= rest)
        smaller = max((each for each in sizes if each < size), default=size)
        if -(-rest // smaller) * smaller < size:
            size = smaller
        parts.append(size)
        rest -= size
    return parts


def _by_prefix(responses: Iterable[LiveResponse]) -> dict[tuple[int, ...], list[LiveResponse]]:
    groups: dict[tuple[int, ...], list[LiveResponse]] = {}
    for response in responses:
        groups.setdefault(response.prefix_ids, []).append(response)
    return groups
