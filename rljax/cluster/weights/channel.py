"""What all channels of weights have in common."""

import dataclasses
from typing import Any, Protocol

from rljax.cluster.messages import Weights
from rljax.models.host_params import Part
from rljax.models.transformer import Params


class WeightsError(Exception):
    """Weights that did not come, or not as they were published."""


@dataclasses.dataclass(frozen=True)
class Published:
    """A version that workers may fetch.

    Attributes:
      version: its number.
      digest: of names, types, shapes and bytes.
      nbytes: size.
      kept: what the channel keeps of it.
    """

    version: int
    digest: str
    nbytes: int
    kept: Any


class WeightChannel(Protocol):
    """A way of weights to the workers: the driver's end of it. What a worker does is in `fetch`.

    Attributes:
      early: whether a worker may copy a version to its host before it loads it.
    """

    early: bool

    def publish(self, version: int, params: Params, parts: list[Part], digest: str) -> Published:
        """Makes a version available. It may run while others decode, in a thread of its own.

        Args:
          version: its number.
          params: the arrays; they may change after this call.
          parts: the same on the host.
          digest: of them.

        Raises:
          ClusterError: there is no room.
        """

    def deliver(self, published: Published) -> Weights:
        """Returns what one worker needs to fetch a version once."""

    def remove(self, published: Published) -> None:
        """Nobody fetches a version any more."""

    def close(self) -> None:
        """Removes all versions."""
