"""Prefix racing: workers that are free decode copies of stragglers with other drafters (SpecActor, Algorithm
3).

Copies of a request agree on every token (`ledger.py`), so the longest prefix counts, whichever copy has it,
and a copy that is behind goes on from there.
"""

import dataclasses
from collections.abc import Mapping, Sequence


@dataclasses.dataclass(frozen=True)
class Copy:
    """A request that a free worker decodes too.

    Attributes:
      key: the request.
      worker: the free worker.
      drafter: name of the drafter that it uses.
    """

    key: int
    worker: str
    drafter: str


def assign(
    acceptances: Mapping[int, float],
    drafters: Mapping[str, Sequence[str]],
    free: Sequence[str],
    most: int,
    already: Mapping[int, Sequence[str]] = {},
) -> list[Copy]:
    """Returns who decodes copies of what (Algorithm 3).

    Args:
      acceptances: acceptance by request, of those under way.
      drafters: workers that use each drafter now.
      free: workers without requests.
      most: b_max, requests of a worker.
      already: drafters with which a request is decoded; none of them is given to it twice.
    """
    using = {drafter: list(workers) for drafter, workers in drafters.items()}
    method = {}
    for worker in free:
        drafter = min(using, key=lambda name: len(using[name]))
        using[drafter].append(worker)
        method[worker] = drafter
    slowest = sorted(acceptances, key=lambda key: acceptances[key])
    copies, used = [], {key: set(already.get(key, ())) for key in slowest}
    for drafter in drafters:
        waiting = [key for key in slowest if drafter not in used[key]]
        for worker in free:
            if method[worker] != drafter:
                continue
            taken, waiting = waiting[:most], waiting[most:]
            copies += [Copy(key, worker, drafter) for key in taken]
            for key in taken:
                used[key].add(drafter)
    return copies
