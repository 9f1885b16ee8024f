"""A queue of responses that wait for a slot, first as prompts, then prefilled.

A prompt is prefilled once for all its samples, together with prompts of about the same length.
"""

import collections
import itertools
from collections.abc import Iterable, Iterator, Sequence

from rljax.response_lengths import ResponseLengths
from rljax.rollout.live_response import LiveResponse
from rljax.rollout.slots import Prefilled, Slots

_Group = tuple[tuple[int, ...], list[LiveResponse]]
"""Tokens to prefill, and the responses that continue them."""


class PrefillQueue:
    """A queue of responses that wait for a slot.

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
        """Prefills prompts: enough for `free` slots and as many as the padding has room for, or, if responses
        to a prompt draft from one another, one for every slot.
        """
        engine, members, mates = self._slots.engine, 0, self._slots.has_history
        # For states of fewer slots, `PlainShapes` has insertion from the smallest prefill only.
        is_full = self._slots.batch == engine.buckets.batch_for(self._max_slots)
        sizes = engine.prefill_rows if is_full else engine.prefill_rows[:1]
        by_length: dict[int, list[tuple[int, _Group]]] = {}  # with their places in the queue
        taken = needed = 0
        while self._prompts:
            ids, group = self._prompts[0]
            alike = by_length.get(engine.prefill_length(len(ids)), [])
            if taken < self._max_slots if mates else members < free:
                needed += 1
            elif sum(_parts(len(alike) + 1, sizes)) > sum(_parts(len(alike), sizes)):
                break
            by_length.setdefault(engine.prefill_length(len(ids)), alike).append(
                (taken, self._prompts.popleft())
            )
            members, taken = members + len(group), taken + 1
        placed = []
        for alike in by_length.values():
            rest = iter(alike)
            for size in _parts(len(alike), sizes):
                together = list(itertools.islice(rest, size))
                prefilled = self._slots.prefill([ids for _, (ids, _) in together])
                self._slots.statistics.prefilled_tokens += sum(len(ids) for _, (ids, _) in together)
                placed += [
                    (place, [(prefilled, row, response) for response in group])
                    for row, (place, (_, group)) in enumerate(together)
                ]
        # What the padding had room for begins behind the rest, in the queue's order.
        placed.sort(key=lambda pair: max(pair[0], needed - 1))
        rows = [row for _, row in placed]
        if mates:  # one response to every prompt first: the others draft from it
            self._ready.extend(group.pop(0) for group in rows)
        self._ready.extend(itertools.chain.from_iterable(rows))


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
