"""Rows times a matrix in 8 or 4 bits: what a draft step of the quantized self-drafter consists of.

Few rows (a slot each) meet a matrix that is read once: the time is that of reading the matrix, so 4 bits a
weight may be up to 3.7 times as fast as bfloat16. See docs/kernels/quantized_product.md.
"""

from jax import Array

from rljax.kernels import switch
from rljax.numerics.kernel_choice import Implementation
from rljax.numerics.quantized import QuantizedWeight


def quantized_product(x: Array, weight: QuantizedWeight, implementation: Implementation = None) -> Array:
    """x [N, in] times `weight` [out, in]: float32 [N, out], summed in float32.

    A row of the result depends on that row of x alone, whatever is beside it; a kernel's bits are the same
    for every N that it takes.

    Args:
      x: float32 or bfloat16 [N, in].
      weight: dequantized in x's type on its way (`activations="float"`), or multiplied with activations in 8
        bits ("int8", which no kernel does).
      implementation: see `rljax.kernels.switch`; the default depends on (out, in).

    Raises:
      Refused: no backend that was asked for computes this type or shape.
    """
    return switch.call("quantized_product", implementation, weight.shape, x, weight)
