"""The rollouts in progress, and which of them a worker works on.

A rollout is a set of requests that begin under one version of the weights. Where a run has staleness, the
next one begins while the present one is still decoded, on workers that it has left free. A worker works on
one rollout at a time, and on the first one that has something for it.
"""

import copy
import dataclasses
from collections.abc import Mapping

from rljax.cluster.messages import Begin, Key
from rljax.cluster.router import Router
from rljax.requests import DecodeStatistics, Request


@dataclasses.dataclass
class Rollout:
    """A rollout in progress.

    Attributes:
      number: its number, ascending.
      version: version of the weights that its next tokens are sampled with.
      renewed: whether its responses go on under newer weights.
      router: decides which worker decodes what of it.
      requests: by key.
      unfinished: number of requests that have not ended.
      ended: keys of those that have, in the order in which they did.
      tokens: sampled so far.
      statistics: by worker, lost ones too: counts of decoding, and seconds it was busy.
      counted: what of that the driver has taken already.
    """

    number: int
    version: int
    renewed: bool
    router: Router
    requests: dict[Key, Request] = dataclasses.field(default_factory=dict)
    unfinished: int = 0
    ended: list[Key] = dataclasses.field(default_factory=list)
    tokens: int = 0
    statistics: dict[str, tuple[DecodeStatistics, float]] = dataclasses.field(default_factory=dict)
    counted: dict[str, tuple[DecodeStatistics, float]] = dataclasses.field(default_factory=dict)

    @property
    def done(self) -> bool:
        """Whether every request has ended."""
        return not self.unfinished


class Rollouts:
    """See the module's docstring.

    Args:
      router: decides which worker decodes what; each rollout has a copy that follows the last one's.

    Attributes:
      open: rollouts in progress, by number, in the order in which they began.
      router: that of the newest one.
    """

    def __init__(self, router: Router) -> None:
        self.open: dict[int, Rollout] = {}
        self.router = router
        self._number_of: dict[Key, int] = {}

    def begin(self, event: Begin) -> None:
        """A rollout begins; or one in progress has further requests."""
        rollout = self.open.get(event.rollout)
        if rollout is None:
            self.router = copy.copy(self.router)
            rollout = Rollout(event.rollout, event.version, event.renewed, self.router)
            self.open[event.rollout] = rollout
            rollout.requests = dict(event.requests)
            rollout.router.begin(rollout.requests)
        else:
            rollout.requests.update(event.requests)
            rollout.router.add(event.requests)
        rollout.unfinished += len(event.requests)
        self._number_of.update(dict.fromkeys(event.requests, event.rollout))

    def forget(self, number: int, keys: tuple[Key, ...]) -> None:
        """Some requests of a rollout have ended and are forgotten; with the last one, the rollout is."""
        rollout = self.open[number]
        for key in keys:
            del rollout.requests[key], self._number_of[key]
        forgotten = set(keys)
        rollout.ended = [key for key in rollout.ended if key not in forgotten]
        if not rollout.requests and not rollout.renewed:
            del self.open[number]

    def leave(self, worker: str) -> None:
        """A worker is lost. The newest router is notified as well where its rollout has been forgotten: the
        next one has its copy, and would keep a part of the requests for the worker.
        """
        for router in (self.router, *(rollout.router for rollout in self.open.values())):
            router.leave(worker)

    def renew(self, version: int) -> None:
        """Rollouts that are renewed go on with this version."""
        for rollout in self.open.values():
            if rollout.renewed:
                rollout.version = version

    def of(self, key: Key) -> Rollout:
        """The rollout of a request."""
        return self.open[self._number_of[key]]

    def by_rollout(self, keys: list[Key]) -> Mapping[int, list[Key]]:
        """Keys by the number of their rollout."""
        found: dict[int, list[Key]] = {}
        for key in keys:
            found.setdefault(self._number_of[key], []).append(key)
        return found

    def for_free(self, worker: str) -> list[Rollout]:
        """Rollouts that have something for a worker that holds nothing, the earliest first."""
        return [rollout for rollout in self.open.values() if rollout.router.waiting(worker)]

    def ran_empty(self) -> bool:
        """Whether requests that some worker waited for have run out since the last call."""
        return sum(rollout.router.ran_empty() for rollout in self.open.values()) > 0  # of every one
