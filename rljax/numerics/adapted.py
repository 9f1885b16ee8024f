"""A matrix whose gradient goes to two thin factors: W = base + scale B A (LoRA, Hu et al., arXiv 2106.09685).

A params pytree may contain an `AdaptedWeight` in place of any projection (`rljax/models/lora.py` makes them).
A product with it is the product with the merged matrix, so it has the bits of decoding. Only its backward
pass is another one: with dy the gradient of y = x W^T, the gradient of W is dY^T X, and those of the factors
are

    dA = scale B^T dW = scale (dY B)^T X        dB = scale dW A^T = scale dY^T (X A^T)

which are computed from the right, by thin products: dW, as large as the matrix, is never formed.
"""

import functools
from typing import Any

import jax
from flax import struct
from jax import Array

from rljax.numerics.products import dot, sum_of_outer_products


@struct.dataclass
class AdaptedWeight:
    """A merged matrix with its factors.

    Attributes:
      merged: [out, in], base + scale B A in the compute dtype; has no gradient.
      a: float32 [rank, in].
      b: float32 [out, rank].
      scale: factor of B A.
    """

    merged: Array
    a: Array
    b: Array
    scale: float = struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix, [out, in]."""
        return self.merged.shape


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def with_factor_gradients(y: Array, rows: Array, a: Array, b: Array, scale: float) -> Array:
    """Returns `y`, the product of rows with a merged matrix, and passes its gradient on to the factors, too.

    Args:
      y: float32 [R, out]; its gradient must have no more digits than `rows`, as that of `rounded_dot`.
      rows: [R, in]; its own gradient comes from `y` alone.
      a, b, scale: see `AdaptedWeight`.
    """
    return y


def _backward(scale: float, kept: Any, dy: Array) -> tuple[Array, None, Array, Array]:
    rows, a, b = kept
    dtype = rows.dtype
    narrow = dy.astype(dtype)
    through_b = dot(narrow, b.T.astype(dtype))  # [R, rank]
    through_a = dot(rows, a.astype(dtype))
    da = scale * sum_of_outer_products(through_b.astype(dtype), rows)
    db = scale * sum_of_outer_products(narrow, through_a.astype(dtype))
    return dy, None, da.astype(a.dtype), db.astype(b.dtype)


with_factor_gradients.defvjp(lambda y, rows, a, b, scale: (y, (rows, a, b)), _backward)
