"""The first half of a gated MLP: two products of the same rows, and the activation of one times the other.

A decode step reads the weights once and writes one array, in one kernel. See docs/kernels/layer_products.md.
"""

from collections.abc import Callable

from jax import Array

from rljax.kernels import switch
from rljax.numerics.kernel_choice import Implementation


def gated_product(
    x: Array,
    gate: Array,
    up: Array,
    activation: Callable[[Array], Array],
    with_products: bool,
    implementation: Implementation = None,
) -> tuple[Array, ...]:
    """Returns `activation(x gate^T) * (x up^T)` [N, T, out] in the type of x.

    Both products are summed in float32 and rounded to the type of x. A row of the result depends on that row
    of x alone; the bits of a kernel are the same for every number of rows, with products or without.

    Args:
      x: float32 or bfloat16 [N, T, in].
      gate, up: [out, in], of the type of x.
      activation: computed entry by entry.
      with_products: return the rounded products, [N, T, out] each, after the result, for its gradient.
      implementation: see `rljax.kernels.switch`; the default depends on (out, in).

    Raises:
      Refused: no requested backend supports this type or shape.
    """
    return switch.call("gated_product", implementation, gate.shape, x, gate, up, activation, with_products)
