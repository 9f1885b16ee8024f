"""More rows than a kernel of quantized products holds: chunks of them, each of which reads the matrix.

In 4 bits, four readings are as many bytes as one of the matrix in bfloat16. Beyond that a kernel cannot be
faster than plain JAX, and refuses.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array

from rljax.numerics.kernel_choice import Refused

ROWS = 64
"""Rows of activations that a kernel multiplies at a time."""
_MOST_CHUNKS = 4


def in_chunks(multiply: Callable[[Array], Array], x: Array) -> Array:
    """Returns `multiply(x)` for x [N, in], computed from at most `ROWS` rows at a time. The bits of a row are
    those of any chunk.

    Raises:
      Refused: there are too many rows, or none.
    """
    count, most = x.shape[0], _MOST_CHUNKS * ROWS
    if not 0 < count <= most:
        raise Refused(
            f"{count} rows, it multiplies 1 to {most}; lower speculation.max_batch, or name xla after it"
        )
    if count <= ROWS:
        return multiply(x)
    return jnp.concatenate([multiply(x[first : first + ROWS]) for first in range(0, count, ROWS)])
