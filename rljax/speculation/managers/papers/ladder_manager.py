"""One drafter for a rollout, the one that the draft ladder ranks first, and others for its stragglers.

SpecActor, section 4.2: the ladder (`draft_ladder.py`) turns the acceptance of earlier rollouts,
and what drafting and passes take, into the drafter to begin with. Whenever half of the responses have ended
since the last choice, it chooses anew for those that still run, by their own acceptance where they have one.
Stragglers that accept little of what their drafter drafts try the others for a few passes each, in the
ladder's order: how good a drafter is varies from request to request. The paper lets several drafters race for
a straggler on workers that have fallen idle; here all slots are decoded together, and they take turns.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from rljax.engine.buckets import Buckets
from rljax.engine.state import DecodeState
from rljax.rollout.records import DecodeStatistics
from rljax.speculation.choices import Choice, draft, plain_promise
from rljax.speculation.draft_length import DRAFT_STEP
from rljax.speculation.managers.papers.draft_ladder import (
    AcceptanceHistory,
    Costs,
    DraftCost,
    Ladder,
    profile,
)
from rljax.speculation.pass_choice import PassTimes
from rljax.speculation.proposers import ActiveSlots, DeviceProposer, Proposal, Proposer, SelfProposer
from rljax.speculation.strategies import Strategy

_ACCEPTANCES = np.linspace(0.0, 1.0, 41)
_AS_EVIDENCE = 4.0  # draft tokens that the history weighs as much as, against those of the running requests
_LITTLE = 0.5  # of what a drafter's history says; less is a reason to try others
_TRIAL = 8  # passes


@dataclasses.dataclass(frozen=True)
class _Watched(Proposal):
    """A proposal whose drafts are judged one after the other, for the ladder, too.

    Attributes:
      inner: the proposal.
      tell: is told of every slot how many of its draft tokens were judged, and accepted: int [n] each.
    """

    inner: Proposal
    tell: Callable[[np.ndarray, np.ndarray], None]

    def credit(self, verified: np.ndarray, accepted: np.ndarray) -> None:
        self.inner.credit(verified, accepted)
        self.tell(*self.judged(verified, accepted))


class Laddered:
    """Chooses by the draft ladder.

    Args:
      proposers: who can draft.
      buckets: sizes of passes.
      times: what passes and drafting take.
      max_batch: larger batches decode plainly.
    """

    def __init__(
        self, proposers: Sequence[Proposer], buckets: Buckets, times: PassTimes, max_batch: int
    ) -> None:
        self._proposers = {proposer.name: proposer for proposer in proposers}
        self._buckets, self._times, self._max_batch = buckets, times, max_batch
        self._history = AcceptanceHistory(list(self._proposers))
        # In this rollout, by drafter and request: draft tokens judged, and accepted.
        self._own: dict[str, dict[int, np.ndarray]] = {}
        self._training = False
        self.begin(False, 0)

    def begin(self, training: bool, step: int) -> None:
        self._record_rollout()
        self._training = training
        self._ladders: dict[int, Ladder] = {}  # by cache length
        self._drafter: str | None = None
        self._window, self._rate, self._reason = 0, 0.0, ""
        self._chosen_for = self._most = 0  # responses; the most of a choice
        self._trial = 0  # passes until it is over; 0 where there is none
        # In this rollout, by drafter: how often it was asked, and how often it had something.
        self._answers = {name: np.zeros(2) for name in self._proposers}

    def choose(
        self, state: DecodeState, active: ActiveSlots, statistics: DecodeStatistics
    ) -> tuple[DecodeState, Choice]:
        responses = len(active.slots) + active.standing_by
        over = self._trial == 1
        self._trial = max(self._trial - 1, 0)
        if over or 2 * responses <= self._chosen_for or responses > self._chosen_for:
            self._climb(state.cache.length, active)
        plain = plain_promise(self._times, state, active)
        if self._drafter is None:
            return state, Choice(None, None, 0, self._reason, plain, plain)
        proposer = self._proposers[self._drafter]
        strategy = _strategy(proposer, self._window)
        state, drafted = draft(proposer, strategy, state, active, statistics, self._buckets)
        self._answers[self._drafter] += (1, drafted.rows > 0)
        if not drafted.rows:
            self._trial = -(-self._trial // 2)
            reason = f"{self._drafter} had nothing to verify ({self._reason})"
            return state, Choice(None, None, 0, reason, plain, plain, seconds=drafted.seconds)
        watched = self._watched(drafted.proposal, active.requests)
        ladder, worth = self._ladder(state.cache.length), self._worth(state.cache.length, active)
        promised = plain * worth * ladder.speedup(self._drafter, self._rate, len(active.slots))
        choice = Choice(watched, drafted.found, drafted.rows, self._reason, promised, plain)
        return state, dataclasses.replace(choice, seconds=drafted.seconds)

    def _record_rollout(self) -> None:
        """The rollout that is over goes into the history, if it was one of training."""
        for drafter, own in self._own.items() if self._training else ():
            judged, accepted = np.sum(list(own.values()), axis=0).tolist()
            self._history.record(drafter, judged, accepted)
        self._own = {}

    def _climb(self, length: int, active: ActiveSlots) -> None:
        """Chooses for the responses that still run."""
        responses = len(active.slots) + active.standing_by
        ladder, history = self._ladder(length), self._history.rates
        rates, tried = dict(history), set()
        for drafter, own in self._own.items():
            running = [own[request] for request in active.requests.tolist() if request in own]
            if running:
                tried.add(drafter)
                judged, accepted = np.sum(running, axis=0).tolist()
                rates[drafter] = (accepted + _AS_EVIDENCE * history[drafter]) / (judged + _AS_EVIDENCE)
        for drafter, (asked, answered) in self._answers.items():
            if asked:  # who says nothing is never right
                rates[drafter] *= answered / asked
        self._chosen_for, self._most = responses, max(self._most, responses)
        slots, worth = len(active.slots), self._worth(length, active)
        ranking = ladder.ranking(rates, slots)
        best, self._drafter = ranking[0], ladder.first(rates, slots, 1 / worth)
        self._reason = f"{best} is first on the ladder"
        untried = [
            drafter
            for drafter in ranking
            if drafter not in tried and worth * ladder.speedup(drafter, rates[drafter], slots) > 1
        ]
        had = max(tried, key=lambda drafter: rates[drafter], default=None)
        if 2 * responses <= self._most and untried and had and rates[had] < _LITTLE * history[had]:
            best = self._drafter = untried[0]
            self._trial = _TRIAL
            self._reason = f"stragglers accept {rates[had]:.0%} of {had} and try {best}"
        speedup = worth * ladder.speedup(best, rates[best], slots)
        of = f"{rates[best]:.0%} acceptance, {responses} responses: {speedup:.2f} times plain decoding"
        self._reason += f"; at {of}"
        self._rate = rates[best]
        self._window = max(ladder.window(best, rates[best], slots), 1)

    def _ladder(self, length: int) -> Ladder:
        """Over caches of a length."""
        if length not in self._ladders:
            self._ladders[length] = profile(self._costs(length), _ACCEPTANCES)
        return self._ladders[length]

    def _worth(self, length: int, active: ActiveSlots) -> float:
        """What is left of a speed-up for these slots where others stand by: a plain step is one of all."""
        own, both = len(active.slots), len(active.slots) + active.standing_by
        plain = [self._times[self._buckets.batch_for(n), length, 0] for n in (own, both)]
        return own / both * plain[1] / plain[0] if own < both else 1.0

    def _costs(self, length: int) -> Costs:
        """What drafting and passes take over caches of a length."""
        batches = self._buckets.verified_batches(self._max_batch)
        verification: dict[int, float] = {}
        for batch in batches:
            for rows, _ in self._buckets.passes(batch):
                seconds = self._times[batch, length, rows]
                verification[rows] = max(seconds, verification.get(rows, 0.0))
        plain = {batch: self._times[batch, length, 0] for batch in batches}
        drafters = {
            name: self._draft_cost(proposer, length, batches) for name, proposer in self._proposers.items()
        }
        return Costs(drafters, plain, verification, self._buckets.max_drafts)

    def _draft_cost(self, proposer: Proposer, length: int, batches: Sequence[int]) -> DraftCost:
        """Of one token for each response; what asks the host costs next to nothing."""
        if isinstance(proposer, SelfProposer):
            seconds = [self._times[batch, length, DRAFT_STEP] for batch in batches]
        elif isinstance(proposer, DeviceProposer):
            strategies = proposer.drafter.strategies
            seconds = [
                min(self._times[batch, length, (proposer.name, each)] / each.depth for each in strategies)
                for batch in batches
            ]
        else:
            return DraftCost(0.0, 0.0)
        if len(seconds) == 1:
            return DraftCost(seconds[0], 0.0)
        slope, fixed = np.polyfit(batches, seconds, 1)
        slope = max(float(slope), 0.0)
        return DraftCost(max(float(fixed), 0.0) if slope else float(np.mean(seconds)), slope)

    def _watched(self, proposal: Proposal, requests: np.ndarray) -> _Watched:
        own = self._own.setdefault(proposal.name, {})

        def tell(judged: np.ndarray, taken: np.ndarray) -> None:
            for request, counts in zip(requests.tolist(), np.stack([judged, taken], axis=1), strict=True):
                own[request] = own.get(request, 0) + counts

        fields = {field.name: getattr(proposal, field.name) for field in dataclasses.fields(Proposal)}
        return _Watched(**fields, inner=proposal, tell=tell)

    def record(self, choice: Choice, batch: int, responses: int, tokens: int, seconds: float) -> None:
        """Acceptance is counted draft by draft; times are measured by whoever measures all of them."""

    def state(self) -> dict[str, np.ndarray]:
        self._record_rollout()  # checkpoints are made between rollouts
        return self._history.state()

    def load_state(self, state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        self._history.load_state(state)
        own = self._history.state().keys()
        return {name: array for name, array in state.items() if name not in own}


def _strategy(proposer: Proposer, window: int) -> Strategy:
    """How a drafter drafts so many tokens: of its trees the one whose depth is nearest, a chain, or a tree of
    any shape.
    """
    if isinstance(proposer, DeviceProposer):
        tree = min(proposer.drafter.strategies, key=lambda each: abs(each.depth - window))
        return Strategy(proposer.name, tree.depth, tree.top_k, min(tree.nodes, max(window, tree.depth)))
    return Strategy(proposer.name, window, 1 if isinstance(proposer, SelfProposer) else window, window)
