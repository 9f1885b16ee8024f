"""Rounding to nearest: projections of real policies, to 4 bits in groups of 128 and to 8 by whole rows."""

import jax
import numpy as np
from jax import Array
from jax import numpy as jnp

from kernel_benchmarks.case import POLICIES, TINY, Case, PolicyShape, by_implementation
from rljax.kernels.round_to_nearest import round_to_nearest

_FORMATS = {"W4": (4, 128), "W8": (8, 0)}  # bits, group


def cases(quick: bool) -> list[Case]:
    """Down and up projection of the MLP, and the output projection of attention."""
    if quick:
        return [_case(TINY, "down", fmt) for fmt in _FORMATS]
    return [
        _case(policy, part, fmt) for part in ("down", "up", "o") for policy in POLICIES for fmt in _FORMATS
    ]


def _case(policy: PolicyShape, part: str, fmt: str) -> Case:
    outputs, inputs = {
        "up": (policy.mlp, policy.hidden),
        "down": (policy.hidden, policy.mlp),
        "o": (policy.hidden, policy.heads * policy.head_dim),
    }[part]
    bits, group = _FORMATS[fmt]
    of_group = 5 if bits == 4 else 4  # bytes of a scale, and of a zero
    stored = outputs * inputs * bits // 8 + outputs * -(-inputs // (group or inputs)) * of_group

    def make(rng: np.random.Generator) -> tuple[Array]:
        key = jax.random.key(int(rng.integers(2**31)))
        return (jax.random.normal(key, (outputs, inputs), jnp.bfloat16),)

    def rounded(weight: Array, implementation: str) -> tuple[Array, Array, Array | None]:
        return round_to_nearest(weight, bits, group, implementation)

    return Case(
        name=f"{policy.name}, {part}, {fmt}",
        sizes=(outputs, inputs),
        make=make,
        functions=by_implementation(rounded),
        bytes=2 * outputs * inputs + stored,
        flops=0,
    )
