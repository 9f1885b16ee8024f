"""Rounding of a matrix to 8 or 4 bits, as the quantized self-drafter needs for all projections of a new
policy.

At best it takes as long as reading the matrix once and writing a half or a fourth of it. See
docs/kernels/quantized_product.md.
"""

from jax import Array

from rljax.kernels import switch
from rljax.numerics.kernel_choice import Implementation


def round_to_nearest(
    weight: Array, bits: int, group: int, implementation: Implementation = None
) -> tuple[Array, Array, Array | None]:
    """Rounds `weight` [out, in] to a grid per group of inputs; returns the parts of a `QuantizedWeight`.

    A group's grid spans its weights and 0. A group with an infinite entry or NaN gets an infinite scale over
    zeros, and so stands for NaN. All backends give the same bits on devices with the same division: they
    invert the scale of a group, and divide no weight.

    Args:
      weight: float32 or bfloat16 [out, in]; computed in float32.
      bits: bits per weight: 4 (with a zero per group) or 8 (symmetric).
      group: number of inputs that share a scale; the last group may be smaller; 0 for the whole row.
      implementation: see `rljax.kernels.switch`; the default depends on (out, in).

    Returns:
      values, scale and zero as in `QuantizedWeight`; zero is None in 8 bits.

    Raises:
      Refused: no named backend takes this type or shape.
    """
    return switch.call("round_to_nearest", implementation, weight.shape, weight, bits, group)
