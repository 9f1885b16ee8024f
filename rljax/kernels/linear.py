"""Products of activations with weights: whole, in blocks, quantized, or merged from a base and an adapter."""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array, lax

from rljax.kernels.quantized_product import quantized_product
from rljax.kernels.quantized_product.shards import product_of_shards
from rljax.numerics import products
from rljax.numerics.adapted import AdaptedWeight, with_factor_gradients
from rljax.numerics.blocked_weights import BlockedWeight, blocked_dot
from rljax.numerics.quantized import QuantizedWeight
from rljax.numerics.rows import Numerics

Weight = Array | QuantizedWeight | AdaptedWeight | BlockedWeight


def linear(x: Array, weight: Weight, numerics: Numerics, bias: Array | None = None) -> Array:
    """x [..., in] times weight [out, in] (+ bias [out]): [..., out] in x's dtype, accumulated in float32."""
    return _biased(product(x, weight, numerics, rounded=True), bias, x.dtype)


def linears(
    x: Array, weights: Sequence[Weight], numerics: Numerics, biases: Sequence[Array | None]
) -> list[Array]:
    """`linear` of one x by several weights, as one product where the form of products says so."""
    form = numerics.product_form
    apart = any(isinstance(weight, QuantizedWeight | BlockedWeight) for weight in weights)
    if apart or not (numerics.row_invariant and form.joined):
        return [linear(x, weight, numerics, bias) for weight, bias in zip(weights, biases, strict=True)]
    rows = x.reshape(-1, x.shape[-1])
    merged = [
        lax.stop_gradient(weight.merged) if isinstance(weight, AdaptedWeight) else weight
        for weight in weights
    ]
    found = []
    ys = products.joined_dots(rows, merged, form, rounded=True)
    for y, weight, bias in zip(ys, weights, biases, strict=True):
        if isinstance(weight, AdaptedWeight):
            y = with_factor_gradients(y, rows, weight.a, weight.b, weight.scale)
        found.append(_biased(y.reshape(*x.shape[:-1], -1), bias, x.dtype))
    return found


def _biased(y: Array, bias: Array | None, dtype: jnp.dtype) -> Array:
    """Returns float32 y [..., out] (+ bias [out]) in `dtype`."""
    if bias is not None:
        y = y + jnp.expand_dims(bias.astype(jnp.float32), tuple(range(y.ndim - 1)))
    return y.astype(dtype)


def product(x: Array, weight: Weight, numerics: Numerics, rounded: bool = False) -> Array:
    """x [..., in] times weight [out, in], cast to x's dtype: float32 [..., out].

    `rounded` says that the result is rounded to x's dtype next, which makes the gradient cheaper
    (`products.rounded_dot`).

    Computed as a product of matrices: the gradient of the weight then sums over one axis, not several, for
    which a CPU would first write out the transpose of the activations.
    """
    rows = x.reshape(-1, x.shape[-1])
    if isinstance(weight, AdaptedWeight):
        y = product(rows, lax.stop_gradient(weight.merged), numerics, rounded)
        y = with_factor_gradients(y, rows, weight.a, weight.b, weight.scale)
        return y.reshape(*x.shape[:-1], weight.shape[0])
    if isinstance(weight, BlockedWeight):
        y = _blocked_product(rows, weight, numerics, rounded)
    elif isinstance(weight, QuantizedWeight):
        multiply = quantized_product if weight.layout is None else product_of_shards
        y = multiply(rows, weight, weight.implementation)
    elif numerics.row_invariant:
        y = products.padded_dot(rows, weight, numerics.product_form, rounded)
    else:
        y = products.chosen_dot(rows, weight, rounded)
    return y.reshape(*x.shape[:-1], weight.shape[0])


def _blocked_product(rows: Array, weight: BlockedWeight, numerics: Numerics, rounded: bool) -> Array:
    """Multiplies rows [R, in] by the blocks where they are few, otherwise by the matrix."""
    count = rows.shape[0]
    padded = numerics.product_form.padded(count) if numerics.row_invariant else count
    if not weight.serves(padded):
        return product(rows, weight.weight, numerics, rounded)
    return blocked_dot(jnp.pad(rows, ((0, padded - count), (0, 0))), weight)[:count]
