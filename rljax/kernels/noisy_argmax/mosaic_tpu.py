"""For TPUs: eight rows at a time, their vocabulary block by block, with separate lanes until the end.

There are no operations across lanes and no branches: a branch on the contents of a vector would cost more
than the noise that it could save.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from rljax.kernels.noisy_argmax import race
from rljax.numerics.rows import Numerics
from rljax.sampling.distribution import SamplingParams
from rljax.sampling.noise import gumbel_of_words, position_keys, token_words

_LANES = 128
_ROWS = 8
_GROUP = 8 * _LANES  # entries that share one maximum per lane
_BLOCK = 8 * _GROUP


def noisy_argmax(
    logits: Array,
    keys: Array,
    positions: Array,
    sampling: SamplingParams,
    numerics: Numerics,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """See the package's `noisy_argmax`."""
    batch, vocab_size = logits.shape
    least = race.threshold(logits, sampling, numerics)
    group = min(_GROUP, pl.cdiv(vocab_size, _LANES) * _LANES)
    block = min(_BLOCK, pl.cdiv(vocab_size, group) * group)
    if vocab_size < block:
        logits = jnp.pad(logits, ((0, 0), (0, block - vocab_size)), constant_values=-jnp.inf)
    rows = min(_ROWS, batch)
    column = pl.BlockSpec((rows, 1), lambda row, block: (row, 0))
    lanes = pl.BlockSpec((rows, _LANES), lambda row, block: (row, 0))
    partial = jax.ShapeDtypeStruct((batch, _LANES), jnp.float32)
    parts = pl.pallas_call(
        functools.partial(
            _kernel, vocab_size=vocab_size, group=group, sampling=sampling, filtered=least is not None
        ),
        out_shape=[partial, partial.update(dtype=jnp.int32), partial, partial, partial],
        grid=(pl.cdiv(batch, rows), pl.cdiv(vocab_size, block)),
        in_specs=[pl.BlockSpec((rows, block), lambda row, block: (row, block)), column, column, column],
        out_specs=[lanes] * 5,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
    )(
        logits,
        *(key[:, None] for key in position_keys(keys, positions)),
        jnp.zeros((batch, 1)) if least is None else least[:, None],
    )
    tokens, logprobs = race.merge(*parts, vocab_size, numerics)
    return tokens, jnp.zeros_like(logprobs) if sampling.greedy else logprobs


def _kernel(
    logits, key0, key1, least, best, tokens, chosen, tops, sums, *, vocab_size, group, sampling, filtered
) -> None:
    rows, block = logits.shape
    step = pl.program_id(1)

    @pl.when(step == 0)
    def _():
        for ref in (best, chosen, tops):
            ref[...] = jnp.full(ref.shape, -jnp.inf, ref.dtype)
        for ref in (tokens, sums):
            ref[...] = jnp.zeros(ref.shape, ref.dtype)

    lane = lax.broadcasted_iota(jnp.int32, (rows, _LANES), 1)
    key0, key1, least = (jnp.broadcast_to(ref[...], (rows, _LANES)) for ref in (key0, key1, least))

    def take(index, carry):
        best, token, chosen, top, total = carry
        inside = pl.multiple_of(index * group, _LANES)
        first = step * block + inside
        parts = []
        for part in range(group // _LANES):
            entries = first + part * _LANES + lane
            x = logits[:, pl.ds(inside + part * _LANES, _LANES)]
            x = race.scaled(x, sampling)
            if filtered:
                x = jnp.where(x >= least, x, -jnp.inf)
            x = jnp.where(entries < vocab_size, x, -jnp.inf)
            noisy = x
            if not sampling.greedy:
                noisy = x + gumbel_of_words(token_words(entries.astype(jnp.uint32), key0, key1))
            better = noisy > best
            best = jnp.where(better, noisy, best)
            token = jnp.where(better, entries, token)
            chosen = jnp.where(better, x, chosen)
            parts.append(x)
        if not sampling.greedy:
            before, top = top, functools.reduce(jnp.maximum, parts, top)
            away = race.finite_or_zero(top)
            total = total * jnp.exp(before - away)
            for x in parts:
                total += jnp.exp(x - away)
        return best, token, chosen, top, total

    refs = (best, tokens, chosen, tops, sums)
    results = lax.fori_loop(0, block // group, take, tuple(ref[...] for ref in refs))
    for ref, value in zip(refs, results, strict=True):
        ref[...] = value
