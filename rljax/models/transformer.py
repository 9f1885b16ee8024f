"""The policy: one forward pass for training, prefill, decoding and tree verification.

A decoder-only transformer as pure functions over a params pytree (pre-norm, RoPE, grouped-query attention,
gated MLP). Callers differ only in the positions and the attention structure. Weights are stored [out, in], as
in Hugging Face checkpoints.

Params (shapes; d = hidden_size, H/Hk = heads, D = head_dim, f = mlp_size, V = vocab_size):

    embed [V, d]   layers: a list of
        attention_norm [d]   q [H*D, d]   k [Hk*D, d]   v [Hk*D, d]   o [d, H*D]
        q_bias, k_bias, v_bias        (attention_bias)
        q_norm [D], k_norm [D]        (qk_norm)
        mlp_norm [d]   gate [f, d]   up [f, d]   down [d, f]
        attention_post_norm [d]   mlp_post_norm [d]                      (gemma)
    final_norm [d]   lm_head [V, d]   (absent when tied)

Any of q, k, v, o, gate, up, down may be a `QuantizedWeight` instead (`rljax/numerics/quantized.py`) or, where
gradients go to the factors of LoRA, an `AdaptedWeight` (`rljax/numerics/adapted.py`). A decoder's may be a
`BlockedWeight` (`rljax/numerics/blocked_weights.py`); then `blocked_head` may be one of the output embedding.
An update's are `CastWeight`s in bfloat16 (`rljax/numerics/cast_weight.py`).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from rljax import target
from rljax.kernels.gated_product import gated_product
from rljax.kernels.head_products import HeadWeights, head_products
from rljax.kernels.linear import Products, by_slabs, product
from rljax.models.config import ModelConfig
from rljax.models.outlining import traced_once
from rljax.numerics.rows import Numerics, apply_rope, rms_norm

Params = dict[str, Any]
Attention = Callable[[int, Array, Array, Array], tuple[Array, Any]]
"""(cache, q [N, T, H, D], k [N, T, Hk, D], v [N, T, Hk, D]) -> (output [N, T, H, D], values to return to the
caller, such as keys and values). `cache` is the layer's entry of `caches` (`forward`).
"""
_BEFORE_ATTENTION = ("attention_norm", "q", "k", "v", "q_bias", "k_bias", "v_bias", "q_norm", "k_norm")


class Gathered(Protocol):
    """What gathers weights of which devices have parts, `rljax.models.sharding.GatheredWeights`."""

    def embedded(self, x: Array) -> Array:
        """Returns embeddings [N, T, d] whole."""

    def layer(self, layer: Params, x: Array) -> tuple[Params, Array]:
        """Returns the weights of a layer whole, and its input."""


def param_shapes(config: ModelConfig) -> Params:
    """Returns the params pytree with a shape tuple in place of every array."""
    d, f, v = config.hidden_size, config.mlp_size, config.vocab_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = {
        "attention_norm": (d,),
        "q": (q_size, d),
        "k": (kv_size, d),
        "v": (kv_size, d),
        "o": (d, q_size),
        "mlp_norm": (d,),
        "gate": (f, d),
        "up": (f, d),
        "down": (d, f),
    }
    if config.attention_bias:
        layer |= {"q_bias": (q_size,), "k_bias": (kv_size,), "v_bias": (kv_size,)}
    if config.qk_norm:
        layer |= {"q_norm": (config.head_dim,), "k_norm": (config.head_dim,)}
    if config.gemma is not None:
        layer |= {"attention_post_norm": (d,), "mlp_post_norm": (d,)}
    shapes = {"embed": (v, d), "layers": [dict(layer) for _ in range(config.num_layers)], "final_norm": (d,)}
    if not config.tie_embeddings:
        shapes["lm_head"] = (v, d)
    return shapes


def num_params(config: ModelConfig) -> int:
    """Returns the number of parameters of the policy; a tied LM head counts once."""
    shapes = jax.tree.leaves(param_shapes(config), is_leaf=lambda x: isinstance(x, tuple))
    return sum(int(np.prod(shape)) for shape in shapes)


def init_params(config: ModelConfig, seed: int) -> Params:
    """Returns float32 weights for training from scratch.

    They are normal with standard deviation hidden_size^-0.5, from which small policies learn much faster than
    from 0.02; residual outputs shrink with depth (GPT-2). Norms multiply by 1, biases are 0.
    """
    rng = np.random.default_rng(seed)
    scale = config.hidden_size**-0.5

    def init(path, shape):
        name = path[-1].key
        if name.endswith("norm"):
            return np.full(shape, 1.0 if config.gemma is None else 0.0, np.float32)
        if name.endswith("bias"):
            return np.zeros(shape, np.float32)
        shrink = (2 * config.num_layers) ** -0.5 if name in ("o", "down") else 1.0
        return rng.standard_normal(shape, dtype=np.float32) * np.float32(scale * shrink)

    shapes = param_shapes(config)
    # Not `jnp.asarray`, which compiles a program for every shape.
    return jax.device_put(
        jax.tree_util.tree_map_with_path(init, shapes, is_leaf=lambda x: isinstance(x, tuple))
    )


def _norm(x: Array, weight: Array, config: ModelConfig, numerics: Numerics) -> Array:
    """Applies a norm of the policy's; Gemma's multiply by one more than their weights."""
    return rms_norm(x, _scale(weight, config), config.norm_epsilon, numerics)


def _scale(weight: Array, config: ModelConfig) -> Array:
    return weight if config.gemma is None else weight.astype(jnp.float32) + 1.0


def _final_norm(products: Products, x: Array, weight: Array, config: ModelConfig) -> Array:
    return _norm(x, weight, config, products.numerics)


def decoder_layer(
    layer: Params,
    cache: Any,
    x: Array,
    angles: Array,
    attention: Attention,
    config: ModelConfig,
    numerics: Numerics,
    attention_input: Array | None = None,
) -> tuple[Array, Any]:
    """Applies one decoder layer.

    Args:
      layer: weights of the layer; see the module's docstring.
      cache: first argument of `attention`.
      x: residual stream, [N, T, d].
      angles: rows of the RoPE table, float32 [N, T, at least 2, D/2]; the first two are read.
      config: heads and norms; the widths are those of the weights.
      attention_input: input of queries, keys and values, [N, T, any]; None for x after `attention_norm`. (A
        drafter's layer has another input than its residual stream.)

    Returns:
      The residual stream after the layer, [N, T, d], and the second result of the attention.
    """
    into = functools.partial(_queries_keys_values, config=config, normed=attention_input is None)
    h = x if attention_input is None else attention_input
    qkv = by_slabs(into, (h, angles), {n: layer[n] for n in layer if n in _BEFORE_ATTENTION}, numerics)
    kv_heads = layer["k"].shape[0] // config.head_dim
    q, k, v = jnp.split(qkv, [qkv.shape[2] - 2 * kv_heads, qkv.shape[2] - kv_heads], axis=2)
    attended, kept = attention(cache, q, k, v)
    after = functools.partial(_after_attention, config=config)
    others = {n: layer[n] for n in layer if n not in _BEFORE_ATTENTION}
    return by_slabs(after, (x, attended), others, numerics), kept


def _queries_keys_values(
    products: Products, rows: tuple[Array, Array], layer: Params, config: ModelConfig, normed: bool
) -> Array:
    """Returns queries, keys and values as one array, [N, T, H + 2 Hk, D], of (input [N, T, any], angles); the
    input is the residual stream if it is to be `normed`. (Of several arrays, a GPU's compiler would compute
    each in a kernel of its own.)
    """
    h, angles = rows
    numerics, names = products.numerics, "qkv"
    if normed:
        h = _norm(h, layer["attention_norm"], config, numerics)
    heads = (*h.shape[:2], -1, config.head_dim)

    def apart() -> Array:
        q, k, v = (products.linear(h, layer[n], layer.get(f"{n}_bias")).reshape(heads) for n in names)
        if config.qk_norm:
            q = _norm(q, layer["q_norm"], config, numerics)
            k = _norm(k, layer["k_norm"], config, numerics)
        return jnp.concatenate([apply_rope(q, angles), apply_rope(k, angles), v], axis=2)

    def kernel(matrices: tuple[Array, ...], with_products: bool) -> tuple[Array, ...]:
        biases = tuple(layer[f"{n}_bias"].astype(jnp.float32) for n in names if f"{n}_bias" in layer)
        scales = tuple(_scale(layer[f"{n}_norm"], config) for n in names if f"{n}_norm" in layer)
        weights = HeadWeights(matrices, biases, scales, config.norm_epsilon)
        return head_products(h, angles, weights, with_products, numerics)

    return products.fused(apart, tuple(layer[n] for n in names), kernel)


def _after_attention(
    products: Products, rows: tuple[Array, Array], layer: Params, config: ModelConfig
) -> Array:
    """Returns the residual stream after a layer, of that before it and attention's output [N, T, H, D]."""
    x, attended = rows
    attended = products.linear(attended.reshape(*x.shape[:2], -1), layer["o"])
    if config.gemma is not None:
        attended = _norm(attended, layer["attention_post_norm"], config, products.numerics)
    x = x + attended
    h = _norm(x, layer["mlp_norm"], config, products.numerics)
    activation = jax.nn.silu if config.gemma is None else jax.nn.gelu  # approximated by tanh

    def apart() -> Array:
        return activation(products.linear(h, layer["gate"])) * products.linear(h, layer["up"])

    def kernel(matrices: tuple[Array, ...], with_products: bool) -> tuple[Array, ...]:
        choice = products.numerics.kernels.gated_product
        return gated_product(h, *matrices, activation, with_products, choice)

    gated = products.fused(apart, (layer["gate"], layer["up"]), kernel)
    h = products.linear(gated, layer["down"])
    if config.gemma is not None:
        h = _norm(h, layer["mlp_post_norm"], config, products.numerics)
    return x + h


def embeddings(table: Array, tokens: Array) -> Array:
    """Returns rows of an embedding table: `table[tokens]`.

    A CPU's compiler reads bfloat16 rows from a float32 copy of the whole table, which decode steps in a loop
    make once a call. Integers it reads as they are. Such a table gets no gradient.
    """
    if table.dtype != jnp.bfloat16 or target.platform() != "cpu":
        return table[tokens]
    rows = lax.bitcast_convert_type(table, jnp.uint16)[tokens]
    return lax.bitcast_convert_type(rows, jnp.bfloat16)


def forward(
    params: Params,
    config: ModelConfig,
    tokens: Array,
    positions: Array,
    attention: Attention,
    rope: Array,
    numerics: Numerics,
    remat: bool = False,
    caches: Sequence[Any] | None = None,
    gathered: Gathered | None = None,
) -> tuple[Array, list[Any]]:
    """Returns the final hidden states of `tokens`.

    Args:
      params: weights, see the module's docstring; any float dtype, cast to the compute dtype in products.
      tokens: int32 [N, T].
      positions: int32 [N, T], rows of `rope`.
      attention: the attention structure; called once per layer.
      rope: `rope_table(config, length)`, float32 [length, 2 or 4, D/2].
      remat: recompute each layer's activations in the backward pass instead of keeping them.
      caches: arrays that the attention of each layer reads, such as `KVCache.layers`; None for none.
      gathered: gathers the weights of each layer where devices have parts of it; None where they are whole.

    Returns:
      Hidden states after the final norm, [N, T, d], and the second results of the attention, one per layer.
    """
    hidden, kept, _ = forward_with_residuals(
        params, config, tokens, positions, attention, rope, numerics, (), remat, caches, gathered
    )
    return hidden, kept


def forward_with_residuals(
    params: Params,
    config: ModelConfig,
    tokens: Array,
    positions: Array,
    attention: Attention,
    rope: Array,
    numerics: Numerics,
    layers: Sequence[int] = (),
    remat: bool = False,
    caches: Sequence[Any] | None = None,
    gathered: Gathered | None = None,
) -> tuple[Array, list[Any], list[Array]]:
    """As `forward`, but also returns the residual stream, [N, T, d] without a norm, after the first n layers
    for each n of `layers` (0: the embeddings). Drafters read these features (`drafters/eagle/model.py`).
    """
    x = embeddings(params["embed"], tokens).astype(numerics.dtype)
    if gathered is not None:
        x = gathered.embedded(x)
    if config.gemma is not None:
        x = x * jnp.asarray(config.hidden_size**0.5, x.dtype)
    streams, kept = [x], []
    # A CPU rounds bfloat16 otherwise where it inlines a function than where layers are written out.
    written_out = numerics.compute_dtype == "bfloat16" and target.platform() == "cpu"

    def layer_with(angles: Array) -> Callable[[Params, Any, Array], tuple[Array, Any]]:
        def run(layer: Params, cache: Any, x: Array) -> tuple[Array, Any]:
            if gathered is not None:
                layer, x = gathered.layer(layer, x)
            return decoder_layer(layer, cache, x, angles, attention, config, numerics)

        if numerics.outline_layers or not written_out:
            return traced_once(run, remat, numerics.outline_layers)
        return jax.checkpoint(run) if remat else run

    angles = rope[positions]
    runs = [layer_with(angles[:, :, kind : kind + 2]) for kind in range(0, angles.shape[2], 2)]
    caches = [None] * len(params["layers"]) if caches is None else caches
    kinds = [0] * len(caches) if config.gemma is None else map(int, config.gemma.local_layers)
    for layer, cache, kind in zip(params["layers"], caches, kinds, strict=True):
        x, kept_here = runs[kind](layer, cache, x)
        streams.append(x)
        kept.append(kept_here)
    hidden = by_slabs(functools.partial(_final_norm, config=config), x, params["final_norm"], numerics)
    return hidden, kept, [streams[layer] for layer in layers]


def lm_head(params: Params, config: ModelConfig) -> Array:
    """Returns the output embedding, [V, d]."""
    return params["embed"] if config.tie_embeddings else params["lm_head"]


def logits(params: Params, config: ModelConfig, hidden: Array, numerics: Numerics) -> Array:
    """Returns float32 logits [..., V] of hidden states [..., d]."""
    return product(hidden, params.get("blocked_head", lm_head(params, config)), numerics)
