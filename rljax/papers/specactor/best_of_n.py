"""SpecActor's manager: one drafter for a rollout, by the draft ladder, and for stragglers what wins a race.

SpecActor, section 4.2. The ladder (`ladder.py`) turns the acceptance of earlier rollouts, and what
drafting and passes take, into the drafter to begin with. Whenever half of the responses have ended since the
last choice, it chooses anew for those that still run and have not found a drafter of their own, by their
acceptance where they have one. How good a drafter is varies from request to request: once half of the
responses have ended, or slots are idle, those that are accepted badly race (`races.py`), and each
goes on with the drafter that did best for it, beside others in the same pass.
"""

import dataclasses
import time
from collections.abc import Sequence

import numpy as np

from rljax.config.speculation_keys import SpeculationKeys
from rljax.engine.state import DecodeState
from rljax.papers.specactor.ladder import AcceptanceHistory, LadderCosts
from rljax.papers.specactor.pass_plan import Entries, Entry, plan_pass
from rljax.papers.specactor.races import Races, RaceState, RequestAcceptance
from rljax.processes import agree
from rljax.requests import DecodeStatistics
from rljax.speculation.managers.drafting import Drafted, strategy_of
from rljax.speculation.managers.manager import Manager, Setup
from rljax.speculation.mixing import Mixer, check_one_tree
from rljax.speculation.pass_choice import Choice
from rljax.speculation.pass_record import PassRecord
from rljax.speculation.proposals import ActiveSlots


@dataclasses.dataclass(frozen=True)
class PlannedPass:
    """A pass before anything is drafted.

    Attributes:
      racing: what was known.
      plan: drafters and windows of every active slot.
      events: sentences for the log, on races that have ended or begun.
    """

    racing: RaceState
    plan: Sequence[Entries]
    events: list[str]

    def by_others(self, drafter: str) -> bool:
        """Whether another one drafts for some slot."""
        return any(entry.drafter != drafter for entries in self.plan for entry in entries)


class LadderManager(Manager):
    """Chooses by the draft ladder, and by races.

    Args:
      setup: drafters, sizes and times.
      config: not read; the ladder has no keys.
    """

    def __init__(self, setup: Setup, config: SpeculationKeys) -> None:
        check_one_tree(setup.proposers)
        self._proposers = {proposer.name: proposer for proposer in setup.proposers}
        self._buckets, self._times = setup.buckets, setup.times
        self._costs = LadderCosts(setup)
        self._mixer = Mixer(setup.proposers, setup.buckets.max_drafts)
        self._history = AcceptanceHistory(list(self._proposers))
        self._acceptance = RequestAcceptance(self._proposers)
        self._training = False
        self.begin(False, 0)

    def begin(self, training: bool, step: int) -> None:
        self._record_rollout()
        self._mixer.forget()
        self._training = training
        self._costs.begin()
        self._races = Races()
        self._first: Entry | None = None  # the drafter of requests that have none of their own
        self._reason = ""
        self._chosen_for = 0  # responses that it was chosen for
        self._most = 0  # the most responses of this rollout

    def choose(
        self, state: DecodeState, active: ActiveSlots, statistics: DecodeStatistics
    ) -> tuple[DecodeState, Choice]:
        return self.carry_out(self.planned(state, active), state, active, statistics)

    def planned(self, state: DecodeState, active: ActiveSlots) -> PlannedPass:
        """Returns who drafts for whom in the next pass."""
        # Races that are over, and in the tail new ones; then the drafter of all other requests.
        responses = len(active.slots) + active.inactive
        self._most = max(self._most, responses)
        racing = self._race_state(state, active)
        events = self._races.end(racing)
        if 2 * responses <= self._most or responses < state.batch:
            self._races.enter(racing)
        if 2 * responses <= self._chosen_for or responses > self._chosen_for:
            self._choose_first(state.cache.length, active)
            racing = dataclasses.replace(racing, first=self._first)
        plan = plan_pass(self._races.first_come(racing), self._races.wanted(racing), racing.estimate)
        return PlannedPass(racing, plan, events)

    def carry_out(
        self, planned: PlannedPass, state: DecodeState, active: ActiveSlots, statistics: DecodeStatistics
    ) -> tuple[DecodeState, Choice]:
        """Drafts as it was planned for these slots. Consumes `state`."""
        racing, plan, events = planned.racing, planned.plan, planned.events
        plain_rate = self._times.plain_rate(active.responses, state.batch, state.cache.length)
        if not any(plan):
            return state, Choice.plain(self._reason, plain_rate, events=events)
        events = events + self._races.run(racing.requests, plan)
        start, proposals = time.perf_counter(), []
        for name, proposer in self._proposers.items():
            windows = np.asarray([sum(each.window for each in of if each.drafter == name) for of in plan])
            if windows.any():
                strategy = strategy_of(proposer, int(windows.max()))
                state, proposal = proposer.propose(state, active, statistics, strategy)
                kept = proposal.within(strategy)
                kept &= np.cumsum(kept, axis=1) <= windows[:, None]
                proposals.append(dataclasses.replace(proposal, usable=kept))
        # Drafts of several drafters for a slot are branches of one tree.
        proposal = proposals[0] if len(proposals) == 1 else self._mixer.mix(proposals, len(plan))
        (seconds,) = agree(time.perf_counter() - start)
        drafted = Drafted.of(proposal, proposal.usable, seconds, state.batch, active, self._buckets)
        for each in proposals:  # count for every request which of its drafters had something
            asked = [slot for slot, of in enumerate(plan) if each.name in {entry.drafter for entry in of}]
            answered = each.usable.any(axis=1)[asked].tolist()
            self._acceptance.ask(each.name, [racing.requests[slot] for slot in asked], answered)
        if not drafted.rows:
            names = " and ".join(each.name for each in proposals)
            reason = f"{names} had nothing to verify ({self._reason})"
            return state, Choice.plain(reason, plain_rate, draft_seconds=drafted.seconds, events=events)
        return state, Choice.verify(
            drafted.proposal,
            drafted.candidates,
            drafted.rows,
            "; ".join([self._reason, *self._own_drafters(racing.requests, plan)]),
            expected_rate=racing.estimate.rate(plan),
            plain_rate=plain_rate,
            draft_seconds=drafted.seconds,
            events=events,
        )

    def record(self, record: PassRecord) -> None:
        if record.nodes is None:
            return
        proposal, nodes = record.choice.proposal, record.nodes
        for part, verified, correct in proposal.by_drafter(nodes.verified, nodes.correct):
            self._acceptance.add(part.name, record.requests.tolist(), *part.scored(verified, correct))

    def _record_rollout(self) -> None:
        """Adds the rollout that is over to the history, if it was one of training."""
        for drafter, (scored, accepted) in self._acceptance.totals().items() if self._training else ():
            self._history.record(drafter, scored, accepted)
        self._acceptance = RequestAcceptance(self._proposers)

    def _choose_first(self, length: int, active: ActiveSlots) -> None:
        """Chooses drafter and window for the requests that have none of their own: the ladder's first, unless
        plain decoding is faster.
        """
        responses = self._chosen_for = len(active.slots) + active.inactive
        undecided = [request for request in active.requests.tolist() if not self._races.has_own(request)]
        rates = self._acceptance.rates(undecided, self._history.rates)
        ladder, slots = self._costs.ladder(length), len(active.slots)
        share = self._costs.remaining_speedup(length, active)
        best, chosen = ladder.ranking(rates, slots)[0], ladder.first(rates, slots, 1 / share)
        window = max(ladder.window(best, rates[best], slots), 1)
        self._first = None if chosen is None else Entry(chosen, rates[best], window)
        speedup = share * ladder.speedup(best, rates[best], slots)
        shape = f"{rates[best]:.0%} acceptance, {responses} responses"
        self._reason = f"{best} is first on the ladder; at {shape}: {speedup:.2f} times plain decoding"

    def _race_state(self, state: DecodeState, active: ActiveSlots) -> RaceState:
        """What is known before a pass."""
        length = state.cache.length
        return RaceState(
            active.requests.tolist(),
            self._acceptance,
            self._history.rates,
            self._costs.ladder(length),
            self._costs.estimate(state.batch, length, active),
            self._first,
        )

    def _own_drafters(self, requests: Sequence[int], plan: Sequence[Entries]) -> list[str]:
        """Sentences on the requests that have another drafter than the first, or several, for the log."""
        sentences = []
        for request, entries in zip(requests, plan, strict=True):
            if self._races.has_own(request):
                names = " and ".join(entry.drafter for entry in entries) or "no drafter"
                sentences.append(f"request {request} {'races' if len(entries) > 1 else 'has'} {names}")
        return sentences

    def state(self) -> dict[str, np.ndarray]:
        self._record_rollout()  # checkpoints are made between rollouts
        return self._history.state() | self._mixer.state()

    def load_state(self, state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        self._history.load_state(state)
        names = self._history.state().keys()
        return self._mixer.load_state({name: array for name, array in state.items() if name not in names})
