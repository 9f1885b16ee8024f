"""A matrix rounded to 8 or 4 bits: what the quantized self-drafter does with all projections of a new policy.

It takes as long as reading the matrix and writing half or a fourth of it, if that happens once. See
docs/kernels/round_to_nearest.md.
"""

from jax import Array

from rljax.kernels import switch
from rljax.numerics.kernel_choice import Implementation


def round_to_nearest(
    weight: Array, bits: int, group: int, implementation: Implementation = None
) -> tuple[Array, Array, Array | None]:
    """`weight` [out, in] on a grid for each group of inputs: parts of a `QuantizedWeight`.

    A group's grid spans its weights, and 0. A group with an entry that is infinite or not a number has an
    infinite scale over zeros: what it stands for is not a number. All backends give the same bits on a device
    that divides alike in all of them: a group's scale is inverted, no weight is divided.

    Args:
      weight: float32 or bfloat16 [out, in]; computed in float32.
      bits: 4 (with a zero in each group) or 8 (symmetric).
      group: inputs that share a scale, the last group of a row possibly fewer; 0 for the whole row.
      implementation: see `rljax.kernels.switch`; the default depends on (out, in).

    Returns:
      values, scale and zero as in `QuantizedWeight`; zero is None in 8 bits.

    Raises:
      Refused: no backend that was asked for takes this type or shape.
    """
    return switch.call("round_to_nearest", implementation, weight.shape, weight, bits, group)
