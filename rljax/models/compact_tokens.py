"""A forward pass over some of the tokens of packed rows, each computed once.

The responses of a group share a prompt. Packed rows hold a copy of it before every bundle of responses that
lie side by side, which attention needs: chunks of keys then end where the decoder's end. Everything else
(norms, projections, MLP, LM head) depends on the token and its prefix alone, so it is computed for the first
copy and read by all of them. Padding is not computed, either.

Gathers between the two layouts have backward passes of their own. Autodiff would write each as a scatter,
which a CPU executes row by row.
"""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from rljax.models.packed_attention import PackedAttention
from rljax.numerics.rows import Numerics

COPY_BLOCK = 64
"""Largest number of tokens in an entry of `CompactTokens.copies`."""


@flax.struct.dataclass
class CompactTokens:
    """The M tokens to compute of R packed rows of T positions.

    Compact tokens are ordered: first those whose logits are needed, then the others, both in the order of
    their positions, then padding. Packed positions are counted over all rows, from 0 to R * T - 1.

    Attributes:
      scored: int32 [L], packed positions of the first L compact tokens, whose logits are computed.
      others: int32 [M - L], packed positions of the rest.
      source: int32 [R, T], compact token that holds each packed position; 0 for padding.
      computed: bool [R, T], whether a position is the one from which its compact token is computed: True
        except for padding and for the copies of prompts after the first.
      bundles: int32 [R, T], ids of the responses that are placed side by side after one copy of their prompt,
        with that prompt; contiguous. 0 is padding.
      branches: int32 [R, T], ids of responses, each with the last token of its prompt; 0 for the tokens of a
        prompt that all responses of a bundle read.
      copies: int32 [C, 3], runs of at most `COPY_BLOCK` copied positions: the first packed position, its
        compact token, the number of positions.
      counts: int32 [3], numbers of tokens whose logits are needed, of tokens, and of entries in `copies`.
    """

    scored: Array | np.ndarray
    others: Array | np.ndarray
    source: Array | np.ndarray
    computed: Array | np.ndarray
    bundles: Array | np.ndarray
    branches: Array | np.ndarray
    copies: Array | np.ndarray
    counts: Array | np.ndarray

    @property
    def size(self) -> int:
        """Number of compact tokens, M, padding included."""
        return len(self.scored) + len(self.others)

    def collect(self, values: Array) -> Array:
        """Gathers integers of packed positions [R, T] for the compact tokens: [1, M]."""
        return jnp.asarray(values).reshape(-1)[_positions(self)][None]


@dataclasses.dataclass(frozen=True)
class CompactAttention:
    """`PackedAttention` for compact tokens: the same bits, without the queries of copies.

    Attributes:
      tokens: the compact tokens of R packed rows of T.
      span: see `PackedAttention`.
    """

    tokens: CompactTokens
    numerics: Numerics
    span: int | None = None

    def __call__(self, cache: None, q: Array, k: Array, v: Array) -> tuple[Array, None]:
        """Maps q [1, M, H, D], k and v [1, M, Hk, D] to ([1, M, H, D], None)."""
        tokens = jax.tree.map(jnp.asarray, self.tokens)
        attention = PackedAttention(
            tokens.bundles,
            self.numerics,
            span=self.span,
            computed=tokens.computed,
            branches=tokens.branches,
        )
        queries = _spread_queries(q[0], self.tokens)
        out, _ = attention(cache, queries, spread(k[0], self.tokens), spread(v[0], self.tokens))
        return _collect_outputs(out, self.tokens)[None], None


@jax.custom_vjp
def spread(values: Array, tokens: CompactTokens) -> Array:
    """Lays values of compact tokens [M, ...] out in the packed rows, [R, T, ...]. Padding has any values.

    The gradient of a compact token is the sum over its copies, added in float32.
    """
    return _take(values, tokens.source)


def _spread_backward(tokens: CompactTokens, gradient: Array) -> tuple[Array, None]:
    shape = gradient.shape[2:]
    pad_after = ((0, COPY_BLOCK), (0, 0))  # a run of copies is read and written as a whole block
    flat = gradient.reshape(tokens.source.size, -1)
    sums = jnp.pad(_collected(flat, tokens).astype(jnp.float32), pad_after)
    flat = jnp.pad(flat, pad_after)
    number = jnp.arange(COPY_BLOCK)[:, None]

    def add_copies(index: Array, sums: Array) -> Array:
        position, token, count = jnp.asarray(tokens.copies)[index]
        more = jnp.where(number < count, lax.dynamic_slice_in_dim(flat, position, COPY_BLOCK), 0.0)
        more = more.astype(jnp.float32)
        sum_so_far = lax.dynamic_slice_in_dim(sums, token, COPY_BLOCK)
        return lax.dynamic_update_slice_in_dim(sums, sum_so_far + more, token, 0)

    sums = lax.fori_loop(0, tokens.counts[2], add_copies, sums)
    return sums[: tokens.size].astype(gradient.dtype).reshape(-1, *shape), None


spread.defvjp(lambda values, tokens: (spread(values, tokens), tokens), _spread_backward)


@jax.custom_vjp
def _spread_queries(queries: Array, tokens: CompactTokens) -> Array:
    """As `spread`, for queries: those of copies have no gradient, since their outputs are not read."""
    return _take(queries, tokens.source)


_spread_queries.defvjp(
    lambda queries, tokens: (_spread_queries(queries, tokens), tokens),
    lambda tokens, gradient: (_collected(gradient.reshape(-1, *gradient.shape[2:]), tokens), None),
)


@jax.custom_vjp
def _collect_outputs(outputs: Array, tokens: CompactTokens) -> Array:
    """Gathers values of packed rows [R, T, ...] for the compact tokens, [M, ...]."""
    return _take(outputs.reshape(-1, *outputs.shape[2:]), _positions(tokens))


def _collect_outputs_backward(tokens: CompactTokens, gradient: Array) -> tuple[Array, None]:
    computed = jnp.asarray(tokens.computed).reshape(*tokens.computed.shape, *[1] * (gradient.ndim - 1))
    return jnp.where(computed, _take(gradient, tokens.source), 0), None


_collect_outputs.defvjp(
    lambda outputs, tokens: (_collect_outputs(outputs, tokens), tokens), _collect_outputs_backward
)


@jax.custom_vjp
def spread_scores(scores: Array, tokens: CompactTokens) -> Array:
    """Lays scores of the tokens with logits [L] out in the packed rows, [R, T], and 0 elsewhere."""
    scored = jnp.asarray(tokens.computed) & (tokens.source < tokens.counts[0])
    return jnp.where(scored, _take(scores, jnp.minimum(tokens.source, len(scores) - 1)), 0.0)


def _spread_scores_backward(tokens: CompactTokens, gradient: Array) -> tuple[Array, None]:
    valid = np.arange(len(tokens.scored), dtype=np.int32) < tokens.counts[0]
    return jnp.where(valid, _take(gradient.reshape(-1), tokens.scored), 0.0), None


spread_scores.defvjp(lambda scores, tokens: (spread_scores(scores, tokens), tokens), _spread_scores_backward)


def _positions(tokens: CompactTokens) -> Array:
    """Returns the packed position of every compact token, int32 [M]."""
    return jnp.concatenate([jnp.asarray(tokens.scored), jnp.asarray(tokens.others)])


def _collected(values: Array, tokens: CompactTokens) -> Array:
    """Gathers values of packed positions [R * T, ...] for the compact tokens, and 0 for their padding."""
    valid = np.arange(tokens.size, dtype=np.int32) < tokens.counts[1]
    return jnp.where(valid.reshape(-1, *[1] * (values.ndim - 1)), _take(values, _positions(tokens)), 0)


def _take(values: Array, indices: Any) -> Array:
    return values.at[jnp.asarray(indices)].get(mode="promise_in_bounds")
