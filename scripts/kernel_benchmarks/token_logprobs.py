"""Log-probabilities in training: a micro-batch scored, and with the gradient."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kernel_benchmarks.case import POLICIES, TINY, Case, PolicyShape, by_implementation
from rljax.kernels.token_logprobs import token_logprobs
from rljax.numerics.rows import Numerics
from rljax.sampling.distribution import SamplingParams

_SAMPLING = SamplingParams()
_NUMERICS = Numerics(compute_dtype="bfloat16")
_CHUNK = 1024  # the config's default


def cases(quick: bool) -> list[Case]:
    """Policies and tokens; with `gradient` forward and backward pass in one call."""
    if quick:
        return [_case(TINY, 64, gradient=gradient) for gradient in (False, True)]
    return [
        _case(policy, tokens, gradient)
        for tokens in (4096, 16_384)
        for policy in POLICIES
        for gradient in (False, True)
    ]


def _case(policy: PolicyShape, tokens: int, gradient: bool) -> Case:
    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        keys = jax.random.split(jax.random.key(int(rng.integers(2**31))))
        hidden = jax.random.normal(keys[0], (1, tokens, policy.hidden), jnp.bfloat16)
        lm_head = 0.02 * jax.random.normal(keys[1], (policy.vocab, policy.hidden), jnp.bfloat16)
        targets = rng.integers(0, policy.vocab, (1, tokens), np.int32)
        return hidden, lm_head, jnp.asarray(targets)

    def score(*args: Array, implementation: str) -> tuple[Array, Array]:
        return token_logprobs(*args, _SAMPLING, _NUMERICS, _CHUNK, implementation=implementation)

    def gradients(*args: Array, implementation: str) -> tuple[Array, ...]:
        return jax.grad(lambda *args: jnp.sum(score(*args, implementation=implementation)[0]), (0, 1))(*args)

    product = 2 * tokens * policy.vocab * policy.hidden
    head = policy.vocab * policy.hidden * 2
    states = tokens * policy.hidden * 2
    return Case(
        name=f"{policy.name}, {tokens} tokens, {'with gradient' if gradient else 'scored'}",
        sizes=(policy.vocab, policy.hidden),
        make=make,
        functions=by_implementation(gradients if gradient else score),
        # Scoring reads both matrices; the backward pass reads and writes them.
        bytes=(head + states) * (3 if gradient else 1),
        # Logits; and in the backward pass logits again, and two products.
        flops=product * (4 if gradient else 1),
    )
