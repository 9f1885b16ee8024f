"""Products of the self-drafter: the projections of real policies in 4 and 8 bits, for 1 to 64 slots.

A product takes a few microseconds, less than it takes to start a program, and its matrix fits the cache. So a
call multiplies with one layer's matrix after the other, as a draft step does.
"""

import jax
import numpy as np
from jax import Array
from jax import numpy as jnp

from drafters.quantized import WeightFormat, rtn
from kernel_benchmarks.case import POLICIES, TINY, Case, PolicyShape, by_implementation
from rljax.kernels.quantized_product import quantized_product
from rljax.numerics.quantized import QuantizedWeight

_BYTES = 2**28  # of packed weights in a call, well beyond a cache of 50 MB
_MOST_LAYERS = 16
_FORMATS = {"W4": WeightFormat(4, 128), "W8": WeightFormat(8, 0)}


def cases(quick: bool) -> list[Case]:
    """Up and down projection of the MLP, and the output projection of attention."""
    if quick:
        return [_case(TINY, "down", fmt, 16) for fmt in _FORMATS]
    return [
        _case(policy, part, fmt, rows)
        for part in ("down", "up", "o")
        for policy in POLICIES[:3]
        for fmt in _FORMATS
        for rows in ((16, 1, 64) if part == "down" and fmt == "W4" else (16,))
    ]


def _case(policy: PolicyShape, part: str, fmt: str, rows: int) -> Case:
    outputs, inputs = {
        "up": (policy.mlp, policy.hidden),
        "down": (policy.hidden, policy.mlp),
        "o": (policy.hidden, policy.heads * policy.head_dim),
    }[part]
    bits, group = _FORMATS[fmt].bits, _FORMATS[fmt].group or inputs
    of_group = 5 if bits == 4 else 4  # bytes of a scale, and of a zero
    stored = outputs * inputs * bits // 8 + outputs * -(-inputs // group) * of_group
    layers = min(max(_BYTES // stored, 1), _MOST_LAYERS) if policy is not TINY else 1

    def make(rng: np.random.Generator) -> tuple[Array, list[QuantizedWeight], list[Array]]:
        key = jax.random.key(rng.integers(2**31))
        x = jax.random.normal(jax.random.fold_in(key, layers), (layers, rows, inputs), jnp.bfloat16)
        matrices = [
            jax.random.normal(jax.random.fold_in(key, layer), (outputs, inputs), jnp.bfloat16)
            for layer in range(layers)
        ]
        quantize = jax.jit(lambda matrix: rtn(matrix.astype(jnp.float32), _FORMATS[fmt]))
        return x, [quantize(matrix) for matrix in matrices], matrices

    def bfloat16(x: Array, weights: list[QuantizedWeight], matrices: list[Array]) -> list[Array]:
        """Computes the policy's products, with the weights before quantization."""
        del weights
        pairs = zip(x, matrices, strict=True)
        return [jnp.dot(rows, matrix.T, preferred_element_type=jnp.float32) for rows, matrix in pairs]

    def products(
        x: Array, weights: list[QuantizedWeight], matrices: list[Array], implementation: str
    ) -> list[Array]:
        del matrices
        one = jax.jit(quantized_product, static_argnums=2)  # traced and lowered once for all layers
        return [one(*operands, implementation) for operands in zip(x, weights, strict=True)]

    return Case(
        name=f"{policy.name}, {part}, {fmt}, {rows} rows, {layers} layers",
        sizes=(outputs, inputs),
        make=make,
        functions={**by_implementation(products), "bfloat16": bfloat16},
        bytes=layers * (stored + rows * (2 * inputs + 4 * outputs)),
        flops=layers * 2 * rows * outputs * inputs,
    )
