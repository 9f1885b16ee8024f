"""Copies of slots between devices, in the memory of a few slots of one layer.

Indexing an array that is split by slots makes XLA gather all of it on every device, since it cannot know that
a slot comes from one device only. Here every device receives its slots one after the other, one head at a
time: all devices exchange what each of them needs next, and keep nothing else.
"""

import math

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec


def copy_slots(into: Array, source: Array, rows: Array, slots: Array, sharding: NamedSharding) -> Array:
    """Copies row rows[i] of `source` to row slots[i] of `into`, between the devices of a mesh.

    Args:
      into: [B, H, ...].
      source: [B', H, ...], with at most the lengths of `into` in the other dimensions, which are filled from
        their beginning. B and B' are multiples of the number of devices that split them.
      rows, slots: int32 [N], slots without repetition. Slots out of range are skipped.
      sharding: the layout of `into` and `source`; the first dimension is split over at least one mesh axis.

    Returns:
      The new `into`.
    """
    mesh, spec = sharding.mesh, sharding.spec
    axes = spec[0] if isinstance(spec[0], tuple) else (spec[0],)
    devices = math.prod(mesh.shape[axis] for axis in axes)
    filled = slots[None] == jnp.arange(into.shape[0], dtype=jnp.int32)[:, None]  # [B, N]
    source_of = jnp.where(filled.any(axis=1), rows[jnp.argmax(filled, axis=1)], -1)

    def exchange(into: Array, source: Array, source_of: Array) -> Array:
        device = lax.axis_index(axes)
        room, held = into.shape[0], source.shape[0]  # slots of a device
        heads, later = into.shape[1], (0,) * (into.ndim - 2)
        source_of = source_of.reshape(devices, room)

        def receive(index: Array, into: Array) -> Array:
            slot, head = index // heads, index % heads
            wanted = source_of[:, slot]  # by every device
            sent = source[jnp.clip(wanted - device * held, 0, held - 1), head]  # [devices, ...]
            received = lax.all_to_all(sent, axes, 0, 0, tiled=True)
            here = wanted[device]
            piece = received[jnp.maximum(here, 0) // held][None, None]
            start = (slot, head, *later)
            before = lax.dynamic_slice(into, start, piece.shape)
            return lax.dynamic_update_slice(into, jnp.where(here >= 0, piece, before), start)

        return lax.fori_loop(0, room * heads, receive, into)

    return jax.shard_map(
        exchange, mesh=mesh, in_specs=(spec, spec, PartitionSpec()), out_specs=spec, check_vma=False
    )(into, source, source_of)
