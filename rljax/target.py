"""The devices that programs are traced for: those of this process, or, while a run is planned, others.

Some formulations depend on the platform, such as products whose bits must not depend on the number of rows.
They ask this module and not JAX, so that `rljax/planning` traces the programs of a run for devices that are
not there:

    with target.tracing_for(device, count):
        lowered = jax.jit(function).lower(*shapes)
"""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class _Target:
    device: Any
    count: int
    platform: str


_TARGET: contextvars.ContextVar[_Target | None] = contextvars.ContextVar("target", default=None)


@contextlib.contextmanager
def tracing_for(device: Any, count: int, platform: str) -> Iterator[None]:
    """Context in which programs are traced for `count` devices like `device`, and `put` makes no arrays.

    Args:
      device: a device of a topology description, or of this process.
      count: number of devices.
      platform: "cpu", "gpu" or "tpu".
    """
    token = _TARGET.set(_Target(device, count, platform))
    try:
        yield
    finally:
        _TARGET.reset(token)


def platform() -> str:
    """Returns "cpu", "gpu" or "tpu"."""
    target = _TARGET.get()
    return jax.default_backend() if target is None else target.platform


def device() -> Any:
    """Returns the first device."""
    target = _TARGET.get()
    return jax.devices()[0] if target is None else target.device


def is_hopper() -> bool:
    """Whether the devices are NVIDIA GPUs of compute capability 9.0, which Mosaic GPU's kernels are for."""
    return platform() == "gpu" and getattr(device(), "compute_capability", "") == "9.0"


def device_count() -> int:
    """Returns the number of devices."""
    target = _TARGET.get()
    return jax.device_count() if target is None else target.count


def put(tree: Any, shardings: Any) -> Any:
    """As `jax.device_put`, but while a run is planned the result has a `jax.ShapeDtypeStruct` in the place of
    every array.
    """
    if _TARGET.get() is None:
        if jax.process_count() == 1:
            return jax.device_put(tree, shardings)
        return jax.tree.map(_put_part, tree, jax.tree.broadcast(shardings, tree))
    shardings = jax.tree.broadcast(shardings, tree)
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        tree,
        shardings,
    )


def _put_part(leaf: Any, sharding: Any) -> jax.Array:
    """`jax.device_put` of an array that every process holds whole: without its check that all hold the same,
    a collective for every array.
    """
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return jax.device_put(leaf, sharding)
    host = np.asarray(leaf)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def zeros(shapes: Any, shardings: Any) -> Any:
    """Arrays of zeros in the place of `jax.ShapeDtypeStruct`s; no device or host holds more than its part."""
    if jax.process_count() > 1:
        return jax.tree.map(_zero_parts, shapes, shardings)
    leaves, structure = jax.tree.flatten(shapes)
    placed = zip(leaves, jax.tree.leaves(shardings), strict=True)
    made = _zeros_program(tuple((leaf.shape, leaf.dtype, sharding) for leaf, sharding in placed))()
    return jax.tree.unflatten(structure, made)


def _zero_parts(shape: jax.ShapeDtypeStruct, sharding: Any) -> jax.Array:
    """An array of zeros of which this process makes its own parts."""

    def piece(index: tuple[slice, ...]) -> np.ndarray:
        sizes = [len(range(*cut.indices(size))) for cut, size in zip(index, shape.shape, strict=True)]
        return np.zeros(sizes, shape.dtype)

    return jax.make_array_from_callback(shape.shape, sharding, piece)


@functools.lru_cache(maxsize=128)
def _zeros_program(arrays: tuple[tuple[tuple[int, ...], Any, Any], ...]) -> Any:
    def make() -> list[jax.Array]:
        return [jnp.zeros(shape, dtype) for shape, dtype, _ in arrays]

    return jax.jit(make, out_shardings=[sharding for *_, sharding in arrays])
