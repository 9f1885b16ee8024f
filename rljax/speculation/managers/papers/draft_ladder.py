"""Which drafter a rollout begins with, and which ones its stragglers try next.

SpecActor, section 4.2: no drafter is best for all requests, and how well one will do is not known before. But
what an acceptance rate is worth with a drafter can be profiled offline, without the policy's weights: what
drafting costs does not depend on them, and for what verifying costs it does not matter which tokens are
accepted. The table of that, the draft ladder, turns the acceptance of earlier rollouts into the drafter to
begin with. In the tail, requests whose drafter does badly get the others, best first, on slots that have
fallen idle.

The paper times passes whose tokens are accepted at random. Here their number is its expectation: drafts that
are each accepted with probability a, given those before, bring 1 + a + ... + a^w tokens from a window of w.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Self

import numpy as np

_PRIOR_ACCEPTANCE, _PRIOR_DRAFTS = 0.8, 16.0  # a drafter that was never tried is worth a try
_FORGET = 0.5


@dataclasses.dataclass(frozen=True)
class DraftCost:
    """Seconds of drafting one token for each request of a batch: `fixed + per_request * batch` (section 4.1).

    Attributes:
      fixed: of a step, however small the batch. 0 of drafters that look tokens up.
      per_request: on top for every request.
    """

    fixed: float
    per_request: float

    def seconds(self, batch: int) -> float:
        return self.fixed + self.per_request * batch


@dataclasses.dataclass(frozen=True)
class Costs:
    """What was measured on a machine.

    Attributes:
      drafters: by name.
      plain: seconds of a step of plain decoding, by batch.
      verification: seconds of a verifying pass, by the rows that are compiled. One over fewer rows takes as
        long as the next larger.
      max_window: draft tokens of a request in a pass at most.
    """

    drafters: Mapping[str, DraftCost]
    plain: Mapping[int, float]
    verification: Mapping[int, float]
    max_window: int


@dataclasses.dataclass(frozen=True)
class Ladder:
    """Predicted speed-up over plain decoding by drafter, acceptance and batch; made by `profile`.

    Drafters are ranked by a history: from each one's name to its acceptance, the share of its draft tokens
    that are accepted of those whose predecessors are (`AcceptanceHistory.rates`). For one straggler, that of
    the drafter it had is its own: `history | {drafter: own}`.

    Attributes:
      drafters: names [D].
      acceptances: float64 [A], ascending.
      batches: int64 [B], ascending.
      speedups: float64 [D, A, B], with the best window; 0 where no window fits into a pass.
      windows: int64 [D, A, B], that window.
    """

    drafters: tuple[str, ...]
    acceptances: np.ndarray
    batches: np.ndarray
    speedups: np.ndarray
    windows: np.ndarray

    def speedup(self, drafter: str, acceptance: float, batch: int) -> float:
        """Predicted speed-up; between acceptances linear, batches rounded up, to the largest at most."""
        of_drafter = self.speedups[self.drafters.index(drafter), :, self._column(batch)]
        return float(np.interp(acceptance, self.acceptances, of_drafter))

    def window(self, drafter: str, acceptance: float, batch: int) -> int:
        """Draft tokens that bring the speed-up, of the nearest acceptance in the table."""
        nearest = int(np.abs(self.acceptances - acceptance).argmin())
        return int(self.windows[self.drafters.index(drafter), nearest, self._column(batch)])

    def first(self, history: Mapping[str, float], batch: int, least: float = 1.0) -> str | None:
        """The drafter that a rollout begins with; None where plain decoding is the fastest: where no speed-up
        is more than `least`.
        """
        best = self.ranking(history, batch)[0]
        return best if self.speedup(best, history[best], batch) > least else None

    def ranking(self, history: Mapping[str, float], batch: int) -> list[str]:
        """All drafters, the most promising first; of equals those listed first."""
        missing = [drafter for drafter in self.drafters if drafter not in history]
        if missing:
            raise ValueError(f"history: no acceptance of {', '.join(missing)}")
        return sorted(self.drafters, key=lambda drafter: -self.speedup(drafter, history[drafter], batch))

    def state(self) -> dict[str, np.ndarray]:
        """What a checkpoint or a file keeps."""
        return {
            "ladder_drafters": np.asarray(self.drafters, np.str_),
            "ladder_acceptances": self.acceptances,
            "ladder_batches": self.batches,
            "ladder_speedups": self.speedups,
            "ladder_windows": self.windows,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, np.ndarray]) -> Self:
        """The ladder that returned this state."""
        names = tuple(map(str, state["ladder_drafters"]))
        return cls(
            names, *(state[f"ladder_{part}"] for part in ("acceptances", "batches", "speedups", "windows"))
        )

    def _column(self, batch: int) -> int:
        return min(int(np.searchsorted(self.batches, batch)), len(self.batches) - 1)


def profile(costs: Costs, acceptances: Sequence[float]) -> Ladder:
    """The draft ladder of a machine.

    Args:
      costs: what was measured.
      acceptances: ascending shares; what lies between is interpolated.
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
            seconds = fit * cost.seconds(batch) + verifying
            predicted = tokens[:, : len(fit)] * costs.plain[batch] / seconds
            speedups[index, :, column] = predicted.max(axis=1)
            best_windows[index, :, column] = fit[predicted.argmax(axis=1)]
    return Ladder(tuple(costs.drafters), rates, batches, speedups, best_windows)


class AcceptanceHistory:
    """The acceptance of every drafter in the rollouts that used it.

    It changes little over a hundred steps (section 6), so a drafter that is not used keeps what it had.
    """

    def __init__(self, drafters: Sequence[str]) -> None:
        self._counts = {drafter: np.zeros(2) for drafter in drafters}

    def record(self, drafter: str, judged: int, accepted: int) -> None:
        """A rollout with a drafter is over; counts of those before weigh half.

        Args:
          drafter: its name.
          judged: its draft tokens that were verified and whose predecessors were accepted.
          accepted: those of them that were accepted.
        """
        self._counts[drafter] = _FORGET * self._counts[drafter] + (judged, accepted)

    @property
    def rates(self) -> dict[str, float]:
        """The history that `Ladder` ranks by."""
        return {
            drafter: float((accepted + _PRIOR_ACCEPTANCE * _PRIOR_DRAFTS) / (judged + _PRIOR_DRAFTS))
            for drafter, (judged, accepted) in self._counts.items()
        }

    def state(self) -> dict[str, np.ndarray]:
        """What a checkpoint keeps."""
        return {f"acceptance_of_{drafter}": counts for drafter, counts in self._counts.items()}

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Takes up what `state` returned; drafters it does not know begin anew."""
        for drafter in self._counts:
            self._counts[drafter] = state.get(f"acceptance_of_{drafter}", np.zeros(2)).copy()
