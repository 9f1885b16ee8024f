"""What the trainer and each worker did when, and what each worker decoded: for reports and the display."""

import collections
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rljax.cluster.ledger import Ledger
from rljax.cluster.messages import Key, Pieces
from rljax.requests import Completion, DecodeStatistics, Request

STATES = ("decoding", "idle", "loading", "starting", "training", "waiting")
"""Of a worker: it decodes; it has nothing to decode; it gets weights; it starts, or builds its engine; it
trains in idle time. Of the trainer: it trains (or judges, or evaluates, or saves); it waits for a
rollout."""
TRAINER = "trainer"
_SHORTEST = 0.01  # seconds of a span; shorter ones would not be visible

_NONE = DecodeStatistics()

Span = tuple[float, float, str]
"""Begin, end and state; seconds since the record began."""


class Timeline:
    """Spans since the last `take`.

    Args:
      now: the time in seconds.
    """

    def __init__(self, now: float) -> None:
        self._began = now
        self._spans: dict[str, list[Span]] = collections.defaultdict(list)
        self._present: dict[str, tuple[float, str]] = {}  # since when each is in its state
        self._tokens: collections.Counter[str] = collections.Counter()
        self._responses: collections.Counter[str] = collections.Counter()
        self._moved = 0
        self._groups: list[tuple[int, list[int]]] = []
        self._reported: dict[str, tuple[int, DecodeStatistics, float, float]] = {}  # by each worker, last
        self._passes: dict[str, dict[tuple[int, bool], list[float]]] = collections.defaultdict(dict)
        self._cpu: collections.Counter[str] = collections.Counter()

    def observe(self, states: Mapping[str, str], now: float) -> None:
        """Notes the state of everyone who is there."""
        for name in [name for name in self._present if name not in states]:
            self._end(name, now)
        for name, state in states.items():
            if name not in self._present or self._present[name][1] != state:
                self._end(name, now)
                self._present[name] = now, state

    def count(self, ledger: Ledger, keys: Iterable[Key]) -> None:
        """Adds who sampled which tokens of responses that have ended."""
        for entry in (ledger[key] for key in keys):
            ends = [begin for begin, _ in entry.writers[1:]] + [len(entry.tokens)]
            for (begin, worker), end in zip(entry.writers, ends, strict=True):
                self._tokens[worker] += end - begin
            if entry.ending is not None:
                self._responses[entry.ended_by] += 1
            self._moved += len(entry.writers) > 1

    def handed_out(self, requests: Sequence[Request], completions: Sequence[Completion]) -> None:
        """Adds the lengths of responses that have ended, in the order in which workers were given them."""
        before: tuple[int, ...] | None = None
        for request, completion in zip(requests, completions, strict=True):
            if request.prompt_ids != before:
                before = request.prompt_ids
                self._groups.append((len(before), []))
            self._groups[-1][1].append(len(completion.response_ids))

    def passes(self, event: Pieces) -> None:
        """Adds the passes between a worker's last report and this one, which are those up to a host sync: all
        have as many rows. Two reports at once, of which one was lost, are left out.
        """
        counts = event.statistics
        if counts is None:
            return
        rollout, before, busy, cpu = self._reported.get(event.worker, (-1, _NONE, 0.0, 0.0))
        if rollout != event.rollout:
            before, busy, cpu = _NONE, 0.0, 0.0
        syncs, steps = counts.host_syncs - before.host_syncs, counts.steps - before.steps
        if syncs <= 0:  # late
            return
        self._reported[event.worker] = event.rollout, counts, event.busy_seconds, event.cpu_seconds
        self._cpu[event.worker] += event.cpu_seconds - cpu
        rows, prefilled = counts.rows - before.rows, counts.prefilled_tokens - before.prefilled_tokens
        if steps <= 0 or rows % steps:
            return
        sums = self._passes[event.worker].setdefault((rows // steps, prefilled > 0), [0, 0.0, 0])
        for place, more in enumerate((steps, event.busy_seconds - busy, prefilled)):
            sums[place] += more

    def take(self, now: float) -> dict[str, Any]:
        """Returns a record as JSON values, and begins the next: `seconds`, how long it is, `moved`, responses
        of several workers, and in `rows` for everyone the `spans` ([begin, end, state]) and, of workers, the
        `tokens` and ended `responses`. What simulations are compared with (`rljax.simulation.calibration`):
        `groups`, [prompt tokens, lengths of the responses] in the order in which workers were given them; of
        workers `cpu`, the processor's seconds, and `passes`, [rows, passes, seconds, tokens prefilled in
        the same turns].
        """
        present = dict(self._present)
        for name in present:
            self._end(name, now)
        names = {**self._spans, **self._tokens}
        rows: dict[str, Any] = {}
        for name in sorted(names, key=lambda name: (name != TRAINER, len(name), name)):
            spans = self._spans.get(name, [])
            rows[name] = {"spans": [[round(begin, 3), round(end, 3), state] for begin, end, state in spans]}
            if name != TRAINER:
                rows[name] |= {"tokens": self._tokens[name], "responses": self._responses[name]}
            if name in self._passes:
                passes = sorted(self._passes[name].items())
                rows[name]["cpu"] = round(self._cpu[name], 3)
                rows[name]["passes"] = [
                    [size, sums[0], round(sums[1], 4), sums[2]] for (size, _), sums in passes
                ]
        record = {"seconds": round(now - self._began, 3), "moved": self._moved, "rows": rows}
        if self._groups:
            record["groups"] = self._groups
        reported = self._reported
        self.__init__(now)
        self._reported = reported
        self._present = {name: (now, state) for name, (_, state) in present.items()}
        return record

    def _end(self, name: str, now: float) -> None:
        since, state = self._present.pop(name, (now, ""))
        if now - since < _SHORTEST:
            return
        spans, begin, end = self._spans[name], since - self._began, now - self._began
        if spans and spans[-1][2] == state and begin - spans[-1][1] < _SHORTEST:
            begin = spans.pop()[0]
        spans.append((begin, end, state))


def described(states: Mapping[str, str]) -> str:
    """Returns a phrase about the workers, such as "3 workers: 2 decoding, 1 starting"."""
    counts = collections.Counter(state for name, state in states.items() if name != TRAINER)
    total = sum(counts.values())
    parts = ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state])
    return f"{total} worker{'' if total == 1 else 's'}" + (f": {parts}" if parts else "")
