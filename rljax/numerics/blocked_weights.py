"""Weights in blocks of 64 outputs, which a CPU multiplies with few rows without packing them first.

A CPU's library (YNNPACK) packs weights [out, in] anew for every product: it writes all of them to memory
again, 64 outputs at a time. With few rows that takes longer than multiplying. Here they are stored as the
library would pack them, as blocks [in, 64], and each block is a product of its own, which is read where it
lies. A block has as many outputs as the library packs together, so it adds in the same order, and the bits
are those of the product with all weights (`docs/row-invariance.md`).
"""

import itertools

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array, lax

LANES = 64
"""Outputs in a block."""
_PARTS = 1 if jax.__version_info__ >= (0, 11) else 12
"""Products that a product is divided into. JAX 0.11's library divides blocks among cores. With JAX 0.10 the
compiler's runtime gives another core work only where more than eight operations are ready together."""


@struct.dataclass
class BlockedWeight:
    """A matrix with its blocks. A params pytree may contain it in place of any projection.

    Attributes:
      weight: the matrix, [out, in], for products of many rows.
      blocks: its outputs in order, in up to `_PARTS` arrays [n, in, LANES].
      rows: largest number of rows that are multiplied with the blocks.
    """

    weight: Array
    blocks: tuple[Array, ...]
    rows: int = struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix, [out, in]."""
        return self.weight.shape

    def serves(self, rows: int) -> bool:
        """Whether so many rows are multiplied with the blocks. A lone row is not: a library multiplies a
        matrix by a vector in an order of its own.
        """
        return 2 <= rows <= self.rows


def blocked(weight: Array, rows: int) -> BlockedWeight:
    """Returns a matrix [out, in], whose outputs are a multiple of LANES, with its blocks."""
    return BlockedWeight(weight, _blocks(weight), rows)


@jax.jit
def _blocks(weight: Array) -> tuple[Array, ...]:
    outputs, inputs = weight.shape
    blocks = weight.reshape(outputs // LANES, LANES, inputs).swapaxes(1, 2)
    parts = min(_PARTS, len(blocks))
    bounds = [len(blocks) * part // parts for part in range(parts + 1)]
    return tuple(blocks[start:end] for start, end in itertools.pairwise(bounds))


def whole(weight: Array | BlockedWeight) -> Array:
    """Returns a matrix [out, in] without its blocks."""
    return weight.weight if isinstance(weight, BlockedWeight) else weight


def blocked_dot(rows: Array, weight: BlockedWeight) -> Array:
    """Multiplies rows [R, in] by the blocks: float32 [R, out]."""
    by_block = (((2,), (1,)), ((0,), (0,)))
    products = [
        lax.dot_general(
            jnp.broadcast_to(rows, (len(blocks), *rows.shape)),
            blocks.astype(rows.dtype),
            by_block,
            preferred_element_type=jnp.float32,
        )
        for blocks in weight.blocks
    ]
    return jnp.concatenate(products).swapaxes(0, 1).reshape(len(rows), -1)
