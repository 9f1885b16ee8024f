"""Acceptance by request and drafter, within a rollout.

How good a drafter is varies from request to request (SpecActor, section 4.2), so that what is known of one
request counts more, for it, than what earlier rollouts say of the drafter.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

_HISTORY_WEIGHT = 4.0  # draft tokens that the history counts as, against those of the requests


@dataclasses.dataclass
class _Counts:
    """What became of one drafter's tokens for one request.

    Attributes:
      judged: tokens that were verified and whose predecessors were accepted.
      accepted: those of them that were accepted.
      asked: passes in which the drafter was asked.
      answered: those of them in which it had something.
    """

    judged: int = 0
    accepted: int = 0
    asked: int = 0
    answered: int = 0


class RequestAcceptance:
    """Counts what became of each drafter's tokens, for every request.

    Args:
      drafters: names.
    """

    def __init__(self, drafters: Iterable[str]) -> None:
        self._counts: dict[str, dict[int, _Counts]] = {drafter: {} for drafter in drafters}

    def ask(self, drafter: str, requests: Sequence[int], answered: Sequence[bool]) -> None:
        """A drafter was asked for requests, and had something for those where `answered` says so."""
        for request, had in zip(requests, answered, strict=True):
            counts = self._of(drafter, request)
            counts.asked += 1
            counts.answered += had

    def add(self, drafter: str, requests: Sequence[int], judged: np.ndarray, accepted: np.ndarray) -> None:
        """A pass verified a drafter's tokens.

        Args:
          drafter: its name.
          requests: n requests.
          judged: int [n], tokens that were verified and whose predecessors were accepted.
          accepted: int [n], those of them that were accepted.
        """
        for request, of_judged, of_accepted in zip(requests, judged.tolist(), accepted.tolist(), strict=True):
            if of_judged:
                counts = self._of(drafter, request)
                counts.judged += of_judged
                counts.accepted += of_accepted

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
        judged, accepted = sum(each.judged for each in known), sum(each.accepted for each in known)
        asked, answered = sum(each.asked for each in known), sum(each.answered for each in known)
        rate = (accepted + _HISTORY_WEIGHT * history[drafter]) / (judged + _HISTORY_WEIGHT)
        return rate * answered / asked if asked else rate

    def rates(self, requests: Sequence[int], history: Mapping[str, float]) -> dict[str, float]:
        """`rate` of every drafter."""
        return {drafter: self.rate(drafter, requests, history) for drafter in self._counts}

    def totals(self) -> dict[str, tuple[int, int]]:
        """Tokens judged and accepted, of all requests together, by drafter; without those never judged."""
        sums = {
            drafter: (
                sum(each.judged for each in counts.values()),
                sum(each.accepted for each in counts.values()),
            )
            for drafter, counts in self._counts.items()
        }
        return {drafter: counts for drafter, counts in sums.items() if counts[0]}

    def _of(self, drafter: str, request: int) -> _Counts:
        return self._counts[drafter].setdefault(request, _Counts())
