"""Shardings of a head and of its slots on a mesh, by the table of axes in `rljax/sharding.py`.

A head is split as a layer of the policy is, whose widths it has: heads and MLP over tensor; while it is
trained, every matrix along the residual stream over fsdp, too. Its slots lie where the policy's do.
"""

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from drafters.eagle.drafting import DrafterState, Pairs
from drafters.eagle.model import HeadConfig
from drafters.eagle.unrolling import HeadBatch
from rljax.engine.draft_tree import ScoredTree
from rljax.engine.placement import cache_shardings, feature_sharding, slot_sharding
from rljax.models.sharding import PARAM_AXES, replicated_axes
from rljax.models.transformer import Params
from rljax.sharding import named, replicated_sharding, row_multiple

_HEAD_AXES: dict[str, tuple[str | None, ...]] = PARAM_AXES | {
    "fc": ("embed", None),
    "fc_bias": ("norm",),
    "lm_head": (None, "embed"),  # over the draft vocabulary
    "embed_norm": ("norm",),
    "hidden_norm": ("norm",),
    "norm": ("norm",),
    # Of a block head:
    "context_norm": ("norm",),
    "state_in": (None, "embed"),
    "mix": (None, "embed"),
}


def shape_of(array: Any) -> jax.ShapeDtypeStruct:
    """Returns what stands in the place of an array while programs are compiled."""
    sharding = array.sharding if isinstance(array.sharding, NamedSharding) else None
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)


def head_shardings(tree: Any, config: HeadConfig, mesh: Mesh, decoding: bool = False) -> Any:
    """Returns a tree with a NamedSharding in the place of every array.

    Args:
      tree: the head's params, or its `TrainState`: moments lie where their weights do, and all else is
        replicated.
      config: the head's shape.
      mesh: the policy's mesh.
      decoding: whole along the residual stream, as drafting and an update read it.
    """
    replicated = replicated_axes(config.layer, mesh, decoding)
    if decoding:
        replicated = replicated | {"embed"}

    def sharding(path: tuple, leaf: Any) -> NamedSharding:
        axes = _HEAD_AXES.get(getattr(path[-1], "key", ""))
        if axes is None or len(axes) != len(leaf.shape):
            return replicated_sharding(mesh)
        return named(mesh, *axes, replicated=replicated)

    return jax.tree_util.tree_map_with_path(sharding, tree)


def shared_shardings(shared: Params, mesh: Mesh) -> Params:
    """Returns the shardings of the policy's embeddings and LM head, whole along the residual stream."""
    return {name: named(mesh, "vocab", None) for name in shared}


def batch_shardings(batch: HeadBatch, mesh: Mesh) -> HeadBatch:
    """Returns the shardings of a training batch: by rows where the mesh divides them, else replicated."""
    divides = batch.tokens.shape[0] % row_multiple(mesh) == 0

    def sharding(leaf: Any) -> NamedSharding:
        if not divides:
            return replicated_sharding(mesh)
        return named(mesh, "batch", *(None,) * (len(leaf.shape) - 1))

    return jax.tree.map(sharding, batch)


def result_shardings(result: Any, config: HeadConfig, mesh: Mesh) -> Any:
    """Returns the shardings of a result of a head's program: what belongs to slots lies with them, and draft
    trees, which the host reads, are replicated.
    """
    if isinstance(result, DrafterState):
        cache = cache_shardings(result.cache, config.layer, mesh)
        return DrafterState(cache, slot_sharding(mesh), named(mesh, "slots", None))
    if isinstance(result, Pairs):
        replicated = replicated_axes(config.layer, mesh, decoding=True)
        entries = named(mesh, "slots", None, "kv_heads", None, replicated=replicated)
        return Pairs(
            [(entries, entries)] * config.layer.num_layers, named(mesh, "slots", None), slot_sharding(mesh)
        )
    if isinstance(result, ScoredTree):
        return jax.tree.map(lambda _: replicated_sharding(mesh), result)
    return feature_sharding(mesh)
