"""The product with a quantized matrix that devices share: every device multiplies with its part.

A part is a `QuantizedWeight` of its own, so that kernels know nothing of it. Where outputs are split, nothing
is communicated; where inputs are split, the products of the parts are added.
"""

import math

import jax
from jax import Array, lax
from jax.sharding import PartitionSpec

from rljax.kernels import switch
from rljax.numerics.kernel_choice import Implementation
from rljax.numerics.quantized import QuantizedWeight


def product_of_shards(x: Array, weight: QuantizedWeight, implementation: Implementation) -> Array:
    """Multiplies x [N, in] by a `weight` [out, in] with a layout: float32 [N, out].

    Raises:
      Refused: no requested backend supports the type or shape of a part.
    """
    layout = weight.layout
    parts = 1 if layout.inputs is None else layout.mesh.shape[layout.inputs]
    row_parts = math.prod(layout.mesh.shape[axis] for axis in layout.rows)
    rows = layout.rows if len(x) % row_parts == 0 else None

    def multiply(x: Array, weight: QuantizedWeight) -> Array:
        part = weight.replace(inputs=weight.inputs // parts, layout=None)
        y = switch.call("quantized_product", implementation, part.shape, x, part)
        return y if layout.inputs is None else lax.psum(y, layout.inputs)

    return jax.shard_map(
        multiply,
        mesh=layout.mesh,
        in_specs=(PartitionSpec(rows, layout.inputs), layout.spec),
        out_specs=PartitionSpec(rows, layout.outputs),
        check_vma=False,
    )(x, weight)
