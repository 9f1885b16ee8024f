"""Prefix racing in one process: each request has its own drafter, and finds it by a race where it needs one.

SpecActor, section 4.2, Algorithm 3: requests with the lowest acceptance get further drafters as others end.
There, each drafter has a worker of its own. Here the drafters of a request draft branches of one tree, in
rows that would be idle otherwise: the noise decides every token, so that all of them agree on what is
accepted, and the longest prefix counts. After a few passes the request stays with the drafter that did best
for it: what is known of one request counts more, for it, than what earlier rollouts say of the drafter.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from rljax.papers.specactor.ladder import Ladder
from rljax.papers.specactor.pass_plan import Entries, Entry, PassEstimate, give_rows

_POOR = 0.5  # share of a drafter's acceptance in history below which a request's is bad
_PASSES = 8  # of a race
_HISTORY_WEIGHT = 4.0  # draft tokens that the history counts as, against those of the requests
_NOTHING = np.zeros(4, np.int64)


class RequestAcceptance:
    """Counts what became of each drafter's tokens, for every request.

    Args:
      drafters: names.
    """

    def __init__(self, drafters: Iterable[str]) -> None:
        # By drafter and request, int [4]: tokens that were verified behind accepted ones, those
        # of them that were accepted, passes in which it was asked, and those in which it had something.
        self._counts: dict[str, dict[int, np.ndarray]] = {drafter: {} for drafter in drafters}

    def ask(self, drafter: str, requests: Sequence[int], answered: Sequence[bool]) -> None:
        """A drafter was asked for requests, and had something for those where `answered` says so."""
        for request, had in zip(requests, answered, strict=True):
            self._add(drafter, request, [0, 0, 1, had])

    def add(self, drafter: str, requests: Sequence[int], scored: np.ndarray, accepted: np.ndarray) -> None:
        """A pass verified a drafter's tokens.

        Args:
          drafter: its name.
          requests: n requests.
          scored: int [n], tokens that were verified and whose predecessors were accepted.
          accepted: int [n], those of them that were accepted.
        """
        for request, of_scored, of_accepted in zip(requests, scored, accepted, strict=True):
            if of_scored:
                self._add(drafter, request, [of_scored, of_accepted, 0, 0])

    def has_drafted(self, drafter: str, request: int) -> bool:
        """Whether a drafter was asked for a request."""
        return request in self._counts[drafter]

    def rate(self, drafter: str, requests: Iterable[int], history: Mapping[str, float]) -> float:
        """Acceptance of a drafter for some requests together; that of its history where it is new to them.

        A drafter that proposes nothing is never right: the rate is times the share of passes in which it had
        something.
        """
        of_drafter = self._counts[drafter]
        known = [of_drafter[request] for request in requests if request in of_drafter]
        scored, accepted, asked, answered = np.sum([_NOTHING, *known], axis=0).tolist()
        rate = (accepted + _HISTORY_WEIGHT * history[drafter]) / (scored + _HISTORY_WEIGHT)
        return rate * answered / asked if asked else rate

    def rates(self, requests: Sequence[int], history: Mapping[str, float]) -> dict[str, float]:
        """`rate` of every drafter."""
        return {drafter: self.rate(drafter, requests, history) for drafter in self._counts}

    def totals(self) -> dict[str, tuple[int, int]]:
        """Tokens scored and accepted, of all requests together, by drafter; without those never scored."""
        sums = {
            drafter: np.sum([_NOTHING, *counts.values()], axis=0).tolist()
            for drafter, counts in self._counts.items()
        }
        return {drafter: (scored, accepted) for drafter, (scored, accepted, *_) in sums.items() if scored}

    def _add(self, drafter: str, request: int, counts: Sequence[int]) -> None:
        known = self._counts[drafter].get(request, _NOTHING)
        self._counts[drafter][request] = known + np.asarray(counts, np.int64)


@dataclasses.dataclass(frozen=True)
class RaceState:
    """The requests of a pass, and what is known of their drafters.

    Attributes:
      requests: those of the n slots.
      acceptance: that of this rollout.
      history: acceptance of earlier rollouts, by drafter.
      ladder: ranks drafters.
      estimate: predicts what a pass over these slots brings.
      first: the drafter of requests that have not found their own; None if these are not drafted for.
    """

    requests: Sequence[int]
    acceptance: RequestAcceptance
    history: Mapping[str, float]
    ladder: Ladder
    estimate: PassEstimate
    first: Entry | None

    def rate(self, slot: int, drafter: str) -> float:
        """Acceptance of a drafter for the request of a slot."""
        return self.acceptance.rate(drafter, [self.requests[slot]], self.history)

    def entry(self, slot: int, drafter: str) -> Entry:
        """A drafter of a slot, with the window that the ladder gives it."""
        rate = self.rate(slot, drafter)
        if self.first is not None and drafter == self.first.drafter:
            return Entry(drafter, rate, self.first.window)
        return Entry(drafter, rate, max(self.ladder.window(drafter, rate, len(self.requests)), 1))


@dataclasses.dataclass
class _Race:
    """Drafters that race for a request, the one that it had first, and the passes that are left."""

    drafters: tuple[str, ...]
    left: int = _PASSES


class Races:
    """The drafter that each request of a rollout has found, and the races that are in progress."""

    def __init__(self) -> None:
        self._races: dict[int, _Race] = {}
        self._found: dict[int, str] = {}

    def has_own(self, request: int) -> bool:
        """Whether a request has found a drafter, or is in a race for one."""
        return request in self._found or request in self._races

    def end(self, state: RaceState) -> list[str]:
        """Ends the races that have been run: each request stays with the drafter with which the pass is
        predicted to be fastest.

        Returns:
          Sentences about them, for the log.
        """
        over = [
            (slot, request)
            for slot, request in enumerate(state.requests)
            if request in self._races and not self._races[request].left
        ]
        if not over:
            return []
        ended, alone = [], self.alone(state)
        for slot, request in over:
            race = self._races[request]
            best = max(race.drafters, key=lambda name, slot=slot: _worth(slot, name, alone, state))
            self._found[request] = best
            del self._races[request]
            accepted = ", ".join(f"{name} {state.rate(slot, name):.0%}" for name in race.drafters)
            ended.append(f"request {request} stays with {best}, accepted: {accepted}")
        return ended

    def enter(self, state: RaceState) -> None:
        """Enters the requests that are accepted badly into races, against the drafters that they have not had
        and that would pay if they were as good for them as in history.
        """
        alone = self.alone(state)
        had = state.estimate.rate(alone)
        for slot, request in enumerate(state.requests):
            if request in self._races or not state.estimate.current[slot] or not self._is_poor(slot, state):
                continue
            rivals = [
                name
                for name in state.ladder.ranking(state.history, len(state.requests))
                if not state.acceptance.has_drafted(name, request) and _worth(slot, name, alone, state) > had
            ]
            if rivals:
                self._races[request] = _Race((self._drafter(request, state), *rivals))

    def alone(self, state: RaceState) -> list[Entries]:
        """The one drafter of every slot: that of a race in progress is the one that the request had."""
        drafters = [self._drafter(request, state) for request in state.requests]
        return [() if name is None else (state.entry(slot, name),) for slot, name in enumerate(drafters)]

    def first_come(self, state: RaceState) -> list[Entries]:
        """As `alone`, without the drafters that requests have found: those get the rows that are left."""
        return [
            () if request in self._found and request not in self._races else entries
            for request, entries in zip(state.requests, self.alone(state), strict=True)
        ]

    def wanted(self, state: RaceState) -> dict[int, Entries]:
        """By slot, the drafters that requests have found, then those that race: first for the request whose
        own drafter is accepted least.
        """
        slots = {request: slot for slot, request in enumerate(state.requests)}
        racing = [slots[request] for request in self._races if request in slots]
        racing.sort(key=lambda slot: state.rate(slot, self._races[state.requests[slot]].drafters[0]))
        found = [slots[request] for request in self._found if request in slots and request not in self._races]
        return {slot: (state.entry(slot, self._found[state.requests[slot]]),) for slot in found} | {
            slot: tuple(state.entry(slot, name) for name in self._races[state.requests[slot]].drafters)
            for slot in racing
        }

    def run(self, requests: Sequence[int], plan: Sequence[Entries]) -> list[str]:
        """A pass is drafted by a plan.

        Returns:
          Sentences about races that begin with it, for the log.
        """
        begun = []
        for request, entries in zip(requests, plan, strict=True):
            if len(entries) < 2:
                continue
            race = self._races[request]
            if race.left == _PASSES:
                accepted = f"{race.drafters[0]} is accepted at {entries[0].acceptance:.0%}"
                begun.append(f"request {request}: {accepted}; it races {', '.join(race.drafters[1:])}")
            race.left -= 1
        return begun

    def _drafter(self, request: int, state: RaceState) -> str | None:
        if request in self._races:
            return self._races[request].drafters[0]
        return self._found.get(request, state.first and state.first.drafter)

    def _is_poor(self, slot: int, state: RaceState) -> bool:
        """Whether a request is accepted badly by the drafter that it has."""
        request = state.requests[slot]
        own = self._drafter(request, state)
        if own is None or not state.acceptance.has_drafted(own, request):
            return False
        return state.rate(slot, own) < _POOR * state.history[own]


def _worth(slot: int, drafter: str, alone: Sequence[Entries], state: RaceState) -> float:
    """Tokens per second of the pass if a slot has this drafter."""
    plan = give_rows(alone, {slot: (state.entry(slot, drafter),)}, state.estimate)
    return state.estimate.rate(plan)
