"""Where the policy's turn in a response ends, and whether the response then waits for somebody else's turn.

`Turns` is the default: a response is a single turn. `tool_turns.py` and `environment_turns.py` pause it.
"""

from collections.abc import Collection
from typing import NamedTuple

from rljax.requests import DecodeStatistics, FinishReason
from rljax.rollout.live_response import LiveResponse


class Answered(NamedTuple):
    """What a response has waited for.

    Attributes:
      tokens: tokens to append to it.
      ending: reason of its end, without these tokens; None where it goes on.
    """

    response: LiveResponse
    tokens: list[int]
    ending: FinishReason | None


class Turns:
    """The turns of one decode loop's responses, which here have a single one, and wait for nothing.

    Attributes:
      paused: responses that wait for an answer. They keep their slots and their KV cache.
    """

    paused: Collection[LiveResponse] = frozenset()

    def end(self, response: LiveResponse, known: int) -> bool:
        """Cuts a response behind the end of the policy's turn. Either it then is in `paused`, or its `ending`
        says why it ends; EOS and the longest response are not looked for.

        Args:
          known: number of leading tokens that do not end a turn.

        Returns:
          Whether the turn has ended.
        """
        end = response.find_stop(known)
        if end is not None:
            response.cut(end)
            response.ending = "stop"
        return end is not None

    def answers(self, statistics: DecodeStatistics, alone: bool, joined: bool) -> list[Answered]:
        """Returns answers that have arrived, with their responses, and ends the pause of these.

        Args:
          statistics: counts of the loop, to add to.
          alone: whether to wait for an answer, as no response can decode meanwhile.
          joined: whether new requests may come meanwhile, so that the wait has to be short.
        """
        return []

    def drop(self, response: LiveResponse) -> None:
        """Ignores the answer that a response waits for, if any."""
