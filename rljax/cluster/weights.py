"""Weights on their way from the trainer to the workers: numbered versions, each published once.

    weights = publish(version, params, fabric.put)      # driver
    params = fetch(weights, get, policy)                # worker: the same bits, or a WeightsError

What is published is what `DecodeEngine.load_params` made, so in the compute dtype. The store keeps a copy:
the next update donates the trainer's arrays. A worker uses only weights whose digest is the published one.
"""

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import ml_dtypes  # noqa: F401  (np.dtype knows bfloat16 by name then)
import numpy as np

from rljax.cluster.messages import Weights
from rljax.models.config import ModelConfig
from rljax.models.transformer import Params, param_shapes

Part = tuple[str, str, tuple[int, ...], np.ndarray]
"""Name, dtype, shape and bytes (uint8 [n]) of an array."""


class WeightsError(Exception):
    """Weights that did not come, or not as they were published."""


def parts_of(params: Params) -> list[Part]:
    """Returns the arrays of a policy on the host, in the order of the tree; on a CPU without a copy."""
    parts = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        array = np.ascontiguousarray(np.asarray(leaf))
        data = array.reshape(-1).view(np.uint8)
        parts.append((_name(path), str(array.dtype), array.shape, data))
    return parts


def digest_of(parts: list[Part]) -> str:
    """Returns the digest of names, types, shapes and bytes."""
    digest = hashlib.sha256()
    for name, dtype, shape, data in parts:
        digest.update(repr((name, dtype, tuple(shape), data.nbytes)).encode())
        digest.update(data)
    return digest.hexdigest()


def publish(version: int, parts: list[Part], digest: str, put: Callable[[Any], Any]) -> Weights:
    """Puts a version into the fabric's store.

    Args:
      version: its number.
      parts: from `parts_of`.
      digest: from `digest_of`.
      put: stores a copy and returns a reference to it.
    """
    return Weights(version, digest, put(parts), sum(data.nbytes for *_, data in parts))


def fetch(weights: Weights, get: Callable[[Any], Any], policy: ModelConfig) -> Params:
    """Returns a published version as a pytree of arrays on the default device.

    Args:
      weights: from `publish`.
      get: returns what a reference stands for, within a time limit of its own.
      policy: architecture of the policy.

    Raises:
      WeightsError: they did not come, or are not those that were published.
    """
    try:
        parts = get(weights.parts)
    except Exception as error:  # whatever the store raises for what it lost
        reason = str(error).strip().splitlines()
        raise WeightsError(
            f"version {weights.version} of the weights did not come: {type(error).__name__}"
            + (f", {reason[0][:120]}" if reason else "")
        ) from error
    if digest_of(parts) != weights.digest:
        raise WeightsError(f"version {weights.version} of the weights came damaged: it has another digest")
    arrays: Mapping[str, np.ndarray] = {
        name: data.view(np.dtype(dtype)).reshape(shape) for name, dtype, shape, data in parts
    }
    shapes = param_shapes(policy)
    paths, tree = jax.tree_util.tree_flatten_with_path(shapes, is_leaf=lambda leaf: isinstance(leaf, tuple))
    if [_name(path) for path, _ in paths] != list(arrays):
        raise WeightsError(f"version {weights.version} of the weights is of another architecture")
    return jax.device_put(jax.tree.unflatten(tree, arrays.values()))


def _name(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")
