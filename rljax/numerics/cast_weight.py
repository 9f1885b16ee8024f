"""A matrix with a copy in the compute dtype, which products read in its place.

Training keeps float32 weights and multiplies in bfloat16. Cast inside of a micro-batch's program, weights are
cast by every micro-batch, and once more where layers are computed again. A copy is made once an update
(`rljax/training/weight_copies.py`), has the bits of a cast, and gradients go to the float32 matrix.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array


@struct.dataclass
class CastWeight:
    """A matrix and its copy. A params pytree may contain it in place of any projection.

    Attributes:
      weight: float32 [out, in]; has the gradient, and is not read.
      copy: [out, in] in the compute dtype; has no gradient.
    """

    weight: Array
    copy: Array

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix, [out, in]."""
        return self.weight.shape

    def astype(self, dtype: Any) -> Array:
        """Returns the copy, whose gradient is that of a cast, of the weight; `dtype` is the copy's."""
        if self.copy.dtype != dtype:
            raise ValueError(f"a copy in {self.copy.dtype} cannot be read in {jnp.dtype(dtype)}")
        return _copy_of(self)

    def of_gradient(self, gradient: Array) -> "CastWeight":
        """Returns the cotangent in which the weight's is `gradient`, cast to its dtype."""
        return CastWeight(gradient.astype(self.weight.dtype), None)


@jax.custom_vjp
def _copy_of(weight: CastWeight) -> Array:
    return weight.copy


_copy_of.defvjp(
    lambda weight: (weight.copy, weight), lambda weight, gradient: (weight.of_gradient(gradient),)
)
