"""SpecActor's draft ladder: the predicted speed-up of every drafter, by acceptance and batch.

SpecActor, section 4.2. No drafter is best for all requests, and how well one will do is not known
beforehand. But the speed-up that an acceptance rate brings can be profiled offline, without the policy's
weights: the cost of drafting does not depend on them, and the cost of verifying does not depend on which
tokens are accepted. The table of these speed-ups, the draft ladder, turns the acceptance of earlier rollouts
into the drafter to begin with, and ranks the others for stragglers.

The paper times passes whose tokens are accepted at random. Here their expected number is taken: drafts that
are each accepted with probability a, given those before, bring 1 + a + ... + a^w tokens from a window of w.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from rljax.papers.specactor.pass_plan import PassEstimate
from rljax.speculation.acceptance import ChainAcceptance
from rljax.speculation.managers.manager import Setup
from rljax.speculation.pass_times import PassTimes
from rljax.speculation.proposals import ActiveSlots, Proposer
from rljax.speculation.window_costs import Affine

_ACCEPTANCES = np.linspace(0.0, 1.0, 41)


@dataclasses.dataclass(frozen=True)
class Costs:
    """Measured times of a machine.

    Attributes:
      drafters: seconds of drafting one token for each request of a batch, by name (section 4.1).
      plain: seconds of a step of plain decoding, by batch.
      verification: seconds of a verifying pass, by compiled rows. A pass over fewer rows takes as long as the
        next larger one.
      max_window: draft tokens of a request in a pass at most.
    """

    drafters: Mapping[str, Affine]
    plain: Mapping[int, float]
    verification: Mapping[int, float]
    max_window: int


@dataclasses.dataclass(frozen=True)
class Ladder:
    """Predicted speed-up over plain decoding by drafter, acceptance and batch; made by `profile`.

    Drafters are ranked by a history: a mapping from names to acceptance, the probability that a draft token
    is accepted, given that its predecessors are (`AcceptanceHistory.rates`). For one straggler, the entry of
    the drafter that it had is replaced by its own acceptance: `history | {drafter: rate}`.

    Attributes:
      drafters: names [D].
      acceptances: float64 [A], ascending.
      batches: int64 [B], ascending.
      speedups: float64 [D, A, B], speed-ups with the best window; 0 where no window fits into a pass.
      windows: int64 [D, A, B], the best windows.
    """

    drafters: tuple[str, ...]
    acceptances: np.ndarray
    batches: np.ndarray
    speedups: np.ndarray
    windows: np.ndarray

    def speedup(self, drafter: str, acceptance: float, batch: int) -> float:
        """Predicted speed-up: linear between acceptances; batches are rounded up, to the largest at most."""
        of_drafter = self.speedups[self.drafters.index(drafter), :, self._column(batch)]
        return float(np.interp(acceptance, self.acceptances, of_drafter))

    def window(self, drafter: str, acceptance: float, batch: int) -> int:
        """The window behind the speed-up, at the nearest acceptance in the table."""
        nearest = int(np.abs(self.acceptances - acceptance).argmin())
        return int(self.windows[self.drafters.index(drafter), nearest, self._column(batch)])

    def first(self, history: Mapping[str, float], batch: int, least: float = 1.0) -> str | None:
        """The drafter that a rollout begins with; None (plain) where no speed-up exceeds `least`."""
        best = self.ranking(history, batch)[0]
        return best if self.speedup(best, history[best], batch) > least else None

    def ranking(self, history: Mapping[str, float], batch: int) -> list[str]:
        """All drafters, the most promising first; equals in the order of `drafters`."""
        missing = [drafter for drafter in self.drafters if drafter not in history]
        if missing:
            raise ValueError(f"history: no acceptance of {', '.join(missing)}")
        return sorted(self.drafters, key=lambda drafter: -self.speedup(drafter, history[drafter], batch))

    def _column(self, batch: int) -> int:
        return min(int(np.searchsorted(self.batches, batch)), len(self.batches) - 1)


def profile(costs: Costs, acceptances: Sequence[float]) -> Ladder:
    """The draft ladder of a machine.

    Args:
      costs: measured times.
      acceptances: ascending shares of the table; values between are interpolated.

    Raises:
      ValueError: acceptances that are not ascending shares, or missing measurements.
    """
    rates = np.asarray(acceptances, np.float64)
    if not len(rates) or rates[0] < 0 or rates[-1] > 1 or not (np.diff(rates) > 0).all():
        raise ValueError(f"acceptances: {list(acceptances)}; expected ascending shares")
    for name in ("drafters", "plain", "verification"):
        if not getattr(costs, name):
            raise ValueError(f"{name}: nothing was measured")
    batches = np.asarray(sorted(costs.plain), np.int64)
    rows = np.asarray(sorted(costs.verification))
    pass_seconds = np.asarray([costs.verification[size] for size in rows])
    windows = np.arange(1, costs.max_window + 1)
    tokens = np.cumsum(rates[:, None] ** np.arange(costs.max_window + 1), axis=1)[:, 1:]  # [A, W]
    shape = (len(costs.drafters), len(rates), len(batches))
    speedups, best_windows = np.zeros(shape), np.zeros(shape, np.int64)
    for column, batch in enumerate(batches.tolist()):
        fit = windows[batch * (windows + 1) <= rows[-1]]
        if not len(fit):
            continue
        verifying = pass_seconds[np.searchsorted(rows, batch * (fit + 1))]
        for index, cost in enumerate(costs.drafters.values()):
            seconds = fit * cost(batch) + verifying
            predicted = tokens[:, : len(fit)] * costs.plain[batch] / seconds
            speedups[index, :, column] = predicted.max(axis=1)
            best_windows[index, :, column] = fit[predicted.argmax(axis=1)]
    return Ladder(tuple(costs.drafters), rates, batches, speedups, best_windows)


class AcceptanceHistory:
    """The acceptance of every drafter in the rollouts that used it.

    It changes little over a hundred steps (section 6), so a drafter that is not used keeps its acceptance.
    """

    def __init__(self, drafters: Sequence[str]) -> None:
        self._acceptance = {drafter: ChainAcceptance() for drafter in drafters}

    def record(self, drafter: str, scored: int, accepted: int) -> None:
        """A rollout with a drafter is over; counts of earlier ones weigh half from now on.

        Args:
          drafter: its name.
          scored: its draft tokens that were verified and whose predecessors were accepted.
          accepted: those of them that were accepted.
        """
        self._acceptance[drafter].forget()
        self._acceptance[drafter].add(scored, accepted)

    @property
    def rates(self) -> dict[str, float]:
        """Acceptance by drafter, as `Ladder` ranks by it."""
        return {drafter: acceptance.rate for drafter, acceptance in self._acceptance.items()}

    def state(self) -> dict[str, np.ndarray]:
        """Checkpoint content."""
        return {
            f"acceptance_of_{drafter}": acceptance.state() for drafter, acceptance in self._acceptance.items()
        }

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Restores `state`; drafters that are not in it begin anew."""
        for drafter, acceptance in self._acceptance.items():
            acceptance.load_state(state.get(f"acceptance_of_{drafter}", np.zeros(2)))


class LadderCosts:
    """What drafting and passes take, as it was measured before a rollout.

    Args:
      setup: drafters, sizes and times.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup, self._buckets, self._times = setup, setup.buckets, setup.times
        self.begin()

    def begin(self) -> None:
        """A rollout begins: all is read from the measured times once more."""
        self._costs: dict[int, Costs] = {}  # by cache length
        self._ladders: dict[int, Ladder] = {}
        self._passes: dict[tuple[int, int], list[tuple[int, int, float]]] = {}  # by batch and cache length

    def ladder(self, length: int) -> Ladder:
        """The draft ladder for caches of a length."""
        if length not in self._ladders:
            self._ladders[length] = profile(self._costs_of(length), _ACCEPTANCES)
        return self._ladders[length]

    def estimate(self, batch: int, length: int, active: ActiveSlots) -> PassEstimate:
        """Predictions for the next pass over a state of this batch and cache length."""
        if (batch, length) not in self._passes:
            self._passes[batch, length] = [
                (rows, nodes, self._times.verify(batch, length, rows))
                for rows, nodes in self._buckets.passes(batch)
            ]
        costs = self._costs_of(length)
        drafting = {name: cost(batch) for name, cost in costs.drafters.items()}
        passes = self._passes[batch, length]
        return PassEstimate(costs.plain[batch], passes, drafting, active.current, active.inactive)

    def remaining_speedup(self, length: int, active: ActiveSlots) -> float:
        """Share of a speed-up that is left where other slots stand by: a plain step serves all of them."""
        slots, both = len(active.slots), len(active.slots) + active.inactive
        plain = [self._times.plain(self._buckets.batch_for(n), length) for n in (slots, both)]
        return slots / both * plain[1] / plain[0] if slots < both else 1.0

    def _costs_of(self, length: int) -> Costs:
        if length not in self._costs:
            batches = self._buckets.verified_batches(self._setup.max_batch)
            verification: dict[int, float] = {}
            for batch in batches:
                for rows, _ in self._buckets.passes(batch):
                    seconds = self._times.verify(batch, length, rows)
                    verification[rows] = max(seconds, verification.get(rows, 0.0))
            plain = {batch: self._times.plain(batch, length) for batch in batches}
            drafters = {
                proposer.name: _draft_cost(proposer, self._times, length, batches)
                for proposer in self._setup.proposers
            }
            self._costs[length] = Costs(drafters, plain, verification, self._buckets.max_drafts)
        return self._costs[length]


def _draft_cost(proposer: Proposer, times: PassTimes, length: int, batches: Sequence[int]) -> Affine:
    """Seconds of drafting one token for every response: a line through the measured batches."""
    if proposer.on_host:  # which costs next to nothing
        return Affine(0.0, 0.0)
    trees = proposer.trees or (None,)
    seconds = [
        min(times.draft(batch, length, proposer.name, tree) / (tree.depth if tree else 1) for tree in trees)
        for batch in batches
    ]
    if len(seconds) == 1:
        return Affine(0.0, seconds[0])
    slope, fixed = np.polyfit(batches, seconds, 1)
    slope = max(float(slope), 0.0)
    return Affine(slope, max(float(fixed), 0.0) if slope else float(np.mean(seconds)))
