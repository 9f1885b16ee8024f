"""Weights through the fabric's store. Ray's keeps one copy a node, which workers put on a device."""

import dataclasses
from collections.abc import Callable
from typing import Any

from rljax.cluster.messages import Weights
from rljax.cluster.weights.channel import Published
from rljax.models.host_params import Part
from rljax.models.transformer import Params


@dataclasses.dataclass(frozen=True)
class StoredWeights:
    """A version in the fabric's store."""

    reference: Any


class ObjectStore:
    """See the module's docstring, and `WeightChannel` for the methods.

    Args:
      put: stores a copy of a value, and returns a reference to it.
    """

    early = True

    def __init__(self, put: Callable[[Any], Any]) -> None:
        self._put = put

    def publish(self, version: int, params: Params, parts: list[Part], digest: str) -> Published:
        nbytes = sum(data.nbytes for *_, data in parts)
        return Published(version, digest, nbytes, StoredWeights(self._put(parts)))

    def deliver(self, published: Published) -> Weights:
        return Weights(published.version, published.digest, published.kept, published.nbytes)

    def remove(self, published: Published) -> None:
        """The store forgets what nobody refers to."""

    def close(self) -> None:
        pass
