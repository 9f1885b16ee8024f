"""SpecActor's manager: one drafter for a rollout, by the draft ladder, and others for its stragglers.

SpecActor, section 4.2. The ladder (`draft_ladder.py`) turns the acceptance of earlier rollouts, and what
drafting and passes take, into the drafter to begin with. Whenever half of the responses have ended since the
last choice, it chooses anew for those that still run, by their own acceptance where they have one.
Stragglers that accept few of their drafter's tokens try the others for a few passes each, in the ladder's
order: how good a drafter is varies from request to request. The paper lets several drafters race for a
straggler on workers that have fallen idle; here all slots are decoded together, and the drafters take turns.
Measured with three drafters on two cores (docs/managers.md): 1.58 times plain decoding in the second
epoch, where the default manager reaches 2.09, since it keeps one drafter for most of a rollout.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from rljax.engine.buckets import Buckets
from rljax.engine.state import DecodeState
from rljax.requests import DecodeStatistics
from rljax.speculation.device_proposers import DeviceProposer, SelfProposer
from rljax.speculation.managers.drafting import draft
from rljax.speculation.managers.papers.draft_ladder import (
    AcceptanceHistory,
    Costs,
    DraftCost,
    Ladder,
    profile,
)
from rljax.speculation.pass_choice import Choice
from rljax.speculation.pass_record import PassRecord
from rljax.speculation.pass_times import PassTimes
from rljax.speculation.proposals import ActiveSlots, Proposer
from rljax.speculation.strategies import Strategy

_ACCEPTANCES = np.linspace(0.0, 1.0, 41)
_HISTORY_WEIGHT = 4.0  # draft tokens that the history counts as, against those of the running requests
_POOR = 0.5  # share of a drafter's acceptance in history below which others are tried
_TRIAL = 8  # passes


class LadderManager:
    """Chooses by the draft ladder.

    Args:
      proposers: the drafters.
      buckets: sizes of passes.
      times: measured times of passes and of drafting.
      max_batch: larger batches decode plainly.
    """

    def __init__(
        self, proposers: Sequence[Proposer], buckets: Buckets, times: PassTimes, max_batch: int
    ) -> None:
        self._proposers = {proposer.name: proposer for proposer in proposers}
        self._buckets, self._times, self._max_batch = buckets, times, max_batch
        self._history = AcceptanceHistory(list(self._proposers))
        # In this rollout, by drafter and request: draft tokens judged and accepted, int [2].
        self._request_counts: dict[str, dict[int, np.ndarray]] = {}
        self._training = False
        self.begin(False, 0)

    def begin(self, training: bool, step: int) -> None:
        self._record_rollout()
        self._training = training
        self._ladders: dict[int, Ladder] = {}  # by cache length
        self._drafter: str | None = None
        self._window, self._rate, self._reason = 0, 0.0, ""
        self._chosen_for = 0  # responses that the last choice was made for
        self._most = 0  # the most responses of a choice in this rollout
        self._trial = 0  # passes until the trial of a drafter is over; 0 where there is none
        # In this rollout, by drafter: passes in which it was asked, and in which it had something.
        self._answers = {name: np.zeros(2) for name in self._proposers}

    def choose(
        self, state: DecodeState, active: ActiveSlots, statistics: DecodeStatistics
    ) -> tuple[DecodeState, Choice]:
        # Choose a drafter anew when a trial is over, when half of the responses have ended, or at first.
        responses = len(active.slots) + active.standing_by
        trial_over = self._trial == 1
        self._trial = max(self._trial - 1, 0)
        if trial_over or 2 * responses <= self._chosen_for or responses > self._chosen_for:
            self._choose_drafter(state.cache.length, active)
        plain_rate = self._times.plain_rate(active.responses, state.batch, state.cache.length)
        if self._drafter is None:
            return state, Choice.plain(self._reason, plain_rate)
        # Draft with it.
        proposer = self._proposers[self._drafter]
        strategy = _strategy(proposer, self._window)
        state, drafted = draft(proposer, strategy, state, active, statistics, self._buckets)
        self._answers[self._drafter] += (1, drafted.rows > 0)
        if not drafted.rows:
            self._trial = -(-self._trial // 2)
            reason = f"{self._drafter} had nothing to verify ({self._reason})"
            return state, Choice.plain(reason, plain_rate, draft_seconds=drafted.seconds)
        ladder = self._ladder(state.cache.length)
        share = self._remaining_speedup(state.cache.length, active)
        return state, Choice.verify(
            drafted.proposal,
            drafted.candidates,
            drafted.rows,
            self._reason,
            expected_rate=plain_rate * share * ladder.speedup(self._drafter, self._rate, len(active.slots)),
            plain_rate=plain_rate,
            draft_seconds=drafted.seconds,
        )

    def record(self, record: PassRecord) -> None:
        if record.nodes is None:
            return
        proposal = record.choice.proposal
        judged, taken = proposal.judged(record.nodes.verified, record.nodes.correct)
        counts = self._request_counts.setdefault(proposal.name, {})
        for request, added in zip(record.requests.tolist(), np.stack([judged, taken], axis=1), strict=True):
            counts[request] = counts.get(request, 0) + added

    def _record_rollout(self) -> None:
        """Adds the rollout that is over to the history, if it was one of training."""
        for drafter, counts in self._request_counts.items() if self._training else ():
            judged, accepted = np.sum(list(counts.values()), axis=0).tolist()
            self._history.record(drafter, judged, accepted)
        self._request_counts = {}

    def _choose_drafter(self, length: int, active: ActiveSlots) -> None:
        """Chooses drafter and window for the responses that still run."""
        responses = len(active.slots) + active.standing_by
        self._chosen_for, self._most = responses, max(self._most, responses)
        history = self._history.rates
        rates, tried = self._current_rates(history, active.requests.tolist())
        # The ladder's first, unless plain decoding is faster.
        slots, share = len(active.slots), self._remaining_speedup(length, active)
        ladder = self._ladder(length)
        ranking = ladder.ranking(rates, slots)
        best, self._drafter = ranking[0], ladder.first(rates, slots, 1 / share)
        self._reason = f"{best} is first on the ladder"
        # In the tail, stragglers whose drafter does badly try the next one that they have not had.
        untried = [
            drafter
            for drafter in ranking
            if drafter not in tried and share * ladder.speedup(drafter, rates[drafter], slots) > 1
        ]
        had = max(tried, key=lambda drafter: rates[drafter], default=None)
        if 2 * responses <= self._most and untried and had and rates[had] < _POOR * history[had]:
            best = self._drafter = untried[0]
            self._trial = _TRIAL
            self._reason = f"stragglers accept {rates[had]:.0%} of {had} and try {best}"
        speedup = share * ladder.speedup(best, rates[best], slots)
        shape = f"{rates[best]:.0%} acceptance, {responses} responses"
        self._reason += f"; at {shape}: {speedup:.2f} times plain decoding"
        self._rate = rates[best]
        self._window = max(ladder.window(best, rates[best], slots), 1)

    def _current_rates(
        self, history: Mapping[str, float], requests: Sequence[int]
    ) -> tuple[dict[str, float], set[str]]:
        """Acceptance by drafter for the running requests, and the drafters that these have tried."""
        rates, tried = dict(history), set()
        for drafter, counts in self._request_counts.items():
            running = [counts[request] for request in requests if request in counts]
            if running:
                tried.add(drafter)
                judged, accepted = np.sum(running, axis=0).tolist()
                rates[drafter] = (accepted + _HISTORY_WEIGHT * history[drafter]) / (judged + _HISTORY_WEIGHT)
        for drafter, (asked, answered) in self._answers.items():
            if asked:  # a drafter that proposes nothing is never right
                rates[drafter] *= answered / asked
        return rates, tried

    def _ladder(self, length: int) -> Ladder:
        """The ladder for caches of a length."""
        if length not in self._ladders:
            self._ladders[length] = profile(self._costs(length), _ACCEPTANCES)
        return self._ladders[length]

    def _remaining_speedup(self, length: int, active: ActiveSlots) -> float:
        """Share of a speed-up that is left where other slots stand by: a plain step serves all of them."""
        slots, both = len(active.slots), len(active.slots) + active.standing_by
        plain = [self._times.plain(self._buckets.batch_for(n), length) for n in (slots, both)]
        return slots / both * plain[1] / plain[0] if slots < both else 1.0

    def _costs(self, length: int) -> Costs:
        """Seconds of drafting and of passes over caches of a length."""
        batches = self._buckets.verified_batches(self._max_batch)
        verification: dict[int, float] = {}
        for batch in batches:
            for rows, _ in self._buckets.passes(batch):
                seconds = self._times.verify(batch, length, rows)
                verification[rows] = max(seconds, verification.get(rows, 0.0))
        plain = {batch: self._times.plain(batch, length) for batch in batches}
        drafters = {
            name: self._draft_cost(proposer, length, batches) for name, proposer in self._proposers.items()
        }
        return Costs(drafters, plain, verification, self._buckets.max_drafts)

    def _draft_cost(self, proposer: Proposer, length: int, batches: Sequence[int]) -> DraftCost:
        """Seconds of drafting one token for every response: a line through the measured batches."""
        if isinstance(proposer, SelfProposer):
            seconds = [self._times.draft(batch, length, proposer.name) for batch in batches]
        elif isinstance(proposer, DeviceProposer):
            strategies = proposer.drafter.strategies
            seconds = [
                min(self._times.draft(batch, length, proposer.name, tree) / tree.depth for tree in strategies)
                for batch in batches
            ]
        else:  # drafting on the host costs next to nothing
            return DraftCost(0.0, 0.0)
        if len(seconds) == 1:
            return DraftCost(seconds[0], 0.0)
        slope, fixed = np.polyfit(batches, seconds, 1)
        slope = max(float(slope), 0.0)
        return DraftCost(max(float(fixed), 0.0) if slope else float(np.mean(seconds)), slope)

    def state(self) -> dict[str, np.ndarray]:
        self._record_rollout()  # checkpoints are made between rollouts
        return self._history.state()

    def load_state(self, state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        self._history.load_state(state)
        names = self._history.state().keys()
        return {name: array for name, array in state.items() if name not in names}


def _strategy(proposer: Proposer, window: int) -> Strategy:
    """The strategy that drafts about `window` tokens: a chain, a tree of any shape, or of the trees that the
    drafter has, the one whose depth is nearest.
    """
    if isinstance(proposer, DeviceProposer):
        tree = min(proposer.drafter.strategies, key=lambda tree: abs(tree.depth - window))
        return Strategy(tree.depth, tree.top_k, min(tree.nodes, max(window, tree.depth)), proposer.name)
    top_k = 1 if isinstance(proposer, SelfProposer) else window
    return Strategy(window, top_k, window, proposer.name)
