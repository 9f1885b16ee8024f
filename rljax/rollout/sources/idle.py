"""What is decoded in slots that no request of the rollout needs. `IdleSlots` is the default: nothing.

`IdleRequests` (`rljax/speculation/idle_requests.py`) makes those of a rollout, and has what remains of them.
"""

from collections.abc import Mapping, Sequence

from rljax.requests import Completion, Request
from rljax.rollout.live_response import LiveResponse
from rljax.rollout.slots import Slots


class IdleSlots:
    """Idle slots stay idle.

    Attributes:
      responses: those that may be decoded in idle slots; they yield to all others.
    """

    responses: Sequence[LiveResponse] = ()

    def begin(self, slots: Slots, requests: Sequence[Request]) -> Mapping[int, Completion]:
        """A rollout of these requests begins. Returns the responses that are known already, by place."""
        return {}

    def fill(self, slots: Slots) -> None:
        """Puts requests into idle slots, where nothing else waits for these."""

    def batch(self, slots: Slots, smallest: int) -> int:
        """Returns the batch bucket to decode in: at least `smallest`, at most the present one."""
        return smallest

    def weight(self, slots: Slots) -> float:
        """Returns the value of a token that is decoded in an idle slot, as a share of another's."""
        return 0.0

    def passed(self, slots: Slots, steps: int) -> None:
        """So many steps were decoded; what they have sampled is not in the responses yet."""

    def end(self, slots: Slots, requests: Sequence[Request]) -> None:
        """The rollout of these requests has ended."""


IDLE = IdleSlots()
