"""Products of rows with a matrix in 8 or 4 bits, the bulk of a draft step of the quantized self-drafter.

A few rows, one per slot, are multiplied with a matrix that is read once. The time is that of reading the
matrix, so 4 bits per weight may be up to 3.7 times as fast as bfloat16. See
docs/kernels/quantized_product.md.
"""

from jax import Array

from rljax.kernels import switch
from rljax.numerics.kernel_choice import Implementation
from rljax.numerics.quantized import QuantizedWeight


def quantized_product(x: Array, weight: QuantizedWeight, implementation: Implementation = None) -> Array:
    """Multiplies x [N, in] by `weight` [out, in]: float32 [N, out], summed in float32.

    A row of the result depends on that row of x alone; the bits of a kernel are the same for every N that it
    supports.

    Args:
      x: float32 or bfloat16 [N, in].
      weight: weights, dequantized to the type of x (`activations="float"`), or multiplied with activations in
        8 bits ("int8", which no kernel supports); without a layout (`shards.py`).
      implementation: see `rljax.kernels.switch`; the default depends on (out, in).

    Raises:
      Refused: no requested backend supports this type or shape.
    """
    return switch.call("quantized_product", implementation, weight.shape, x, weight)
