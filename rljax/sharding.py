"""Shardings of arrays on a mesh: one table from logical axes to mesh axes, for trainer and engine. Those of
weights are in `rljax/models/sharding.py`.

Arrays are described by what their dimensions mean ("vocab", "heads", ...); only `MESH_AXES` says which mesh
axis splits a meaning. The compiler (GSPMD: Xu et al., arXiv 2105.04663) derives the communication. The mesh
has three axes: `data` replicates the weights, `fsdp` splits weights and optimizer state along the residual
stream (ZeRO-3: Rajbhandari et al., arXiv 1910.02054) and, like `data`, the batch, and `tensor` splits every
layer by heads and MLP columns (Megatron-LM: Shoeybi et al., arXiv 1909.08053).

One device has no mesh: `make_mesh` returns None, and every function here then leaves arrays as they are.
"""

from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from rljax.config import MeshConfig
from rljax.errors import ConfigError

MESH_AXES: dict[str, str | tuple[str, ...] | None] = {
    "batch": ("data", "fsdp"),  # packed rows
    "slots": ("data", "fsdp"),  # of the decode engine
    "vocab": "tensor",
    "embed": "fsdp",  # the residual stream, of weights only: activations are split by batch
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "norm": None,  # a few hundred numbers: not worth a gather
}
"""Logical axis -> the mesh axes that split it; None is replicated."""


def make_mesh(config: MeshConfig) -> Mesh | None:
    """The mesh over the first `config.num_devices` devices; None when that is one."""
    needed, present = config.num_devices, jax.device_count()
    if needed > present:
        raise ConfigError(
            f"mesh: data {config.data} * fsdp {config.fsdp} * tensor {config.tensor} = {needed} devices,"
            f" but there {'is' if present == 1 else 'are'} {present}; the product may be at most {present}"
        )
    if needed == 1:
        return None
    return jax.make_mesh(
        (config.data, config.fsdp, config.tensor),
        ("data", "fsdp", "tensor"),
        axis_types=(AxisType.Auto,) * 3,
        devices=jax.devices()[:needed],
    )


def parts_of(mesh: Mesh, axis: str) -> int:
    """Into how many pieces the mesh splits a logical axis."""
    names = MESH_AXES[axis]
    names = () if names is None else (names,) if isinstance(names, str) else names
    return int(np.prod([mesh.shape[name] for name in names], dtype=int))


def row_multiple(mesh: Mesh | None) -> int:
    """Returns the number that divides the rows of a batch and the slots of a decode state."""
    return 1 if mesh is None else parts_of(mesh, "batch")


def vocab_parts(mesh: Mesh | None) -> int:
    """Returns into how many parts devices split the vocabulary in decoding."""
    return 1 if mesh is None else parts_of(mesh, "vocab")


def splits_vocab(mesh: Mesh | None) -> bool:
    """Returns whether the vocabulary is split over several devices in decoding."""
    return vocab_parts(mesh) > 1


def named(mesh: Mesh, *axes: str | None, replicated: set[str] | None = None) -> NamedSharding:
    """Sharding of an array with logical `axes` (None: never split), without those that are `replicated`."""
    replicated = replicated or set()
    spec = [None if axis is None or axis in replicated else MESH_AXES[axis] for axis in axes]
    return NamedSharding(mesh, PartitionSpec(*spec))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Sharding of arrays [R, T]: rows over data and fsdp."""
    return named(mesh, "batch", None)


def activation_sharding(mesh: Mesh) -> NamedSharding:
    """Sharding of hidden states [R, T, d]: rows over data and fsdp."""
    return named(mesh, "batch", None, None)


def logits_sharding(mesh: Mesh, whole: bool = False) -> NamedSharding:
    """Sharding of logits [R, V] in decoding: V split, or `whole`; rows as the compiler chooses."""
    return NamedSharding(
        mesh, PartitionSpec(PartitionSpec.UNCONSTRAINED, None if whole else MESH_AXES["vocab"])
    )


def replicated_sharding(mesh: Mesh) -> NamedSharding:
    """Sharding of arrays that every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def constrain(tree: Any, shardings: Any) -> Any:
    """Inside a compiled function: `tree` laid out as `shardings` say; None leaves it to the compiler."""
    return tree if shardings is None else jax.lax.with_sharding_constraint(tree, shardings)
