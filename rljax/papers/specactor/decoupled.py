"""SpecActor's choice of coupled, decoupled or plain decoding, of the window, and for single requests.

SpecActor, section 4.1. Algorithm 1 (`plan` in `planner.py`) chooses before a rollout, whenever the
decode state has another shape, and every thousand tokens, from measured times and the acceptance so far. The
devices are given: one group verifies, another one may draft. Algorithm 2 (`reconfigure`) then chooses anew
for the requests that are accepted less than the mean. They share their passes with the others, so each of its
answers is a rule for what is drafted for the request (`DraftWindows`):

    plain        nothing
    coupled      a window, while none of its drafts is unanswered: every other pass
    decoupled    a window of its own

With further drafters (`choice: ladder`) the draft ladder and races (`best_of_n.py`, section 4.2) come first.
As long as they give no request another drafter, Algorithm 1 says how this one drafts. In passes in which
another one does, it drafts between passes, as they do: a race is decided by what is accepted alone.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from drafters.device import AheadDrafting
from rljax.engine.state import DecodeState
from rljax.papers.specactor import SpecActorKeys
from rljax.papers.specactor.best_of_n import LadderManager
from rljax.papers.specactor.planner import Choice as Planned
from rljax.papers.specactor.planner import Profile, plan, reconfigure
from rljax.requests import DecodeStatistics
from rljax.speculation.managers.drafting import draft, verify_all
from rljax.speculation.managers.manager import Manager, Setup
from rljax.speculation.pass_choice import Choice
from rljax.speculation.pass_record import PassRecord
from rljax.speculation.proposals import ActiveSlots
from rljax.speculation.strategies import Strategy
from rljax.speculation.window_costs import Affine

_TOKENS = 1000  # between two choices, as in the paper
_PRIOR_DRAFTS = 16.0  # drafts of the mean's acceptance that every request begins with


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What was chosen for a decode state.

    Attributes:
      shape: batch and cache length.
      requests: number of requests that ran.
      all: for all of them.
      others: for single requests.
    """

    shape: tuple[int, int]
    requests: int
    all: Planned
    others: Mapping[int, Planned]


class DecoupledManager(Manager):
    """Chooses by SpecActor's Algorithms 1 and 2.

    Args:
      setup: the drafter, sizes and times.
      config: the keys. `decoupled.modes` are the ways to decode to choose among.
    """

    def __init__(self, setup: Setup, config: SpecActorKeys) -> None:
        self._proposer = setup.proposers[0]
        self._ladder = LadderManager(setup, config) if len(setup.proposers) > 1 else None
        self._buckets, self._times, self._modes = setup.buckets, setup.times, config.decoupled.modes
        self.begin(False, 0)

    @property
    def _ahead(self) -> AheadDrafting:
        return self._proposer.slots.ahead

    def begin(self, training: bool, step: int) -> None:
        """Everything is chosen anew."""
        if self._ladder is not None:
            self._ladder.begin(training, step)
        self._plan: _Plan | None = None
        self._tokens = 0  # since the last choice
        self._counts: dict[int, np.ndarray] = {}  # by request: drafts scored and accepted, float [2]

    def choose(
        self, state: DecodeState, active: ActiveSlots, statistics: DecodeStatistics
    ) -> tuple[DecodeState, Choice]:
        events: list[str] = []
        if self._ladder is not None:
            planned = self._ladder.planned(state, active)
            if planned.by_others(self._proposer.name):
                slots = active.slots  # drafted for between passes
                windows = np.full(len(slots), self._ahead.window, np.int32)
                self._ahead.configure(slots, windows, np.zeros(len(slots), bool), drafts_ahead=False)
                return self._ladder.carry_out(planned, state, active, statistics)
            events = planned.events
        state, choice = self._by_algorithm_1(state, active, statistics)
        return state, dataclasses.replace(choice, events=[*choice.events, *events])

    def _by_algorithm_1(
        self, state: DecodeState, active: ActiveSlots, statistics: DecodeStatistics
    ) -> tuple[DecodeState, Choice]:
        shape = (state.batch, state.cache.length)
        chosen = self._chosen(shape, active)
        plain_rate = self._times.plain_rate(active.responses, *shape)
        reason = _reason(chosen)
        if chosen.all.mode == "plain":
            return state, Choice.plain(reason, plain_rate)
        each = [chosen.others.get(request, chosen.all) for request in active.requests.tolist()]
        decoupled = chosen.all.mode == "decoupled"
        self._ahead.configure(
            active.slots,
            np.asarray([choice.window for choice in each], np.int32),
            np.asarray([choice.mode == "decoupled" for choice in each], bool),
            drafts_ahead=decoupled,
        )
        # Chains may be longer than a window where a pass had no room for all of them.
        width = min(2 * self._ahead.window - 1, self._buckets.max_drafts) if decoupled else chosen.all.window
        strategy = Strategy(width, 1, width, self._proposer.name)
        state, drafted = draft(self._proposer, strategy, state, active, statistics, self._buckets)
        if not drafted.rows:
            return state, Choice.plain(
                f"nothing is ready ({reason})", plain_rate, draft_seconds=drafted.seconds
            )
        return state, verify_all(drafted, state, self._buckets, self._times, reason, plain_rate)

    def _chosen(self, shape: tuple[int, int], active: ActiveSlots) -> _Plan:
        """The present choice; a new one where it is due."""
        requests, plan_ = active.responses, self._plan
        due = plan_ is None or plan_.all.mode == "plain" or plan_.shape != shape
        if due or requests > plan_.requests or self._tokens >= _TOKENS:
            self._tokens = 0
            self._plan = plan_ = self._choose(shape, active)
        return plan_

    def _choose(self, shape: tuple[int, int], active: ActiveSlots) -> _Plan:
        requests, window = max(active.responses, 1), self._ahead.window
        profile, acceptance = self._profile(shape, len(active.slots)), self._proposer.acceptance
        # Where nothing drafts beside, the devices of the drafter are idle: they are not the verifier's.
        choices = [
            plan(requests, devices, profile, acceptance, window, [mode])
            for mode, devices in (("plain", 1), ("coupled", 1), ("decoupled", 2))
            if mode in self._modes
        ]
        best = max(choices, key=lambda choice: choice.speed)
        others = {}
        if best.mode != "plain":
            acceptances = {request: self._acceptance(request) for request in active.requests.tolist()}
            alone = self._profile((self._buckets.batch[0], shape[1]), 1)  # the paper's b = 1
            others = reconfigure(acceptances, best, alone, window)
        return _Plan(shape, active.responses, best, others)

    def _profile(self, shape: tuple[int, int], slots: int) -> Profile:
        """Measured times of a shape with so many requests: a drafter and a verifier, which take one group of
        devices each.
        """
        (batch, length), tree = shape, self._proposer.trees[-1]
        drafting = self._times.draft(batch, length, self._proposer.name, tree) / tree.depth
        sizes = [rows for rows, _ in self._buckets.passes(batch)]

        def verifier(window: int) -> Affine:
            if not window:
                return Affine(0.0, self._times.plain(batch, length))
            rows = next((rows for rows in sizes if rows >= slots * (window + 1)), sizes[-1])
            return Affine(0.0, self._times.verify(batch, length, rows))

        return Profile({1: Affine(0.0, drafting)}, {1: verifier})

    def _acceptance(self, request: int) -> float:
        """Acceptance of a request's drafts, drawn to that of all drafts while few of its own were scored."""
        scored, taken = self._counts.get(request, np.zeros(2))
        return (taken + _PRIOR_DRAFTS * self._proposer.acceptance) / (scored + _PRIOR_DRAFTS)

    def record(self, record: PassRecord) -> None:
        self._tokens += record.tokens
        if self._ladder is not None:
            self._ladder.record(record)
        if record.nodes is None:
            return
        proposal, nodes = record.choice.proposal, record.nodes
        for part, verified, correct in proposal.by_drafter(nodes.verified, nodes.correct):
            if part.name != self._proposer.name:
                continue
            counts = np.stack(part.scored(verified, correct), axis=1)
            for request, added in zip(record.requests.tolist(), counts, strict=True):
                self._counts[request] = self._counts.get(request, np.zeros(2)) + added

    def state(self) -> dict[str, np.ndarray]:
        return {} if self._ladder is None else self._ladder.state()

    def load_state(self, state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return state if self._ladder is None else self._ladder.load_state(state)


def _reason(chosen: _Plan) -> str:
    """A sentence for the log."""
    best = chosen.all
    if best.mode == "plain":
        return "Algorithm 1: plain steps are fastest"
    ways: dict[str, int] = {}
    for other in chosen.others.values():
        way = other.mode if other.mode == "plain" else f"{other.mode} {other.window}"
        ways[way] = ways.get(way, 0) + 1
    changed = "".join(f", {count} x {way}" for way, count in sorted(ways.items()))
    return f"Algorithm 1: {best.mode}, windows of {best.window}{changed}"
