"""Weights on their way from the trainer to the workers: numbered versions, each published once.

    channel = make_channel(config.cluster, fabric.put)          # driver
    weights = channel.deliver(channel.publish(version, params)) # once for each worker
    parts = fetch(weights, get, seconds)                        # worker: the same bits, or a WeightsError
    params = to_params(weights, parts, policy)

    object_store.py  the fabric's store: Ray keeps one copy a node, which its workers read without a copy
    files.py         files in shared memory, or on a disk that all workers see
    jax_transfer.py  from device to device

What is published is what `DecodeEngine.load_params` made, so in the compute dtype. A worker uses only weights
whose digest is the published one, whatever brought them.
"""

from collections.abc import Callable
from typing import Any

from rljax.cluster.messages import Weights
from rljax.cluster.weights.channel import Published, WeightChannel, WeightsError
from rljax.cluster.weights.files import Files, FileWeights, read_file
from rljax.cluster.weights.jax_transfer import JaxTransfer, TransferWeights, pull
from rljax.cluster.weights.object_store import ObjectStore, StoredWeights
from rljax.config.cluster import ClusterConfig
from rljax.models.config import ModelConfig
from rljax.models.host_params import Part, digest_of, params_of, parts_of
from rljax.models.transformer import Params

__all__ = [
    "Published",
    "WeightChannel",
    "WeightsError",
    "digest_of",
    "fetch",
    "fetch_parts",
    "make_channel",
    "parts_of",
    "to_params",
]


def make_channel(config: ClusterConfig, put: Callable[[Any], Any]) -> WeightChannel:
    """Returns the channel that `cluster.weights` names.

    Args:
      config: keys of the cluster.
      put: stores a copy in the fabric's store, and returns a reference to it.

    Raises:
      ClusterError: it cannot be used here.
    """
    if config.weights == "files":
        return Files(config.weights_dir)
    if config.weights == "jax_transfer":
        return JaxTransfer()
    return ObjectStore(put)


def fetch(weights: Weights, get: Callable[[Any], Any], seconds: float) -> list[Part]:
    """Returns the arrays of a published version on the host.

    Args:
      weights: from a channel's `deliver`.
      get: returns what a reference to the fabric's store stands for, within a time limit of its own.
      seconds: time limit.

    Raises:
      WeightsError: they did not come, or are not those that were published.
    """
    try:
        parts = fetch_parts(weights.where, get, seconds)
    except Exception as error:  # whatever a channel raises for what it lost
        reason = str(error).strip().splitlines()
        raise WeightsError(
            f"version {weights.version} of the weights did not come: {type(error).__name__}"
            + (f", {reason[0][:120]}" if reason else "")
        ) from error
    if digest_of(parts) != weights.digest:
        raise WeightsError(f"version {weights.version} of the weights came damaged: it has another digest")
    return parts


def to_params(weights: Weights, parts: list[Part], policy: ModelConfig) -> Params:
    """Returns what was fetched as a pytree of arrays on the default device.

    Args:
      policy: architecture of the policy.

    Raises:
      WeightsError: the weights are of another architecture.
    """
    params = params_of(parts, policy)
    if params is None:
        raise WeightsError(f"version {weights.version} of the weights is of another architecture")
    return params


def fetch_parts(where: Any, get: Callable[[Any], Any], seconds: float) -> list[Part]:
    """Returns the arrays of a published version on the host; arguments as of `fetch`, whose checks are not
    made.
    """
    match where:
        case StoredWeights():
            return get(where.reference)
        case FileWeights():
            return read_file(where)
        case TransferWeights():
            return pull(where, seconds)
    raise TypeError(f"{type(where).__name__} is no place of weights")
