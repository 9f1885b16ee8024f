"""Shardings of a model's weights on a mesh, to train and to decode, by the table of `rljax/sharding.py`."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from rljax import target
from rljax.errors import ConfigError
from rljax.models.config import ModelConfig
from rljax.models.transformer import Attention, Params, param_shapes
from rljax.sharding import MESH_AXES, constrain, named, parts_of, row_multiple, vocab_parts

Weights = Literal["replicated", "fsdp"]
"""How devices along fsdp hold the engine's copy of the weights: all of each, or a part."""

PARAM_AXES = {
    "embed": ("vocab", "embed"),
    "lm_head": ("vocab", "embed"),
    "final_norm": ("norm",),
    "attention_norm": ("norm",),
    "mlp_norm": ("norm",),
    "attention_post_norm": ("norm",),
    "mlp_post_norm": ("norm",),
    "q_norm": ("norm",),
    "k_norm": ("norm",),
    "q": ("heads", "embed"),
    "k": ("kv_heads", "embed"),
    "v": ("kv_heads", "embed"),
    "o": ("embed", "heads"),
    "q_bias": ("heads",),
    "k_bias": ("kv_heads",),
    "v_bias": ("kv_heads",),
    "gate": ("mlp", "embed"),
    "up": ("mlp", "embed"),
    "down": ("embed", "mlp"),
}
"""Name of a weight of the policy -> the logical axes of its dimensions."""
# Axes that are replicated where the devices do not divide them: key/value heads are few and small, and
# vocabularies have odd sizes (the embedding is still split along "embed", and padded in decoding).
_MAY_REPLICATE = ("vocab", "kv_heads")
_WHOLE_IN_DECODING = {"embed"}


def _sizes(config: ModelConfig) -> dict[str, tuple[str, int]]:
    """Logical axis -> (the dimension's name, the size to be divided); a head is never split."""
    return {
        "vocab": ("vocab_size", config.vocab_size),
        "embed": ("hidden_size", config.hidden_size),
        "heads": ("num_heads", config.num_heads),
        "kv_heads": ("num_kv_heads", config.num_kv_heads),
        "mlp": ("mlp_size", config.mlp_size),
    }


def replicated_axes(config: ModelConfig, mesh: Mesh, decoding: bool = False) -> set[str]:
    """Axes of the policy that this mesh does not divide and that may be replicated instead. In `decoding`,
    weights are whole along the residual stream, so nothing need divide it.
    """
    replicated = set()
    for axis, (name, size) in _sizes(config).items():
        parts = parts_of(mesh, axis)
        if size % parts == 0 or (decoding and axis in _WHOLE_IN_DECODING):
            continue
        if axis not in _MAY_REPLICATE:
            raise ConfigError(
                f"mesh.{MESH_AXES[axis]}: {parts} devices cannot split the policy's {name} {size} evenly;"
                f" set it to a divisor of {size}"
            )
        replicated.add(axis)
    return replicated


def padded_vocab_size(config: ModelConfig, mesh: Mesh | None) -> int:
    """Returns the rows of embedding and LM head in decoding: the vocabulary's size, rounded up to a number
    that the mesh divides.
    """
    parts = vocab_parts(mesh)
    return -(-config.vocab_size // parts) * parts


def param_shardings(config: ModelConfig, mesh: Mesh, decoding: bool = False, split: bool = False) -> Params:
    """The params pytree with a NamedSharding instead of every array.

    `vocab` and `kv_heads` are replicated where the mesh does not divide them; so tensor may exceed the number
    of key/value heads. Any other such dimension is a ConfigError.

    Args:
      decoding: the layout of the engine's copy, whose vocabulary has `padded_vocab_size` rows: only tensor
        splits it. Weights split along fsdp would be gathered again for every token.
      split: with `decoding`, keep the weights split along fsdp all the same (`GatheredWeights`).
    """
    replicated = replicated_axes(config, mesh, decoding and not split)
    if decoding:
        replicated = (replicated - {"vocab"}) | (set() if split else _WHOLE_IN_DECODING)
    return jax.tree_util.tree_map_with_path(
        lambda path, _: named(mesh, *PARAM_AXES[path[-1].key], replicated=replicated),
        param_shapes(config),
        is_leaf=lambda x: isinstance(x, tuple),
    )


def factor_shardings(config: ModelConfig, mesh: Mesh, names: Sequence[str]) -> Params:
    """The factors of LoRA with a NamedSharding instead of every array: A [rank, in] and B [out, rank]
    are split as their matrix [out, in] is; the rank, a few rows, is not.
    """
    replicated = replicated_axes(config, mesh)

    def pair(name: str) -> dict[str, NamedSharding]:
        out, inputs = PARAM_AXES[name]
        return {
            "a": named(mesh, None, inputs, replicated=replicated),
            "b": named(mesh, out, None, replicated=replicated),
        }

    return {"layers": [{name: pair(name) for name in names} for _ in range(config.num_layers)]}


def shard_params(
    params: Params, config: ModelConfig, mesh: Mesh | None, decoding: bool = False, split: bool = False
) -> Params:
    """Params laid out on the mesh by `param_shardings`; without one, as they are."""
    if mesh is None:
        return params
    if decoding:
        params = _with_padded_vocab(params, padded_vocab_size(config, mesh))
    return target.put(params, param_shardings(config, mesh, decoding, split))


def _with_padded_vocab(params: Params, rows: int) -> Params:
    """Adds rows of zeros to embedding and LM head; `params` may be shapes."""

    def pad(name: str) -> Any:
        leaf = params[name]
        if leaf.shape[0] == rows:
            return leaf

        def padded(leaf: Array) -> Array:
            return jnp.pad(leaf, ((0, rows - leaf.shape[0]), (0, 0)))

        return jax.eval_shape(padded, leaf) if isinstance(leaf, jax.ShapeDtypeStruct) else padded(leaf)

    return {**params, **{name: pad(name) for name in ("embed", "lm_head") if name in params}}


def mesh_of_a_drafter(config: ModelConfig, mesh: Mesh, split: bool = True) -> Mesh:
    """Returns the mesh that a model drafts on for a policy: the policy's devices and slots, with a tensor
    axis of its own. What is left of the policy's, `copies`, splits nothing, so that its devices hold and
    compute the same.

    Args:
      config: the model's architecture, whose heads and MLP the policy's tensor axis need not divide.
      split: split it over as many devices of the tensor axis as divide it, or over none.
    """
    data, fsdp, tensor = (mesh.shape[axis] for axis in ("data", "fsdp", "tensor"))
    sizes = _sizes(config)
    common = math.gcd(tensor, *(sizes[axis][1] for axis in ("heads", "mlp"))) if split else 1
    if common == tensor:
        return mesh
    devices = mesh.devices.reshape(data, fsdp, common, tensor // common)
    return Mesh(devices, ("data", "fsdp", "tensor", "copies"), axis_types=(AxisType.Auto,) * 4)


@dataclasses.dataclass(frozen=True)
class ShardedAttention:
    """An attention whose queries, keys, values and outputs keep batch and heads split.

    The compiler would otherwise be free to split the activations along the residual stream, as the weights
    are, and to gather the batch.
    """

    attention: Attention
    config: ModelConfig
    mesh: Mesh

    def __call__(self, cache: Any, q: Array, k: Array, v: Array) -> tuple[Array, Any]:
        """q [N, T, H, D], k and v [N, T, Hk, D] -> ([N, T, H, D], what the attention keeps)."""
        replicated = replicated_axes(self.config, self.mesh, decoding=True)  # the residual stream is whole
        heads = named(self.mesh, "batch", None, "heads", None)
        kv_heads = named(self.mesh, "batch", None, "kv_heads", None, replicated=replicated)
        k, v = constrain((k, v), (kv_heads, kv_heads))
        attended, kept = self.attention(cache, constrain(q, heads), k, v)
        return constrain(attended, heads), kept


@dataclasses.dataclass(frozen=True)
class GatheredWeights:
    """Weights that stay split along fsdp in decoding: every pass gathers a layer when it comes to it, and
    gives it up after it (ZeRO-3's parameters: Rajbhandari et al., arXiv 1910.02054).

    Gathering moves bits and adds nothing, so tokens and logprobs are those of replicated weights.
    """

    config: ModelConfig
    mesh: Mesh

    def embedded(self, x: Array) -> Array:
        """Returns embeddings [N, T, d], of which each device has looked up a part of d, whole: devices along
        fsdp exchange parts of rows for rows.
        """
        parts, fsdp = ("data", None, "fsdp"), MESH_AXES["embed"]
        if x.shape[0] % row_multiple(self.mesh):
            parts = (None, None, fsdp)
        x = constrain(x, NamedSharding(self.mesh, PartitionSpec(*parts)))
        rows = MESH_AXES["batch"] if parts[0] else None
        return constrain(x, NamedSharding(self.mesh, PartitionSpec(rows, None, None)))

    def layer(self, layer: Params, x: Array) -> tuple[Params, Array]:
        """Returns a layer's weights, whole along d, for its input x.

        The barrier makes them depend on x: else the compiler may gather all layers together, or once for all
        steps of a loop, and hold the whole policy.
        """
        layer, x = jax.lax.optimization_barrier((layer, x))
        one_layer = dataclasses.replace(self.config, num_layers=1)
        whole = param_shardings(one_layer, self.mesh, decoding=True)["layers"][0]
        gathered = {
            name: constrain(leaf, whole[name]) if isinstance(leaf, Array) and leaf.ndim > 1 else leaf
            for name, leaf in layer.items()
        }
        return gathered, x

    def head(self, params: Params, hidden: Array) -> tuple[Params, Array]:
        """Returns embedding or LM head, whole along d, for hidden states."""
        name = "embed" if self.config.tie_embeddings else "lm_head"
        weight, hidden = jax.lax.optimization_barrier((params[name], hidden))
        return params | {name: constrain(weight, named(self.mesh, "vocab", None))}, hidden
