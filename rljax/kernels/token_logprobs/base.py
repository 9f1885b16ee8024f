"""The reference in plain JAX: the logits of a chunk of tokens at a time, and again in the backward pass.

The logits of a row of 16k tokens with a vocabulary of 150k are 10 GB in float32, several times the model. So
the LM head is applied to a chunk at a time and recomputed (Chen et al., "Training Deep Nets with Sublinear
Memory Cost", arXiv 1604.06174), where it costs a few per cent.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh

from rljax import target
from rljax.kernels.linear import product
from rljax.numerics.rows import Numerics
from rljax.sampling import distribution as distribution
from rljax.sampling.distribution import (
    Responses,
    SamplingParams,
    entropy,
    penalized_logits,
    transform_logits,
    without_padding,
)
from rljax.sharding import activation_sharding, constrain

_TOKENS = 1024
_MOST_LOGITS = 2**24


def chunk_tokens(asked: int | None, vocab_size: int) -> int:
    """Returns the tokens of a chunk: those asked for; with None `_TOKENS`, on a CPU halved until their logits
    have at most `_MOST_LOGITS` entries. An update holds several arrays of this size at once.
    """
    tokens = asked or _TOKENS
    while asked is None and target.platform() == "cpu" and tokens * vocab_size > _MOST_LOGITS and tokens > 2:
        tokens //= 2
    return tokens


def chunk_columns(rows: int, length: int, chunk: int) -> int:
    """Returns the number of columns of packed rows [rows, length] per chunk of at most `chunk` tokens."""
    chunks = -(-length // max(chunk // rows, -(-2 // rows)))
    return -(-length // chunks)


def token_logprobs(
    hidden: Array,
    lm_head: Array,
    targets: Array,
    sampling: SamplingParams,
    numerics: Numerics,
    chunk: int,
    mesh: Mesh | None,
    responses: Responses | None = None,
    entropy_gradient: bool = False,
    used_rows: int | None = None,
) -> tuple[Array, Array]:
    """See the package's `token_logprobs`. A chunk has at least R tokens, and at least 2: a single row would
    be multiplied by another kernel, with other bits.
    """

    every, vocab_size = targets, len(lm_head)

    def score(hidden: Array, targets: Array, columns: Array) -> tuple[Array, Array]:
        logits = product(hidden, lm_head, numerics)
        if mesh is not None:
            # The vocabulary is not sharded: a chunk of logits is small, and its sums then need no
            # communication.
            logits = constrain(logits, activation_sharding(mesh))
        logits = without_padding(logits, used_rows or vocab_size)
        if sampling.penalizes:
            counts = responses.counts(every, columns, vocab_size)
            logits = penalized_logits(logits, counts, sampling)
        transformed = transform_logits(logits, sampling, numerics)
        logprobs = distribution.token_logprobs(transformed, targets, numerics)
        return logprobs, entropy(transformed, numerics, entropy_gradient)

    rows, length = targets.shape
    # Chunks of columns, not of flattened tokens, so that rows stay on their devices.
    columns = chunk_columns(rows, length, chunk)
    chunks = -(-length // columns)
    if chunks == 1:
        return score(hidden, targets, jnp.arange(length))
    padding = chunks * columns - length

    def split(array: Array) -> Array:
        rest = array.shape[2:]
        array = jnp.pad(array, [(0, 0), (0, padding), *((0, 0) for _ in rest)])
        return array.reshape(rows, chunks, columns, *rest).swapaxes(0, 1)

    parts = (split(hidden), split(targets), jnp.arange(chunks * columns).reshape(chunks, columns))
    scored = lax.map(lambda part: jax.checkpoint(score)(*part), parts)
    logprobs, entropies = (
        array.swapaxes(0, 1).reshape(rows, chunks * columns)[:, :length] for array in scored
    )
    return logprobs, entropies
