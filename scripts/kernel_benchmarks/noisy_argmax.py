"""The sampled token: logits of decoding and verification batches."""

import jax
import jax.numpy as jnp
import numpy as np

from kernel_benchmarks.case import POLICIES, TINY, Case, PolicyShape, by_implementation
from rljax.kernels.noisy_argmax import noisy_argmax
from rljax.numerics.rows import Numerics
from rljax.sampling.distribution import SamplingParams

_SAMPLING = SamplingParams()
_NUMERICS = Numerics()


def cases(quick: bool) -> list[Case]:
    """Vocabularies of real policies and rows of a step: slots, times nodes in verification."""
    if quick:
        return [_case(TINY, 16)]
    return [_case(POLICIES[0], rows) for rows in (64, 16, 256, 1, 1024)] + [
        _case(policy, 64) for policy in POLICIES[1:3]
    ]


def _case(policy: PolicyShape, rows: int) -> Case:
    def make(rng: np.random.Generator) -> tuple:
        logits = 2.5 * jax.random.normal(jax.random.key(int(rng.integers(2**31))), (rows, policy.vocab))
        keys = rng.integers(0, 2**32, (rows, 2), np.uint32)
        return logits, jnp.asarray(keys), jnp.arange(rows, dtype=jnp.int32)

    def sampled(*args, implementation):
        return noisy_argmax(*args, _SAMPLING, _NUMERICS, implementation)

    logits_bytes = rows * policy.vocab * 4
    return Case(
        name=f"{policy.name}, {rows} rows",
        sizes=(policy.vocab,),
        make=make,
        functions=by_implementation(sampled),
        bytes=logits_bytes + rows * 24,  # keys and positions, tokens and logprobs
        flops=0,
    )
