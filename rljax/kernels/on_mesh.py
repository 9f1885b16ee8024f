"""Kernels on a mesh: every device computes its shard, under `shard_map`.

Slots are split over data and fsdp, heads over tensor (`rljax/sharding.py`), and attention and compaction of a
slot and head need no other one. So nothing is communicated here, and the kernels are those of one device.
`token_logprobs` and `quantized_product`, which add over shards, do so next to their kernels
(`token_logprobs/passes.py`, `quantized_product/shards.py`).

An operation for which the config names no kernel is left to XLA, as it is without a mesh.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import Array
from jax.sharding import PartitionSpec

from rljax.kernels import compaction as one_compaction
from rljax.kernels import tree_attention as one_attention
from rljax.numerics.kernel_choice import KernelChoice, Refused, backend_names
from rljax.numerics.rows import Numerics
from rljax.sharding import MESH_AXES

_SLOTS = PartitionSpec(MESH_AXES["slots"])
_NODE_HEADS = PartitionSpec(MESH_AXES["slots"], None, MESH_AXES["heads"])  # [B, M, H, D]
_CACHE = PartitionSpec(MESH_AXES["slots"], MESH_AXES["kv_heads"])  # [B, Hk, ...]


def tree_attention(
    queries: Array,
    keys: Array,
    values: Array,
    lengths: Array,
    node_keys: Array,
    node_values: Array,
    ancestors: Array,
    depth: Array,
    numerics: Numerics,
) -> Array:
    """As `tree_attention.tree_attention`, by the backend that `numerics` names, on one device or a mesh.

    Raises:
      Refused: no backend can compute this, or the mesh does not divide the key/value heads.
    """
    args = (queries, keys, values, lengths, node_keys, node_values, ancestors, depth)
    specs = (_NODE_HEADS, _CACHE, _CACHE, _SLOTS, _NODE_HEADS, _NODE_HEADS, _SLOTS, _SLOTS)
    return _attention(one_attention.tree_attention, args, specs, numerics, _NODE_HEADS)


def decode_attention(
    queries: Array,
    keys: Array,
    values: Array,
    positions: Array,
    node_keys: Array,
    node_values: Array,
    numerics: Numerics,
) -> tuple[Array, Array, Array]:
    """As `tree_attention.decode_attention`, by the backend that `numerics` names, on one device or a mesh.

    Raises:
      Refused: as `tree_attention`.
    """
    args = (queries, keys, values, positions, node_keys, node_values)
    specs = (_NODE_HEADS, _CACHE, _CACHE, _SLOTS, _NODE_HEADS, _NODE_HEADS)
    return _attention(one_attention.decode_attention, args, specs, numerics, (_NODE_HEADS, _CACHE, _CACHE))


def _attention(
    compute: Callable[..., Any],
    args: tuple[Array, ...],
    specs: tuple[PartitionSpec, ...],
    numerics: Numerics,
    out_specs: Any,
) -> Any:
    kernels = numerics.kernels
    implementation = _for_heads("tree_attention", args[2].shape[1], kernels)
    compute = functools.partial(compute, numerics=numerics, implementation=implementation)
    if not kernels.splits("tree_attention") or implementation == "xla":
        return compute(*args)
    return _on_shards(compute, kernels, specs, out_specs)(*args)


def compaction(
    keys: Array,
    values: Array,
    node_keys: Array,
    node_values: Array,
    path: Array,
    count: Array,
    lengths: Array,
    kernels: KernelChoice,
) -> tuple[Array, Array]:
    """As `compaction.compaction`, by the backend that `kernels` names, on one device or a mesh.

    Raises:
      Refused: as `tree_attention`.
    """
    args = (keys, values, node_keys, node_values, path, count, lengths)
    implementation = _for_heads("compaction", values.shape[1], kernels)
    if not kernels.splits("compaction") or implementation == "xla":
        return one_compaction.compaction(*args, implementation)
    compute = functools.partial(one_compaction.compaction, implementation=implementation)
    specs = (_CACHE, _CACHE, _NODE_HEADS, _NODE_HEADS, _SLOTS, _SLOTS, _SLOTS)
    return _on_shards(compute, kernels, specs, (_CACHE, _CACHE))(*args)


def _for_heads(op: str, kv_heads: int, kernels: KernelChoice) -> Any:
    """Returns the backends of an operation over key/value heads that the mesh may not divide."""
    implementation = getattr(kernels, op)
    if not kernels.splits(op) or kv_heads % kernels.mesh.shape[MESH_AXES["kv_heads"]] == 0:
        return implementation
    if "xla" in backend_names(implementation):
        return "xla"
    raise Refused(
        f"kernels.{op}: {implementation} needs whole key/value heads on a device, but mesh.tensor ="
        f" {kernels.mesh.shape['tensor']} does not divide num_kv_heads {kv_heads}; set xla or null"
    )


def _on_shards(
    compute: Callable[..., Any], kernels: KernelChoice, in_specs: tuple[PartitionSpec, ...], out_specs: Any
) -> Callable[..., Any]:
    """Returns `compute` on the shards of its arguments."""
    return jax.shard_map(compute, mesh=kernels.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
