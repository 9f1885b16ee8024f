"""Weights from device to device, by `jax.experimental.transfer`.

Two traps of it are guarded:

- An array that is pulled with another sharding, over as many devices, comes with wrong bytes and no error. So
  every array is published and pulled on one device, a worker compares its layout, and the digest decides.
- What was offered under a number can be pulled once; a second pull waits for ever. So each worker gets a
  number of its own, and a pull has a time limit.
"""

import dataclasses
import functools
import itertools
import socket
import time

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from rljax.cluster.messages import Weights
from rljax.cluster.weights.channel import Published
from rljax.errors import ClusterError
from rljax.models.host_params import Part, part_of
from rljax.models.transformer import Params

_LOOK = 0.002  # seconds between two looks whether arrays have come


@dataclasses.dataclass(frozen=True)
class TransferWeights:
    """A version that one worker may pull once.

    Attributes:
      address: of the driver's server.
      number: that the arrays are offered under.
      layout: name, dtype and shape of each.
    """

    address: str
    number: int
    layout: tuple[tuple[str, str, tuple[int, ...]], ...]


@functools.cache
def _server():
    """Returns this process's server.

    Raises:
      ClusterError: this JAX has none.
    """
    try:
        from jax.experimental import transfer

        host = socket.gethostbyname(socket.gethostname())
        client = jax.local_devices()[0].client
        return transfer.start_transfer_server(client, f"{host}:0", [f"{host}:0"])
    except Exception as error:  # an experimental module: whatever it raises
        raise ClusterError(
            f"cluster.weights: jax_transfer does not work with this JAX or network ({error}); use files or"
            " object_store"
        ) from error


class JaxTransfer:
    """See the module's docstring, and `WeightChannel` for the methods."""

    early = False  # what is offered can be pulled once, and goes past the host

    def __init__(self) -> None:
        _server()
        self._numbers = itertools.count(1)

    def publish(self, version: int, params: Params, parts: list[Part], digest: str) -> Published:
        device = SingleDeviceSharding(jax.local_devices()[0])
        # Copies: an update donates the trainer's arrays, and a worker may pull late.
        arrays = [jnp.copy(jax.device_put(leaf, device)) for leaf in jax.tree.leaves(params)]
        layout = tuple((name, dtype, tuple(shape)) for name, dtype, shape, _ in parts)
        return Published(version, digest, sum(data.nbytes for *_, data in parts), (layout, arrays))

    def deliver(self, published: Published) -> Weights:
        layout, arrays = published.kept
        number = next(self._numbers)
        _server().await_pull(number, arrays)
        where = TransferWeights(_server().address(), number, layout)
        return Weights(published.version, published.digest, where, published.nbytes)

    def remove(self, published: Published) -> None:
        """What was offered and not pulled stays with the server: there is no way to take it back."""

    def close(self) -> None:
        pass


@functools.cache
def _connection(address: str):
    return _server().connect(address)


def pull(weights: TransferWeights, seconds: float) -> list[Part]:
    """Returns the arrays that a server offers.

    Raises:
      TimeoutError: they did not come in time.
      ValueError: they came in another layout.
    """
    sharding = SingleDeviceSharding(jax.local_devices()[0])
    specs = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for _, dtype, shape in weights.layout]

    arrays = _connection(weights.address).pull(weights.number, specs)
    end = time.monotonic() + seconds  # a time limit of `pull` itself is not kept
    while not all(array.is_ready() for array in arrays):
        if time.monotonic() > end:
            raise TimeoutError(f"nothing came within {seconds:g} seconds")
        time.sleep(_LOOK)
    parts = [part_of(name, array) for (name, *_), array in zip(weights.layout, arrays, strict=True)]
    if tuple((name, dtype, tuple(shape)) for name, dtype, shape, _ in parts) != weights.layout:
        raise ValueError("the arrays came in another layout")
    return parts
