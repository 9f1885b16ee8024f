"""The heads of a layer: queries, keys and values of rows, with their norms, rotated.

A decode step reads the weights once and writes one array, which attention reads, in one kernel. See
docs/kernels/layer_products.md.
"""

from typing import NamedTuple

from jax import Array

from rljax.kernels import switch
from rljax.numerics.rows import Numerics


class HeadWeights(NamedTuple):
    """Weights of queries, keys and values, D wide.

    Attributes:
      matrices: of queries [H * D, in], keys and values [Hk * D, in], of the type of the rows.
      biases: float32 [H * D], [Hk * D], [Hk * D]; empty where there are none.
      scales: of the norms of query and key heads, float32 [D] each; empty where there are none.
      epsilon: of these norms.
    """

    matrices: tuple[Array, Array, Array]
    biases: tuple[Array, ...]
    scales: tuple[Array, ...]
    epsilon: float


def head_products(
    x: Array, angles: Array, weights: HeadWeights, with_products: bool, numerics: Numerics
) -> tuple[Array, ...]:
    """Returns queries, keys and values side by side, [N, T, H + 2 Hk, D] in the type of x.

    Products are summed in float32 and rounded to the type of x; then queries and keys are normed
    (`rms_norm`) and rotated (`apply_rope`). A row of the result depends on that row of x and angles alone;
    the bits of a kernel are the same for every number of rows, with products or without.

    Args:
      x: float32 or bfloat16 [N, T, in].
      angles: cosines, sines, others, float32 [N, T, at least 2, D / 2].
      with_products: return the rounded products, [N, T, outputs] each, after the result, for its gradient.
      numerics: its `kernels.head_products` says who computes; the default depends on (H, Hk, D).

    Raises:
      Refused: no requested backend supports this type or shape.
    """
    dim = 2 * angles.shape[-1]
    sizes = (weights.matrices[0].shape[0] // dim, weights.matrices[1].shape[0] // dim, dim)
    implementation = numerics.kernels.head_products
    return switch.call("head_products", implementation, sizes, x, angles, weights, with_products, numerics)
