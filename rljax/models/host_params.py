"""A policy's arrays on the host: names, types, shapes and bytes, and the digest of all of them."""

import hashlib
from collections.abc import Sequence

import jax
import ml_dtypes  # noqa: F401  (np.dtype knows bfloat16 by name then)
import numpy as np

from rljax.models.config import ModelConfig
from rljax.models.transformer import Params, param_shapes

Part = tuple[str, str, tuple[int, ...], np.ndarray]
"""Name, dtype, shape and bytes (uint8 [n]) of an array."""


def parts_of(params: Params) -> list[Part]:
    """Returns the arrays of a policy on the host, in the order of the tree; on a CPU without a copy."""
    return [part_of(_name(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(params)]


def part_of(name: str, array: jax.Array) -> Part:
    """Returns an array on the host."""
    host = np.ascontiguousarray(np.asarray(array))
    return name, str(host.dtype), host.shape, host.reshape(-1).view(np.uint8)


def digest_of(parts: Sequence[Part]) -> str:
    """Returns the digest of names, types, shapes and bytes."""
    digest = hashlib.sha256()
    for name, dtype, shape, data in parts:
        digest.update(repr((name, dtype, tuple(shape), data.nbytes)).encode())
        digest.update(data)
    return digest.hexdigest()


def params_of(parts: Sequence[Part], policy: ModelConfig) -> Params | None:
    """Returns the pytree of a policy on the default device; None for arrays of another architecture."""
    arrays = {name: data.view(np.dtype(dtype)).reshape(shape) for name, dtype, shape, data in parts}
    shapes = param_shapes(policy)
    paths, tree = jax.tree_util.tree_flatten_with_path(shapes, is_leaf=lambda leaf: isinstance(leaf, tuple))
    if [_name(path) for path, _ in paths] != list(arrays):
        return None
    return jax.device_put(jax.tree.unflatten(tree, arrays.values()))


def _name(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")
