"""Products of activations with weights: whole, in blocks, quantized, or merged from a base and an adapter."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from rljax import target
from rljax.kernels.quantized_product import quantized_product
from rljax.kernels.quantized_product.shards import product_of_shards
from rljax.numerics import products
from rljax.numerics.adapted import AdaptedWeight, with_factor_gradients
from rljax.numerics.blocked_weights import BlockedWeight, blocked_dot
from rljax.numerics.cast_weight import CastWeight
from rljax.numerics.quantized import QuantizedWeight
from rljax.numerics.rows import Numerics

Weight = Array | CastWeight | QuantizedWeight | AdaptedWeight | BlockedWeight


def linear(x: Array, weight: Weight, numerics: Numerics, bias: Array | None = None) -> Array:
    """x [..., in] times weight [out, in] (+ bias [out]): [..., out] in x's dtype, accumulated in float32."""
    y = product(x, weight, numerics, rounded=True)
    if bias is not None:
        y = y + jnp.expand_dims(bias.astype(jnp.float32), tuple(range(y.ndim - 1)))
    return y.astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class Products:
    """The products of a function of `by_slabs`.

    Attributes:
      numerics: of its sums, too.
      keep: keeps their results for the gradient; None outside of slabs.
    """

    numerics: Numerics
    keep: products.Keep | None = None

    def linear(self, x: Array, weight: Weight, bias: Array | None = None) -> Array:
        """As `linear`."""
        y = linear(x, weight, self.numerics, bias)
        return y if self.keep is None else self.keep(y)

    def fused(
        self,
        apart: Callable[[], Array],
        weights: tuple[Weight, ...],
        kernel: Callable[[tuple[Array, ...], bool], tuple[Array, ...]],
    ) -> Array:
        """Returns the result of `apart`, which has the gradient; in slabs `kernel` computes it.

        Args:
          apart: computes the result from `linear` with `weights`, once each, in order.
          kernel: takes the weights, and whether to return the results of `linear` after its own.
        """
        whole = tuple(weight.merged if isinstance(weight, AdaptedWeight) else weight for weight in weights)
        if self.keep is None or not all(isinstance(weight, Array) for weight in whole):
            return apart()
        return self.keep.fused(apart, lambda with_products: kernel(whole, with_products))


def by_slabs(
    function: Callable[[Products, Any, Any], Any],
    rows: Any,
    weights: Any,
    numerics: Numerics,
) -> Any:
    """Returns `function(products, rows, weights)`; in a form of products with slabs, computed for a slab of
    rows after another (`products.in_slabs`).

    Within a slab the numerics are those of any number of rows: no rows are padded, and on an accelerator sums
    are plain.

    Args:
      function: closes over no arrays.
      rows: arrays [N, T, ...]; in a slab, [rows, 1, ...].
      weights: its weights, a pytree.
    """
    form = numerics.product_form
    if not (numerics.row_invariant and form.slabs):
        return function(Products(numerics), rows, weights)
    plain_sums = target.platform() != "cpu"
    within = dataclasses.replace(
        numerics, measured_form=products.ProductForm(1, plain_sums=plain_sums, blocks=form.blocks)
    )

    def of_slab(keep: products.Keep, rows: Any, weights: Any) -> Any:
        return function(Products(within, keep), rows, weights)

    batch, length = jax.tree.leaves(rows)[0].shape[:2]
    count = batch * length
    more = form.padded(count) - count

    def padded(x: Array) -> Array:
        x = x.reshape(count, 1, *x.shape[2:])
        return jnp.pad(x, [(0, more), *[(0, 0)] * (x.ndim - 1)])

    def cast(weights: Any) -> Any:
        plain = lambda leaf: isinstance(leaf, Array | CastWeight) and len(leaf.shape) > 1  # noqa: E731
        return jax.tree.map(
            lambda leaf: leaf.astype(numerics.dtype) if plain(leaf) else leaf,
            weights,
            is_leaf=lambda node: isinstance(
                node, CastWeight | QuantizedWeight | AdaptedWeight | BlockedWeight
            ),
        )

    y = products.in_slabs(of_slab, jax.tree.map(padded, rows), weights, form.multiple, cast)
    return jax.tree.map(lambda y: y[:count].reshape(batch, length, *y.shape[2:]), y)


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
