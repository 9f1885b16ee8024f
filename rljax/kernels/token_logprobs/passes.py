"""The forward and the backward pass over chunks of the vocabulary, with tiles computed by a device's kernels.

A kernel multiplies hidden states with a chunk of the LM head, and writes only statistics of the products to
memory:

    forward     a token's largest logit in a part of the chunk, sums of e^x and x e^x, its target's logit
    backward    e[n, v] = gradient[n] (1[v = target] - softmax(x)[v]) / temperature, of one chunk

The backward pass then needs two ordinary products, d hidden += e lm_head and d lm_head = e^T hidden, which
the compiler's library does well. So memory does not grow with tokens times vocabulary. (Losses without
materialized logits: Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models", 2024.)
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

from rljax.numerics.kernel_choice import Refused
from rljax.sampling.distribution import SamplingParams

_CHUNK_ENTRIES = 2**26  # tokens times entries of a chunk: errors of 128 MiB
_CHUNK_STEP = 1024
_LARGEST_CHUNK = 8192  # entries; bounds the copy of the LM head in the compute dtype: 64 MiB at d = 4096


@dataclasses.dataclass(frozen=True)
class Device:
    """The kernels of one device, for N tokens and C entries of the vocabulary, multiples of its tiles.

    Attributes:
      statistics: (hidden [N, d], head [C, d], targets int32 [N], scale, width) -> `Statistics` of [T, N].
        Logits are products times `scale`; entries from `width` on are ignored, as are targets outside the
        chunk.
      errors: (hidden, head, targets, log_totals [N], gradients [N], scale, width) -> [N, C] in the dtype of
        `hidden`: gradients (1[v = target] - e^(x - log_totals)) scale, and 0 from `width` on.
      rows, columns: size of a tile in tokens and entries.
    """

    statistics: Callable[..., "Statistics"]
    errors: Callable[..., Array]
    rows: int
    columns: int


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["top", "total", "weighted", "chosen"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class Statistics:
    """Statistics of logits x, float32: the largest, sum e^(x - top), sum (x - top) e^(x - top), and the
    target's logit.
    """

    top: Array
    total: Array
    weighted: Array
    chosen: Array

    @classmethod
    def none(cls, tokens: int) -> "Statistics":
        zero = jnp.zeros(tokens, jnp.float32)
        return cls(jnp.full(tokens, -jnp.inf, jnp.float32), zero, zero, zero)

    def merged(self) -> "Statistics":
        """Merges the parts [T, N] into [N]."""
        top = jnp.max(self.top, axis=0)
        below = jnp.where(self.top == -jnp.inf, 0.0, self.top - top[None])
        share = jnp.where(self.top == -jnp.inf, 0.0, jnp.exp(below))
        return Statistics(
            top=top,
            total=jnp.sum(share * self.total, axis=0),
            weighted=jnp.sum(share * (self.weighted + below * self.total), axis=0),
            chosen=jnp.sum(self.chosen, axis=0),
        )


def refuse_entropy_gradient(requested: bool) -> None:
    """Raises `Refused` if requested: the backward pass covers the log-probabilities only."""
    if requested:
        raise Refused("its entropy has no gradient, which algorithm.entropy_coefficient needs")


def differentiable(
    device: Device, hidden: Array, lm_head: Array, targets: Array, sampling: SamplingParams
) -> tuple[Array, Array]:
    """Computes `token_logprobs` of [R, T] tokens with a device's kernels.

    Raises:
      Refused: sampling has filters, penalties or temperature 0, or the kernels lack the type or width.
    """
    width = hidden.shape[-1]
    if sampling.greedy or sampling.filters(lm_head.shape[0]) or sampling.penalizes:
        raise Refused("it knows temperatures above 0, but neither top-k, top-p, min-p nor penalties")
    if hidden.dtype != jnp.bfloat16:
        raise Refused(f"it multiplies bfloat16, not {hidden.dtype}; see policy.compute_dtype")
    if width % 128:
        raise Refused(f"it takes hidden states whose width is a multiple of 128, not {width}")
    score = _differentiable(device, 1.0 / sampling.temperature)
    logprobs, entropies = score(hidden.reshape(-1, width), lm_head, targets.reshape(-1))
    return logprobs.reshape(targets.shape), lax.stop_gradient(entropies).reshape(targets.shape)


@functools.cache
def _differentiable(device: Device, scale: float) -> Callable[..., tuple[Array, Array]]:
    @jax.custom_vjp
    def score(hidden, lm_head, targets):
        return forward(hidden, lm_head, targets)[0]

    def forward(hidden, lm_head, targets):
        count = len(targets)
        rows, padded_targets = _padded(device, hidden, targets)

        def add(statistics: Statistics, head: Array, start: Array | int, width: int) -> Statistics:
            part = device.statistics(rows, head, padded_targets - start, scale, width).merged()
            return jax.tree.map(lambda *parts: jnp.stack(parts), statistics, part).merged()

        statistics = _over_chunks(device, len(rows), lm_head, rows.dtype, add, Statistics.none(len(rows)))
        log_total = jnp.log(statistics.total)
        normalizer = statistics.top + log_total
        outputs = statistics.chosen - normalizer, log_total - statistics.weighted / statistics.total
        return tuple(output[:count] for output in outputs), (hidden, lm_head, targets, normalizer)

    def backward(kept, gradients):
        hidden, lm_head, targets, normalizer = kept
        rows, padded_targets = _padded(device, hidden, targets)
        gradient = jnp.pad(gradients[0], (0, len(rows) - len(targets)))

        def add(gradients, head: Array, start: Array | int, width: int):
            d_hidden, d_head = gradients
            errors = device.errors(rows, head, padded_targets - start, normalizer, gradient, scale, width)
            d_hidden += _product(errors, head, 1, 0)
            head_part = _product(errors, rows, 0, 0)[:width]
            return d_hidden, lax.dynamic_update_slice(d_head, head_part, (start, 0))

        zeros = jnp.zeros(rows.shape, jnp.float32), jnp.zeros(lm_head.shape, jnp.float32)
        d_hidden, d_head = _over_chunks(device, len(rows), lm_head, rows.dtype, add, zeros)
        return d_hidden[: len(targets)].astype(hidden.dtype), d_head.astype(lm_head.dtype), None

    score.defvjp(forward, backward)
    return score


def _product(a: Array, b: Array, a_axis: int, b_axis: int) -> Array:
    """Returns the product of matrices over these axes, summed in float32."""
    return lax.dot_general(a, b, (((a_axis,), (b_axis,)), ((), ())), preferred_element_type=jnp.float32)


def _padded(device: Device, hidden: Array, targets: Array) -> tuple[Array, Array]:
    """Pads tokens to a multiple of the device's tiles; the padding has no target."""
    more = -len(targets) % device.rows
    return jnp.pad(hidden, ((0, more), (0, 0))), jnp.pad(targets, (0, more), constant_values=-1)


def _over_chunks(device: Device, tokens: int, lm_head: Array, dtype: jnp.dtype, add, carry):
    """Runs `carry = add(carry, head, start, width)` over the vocabulary, with a chunk of the LM head, its
    start, and its number of valid rows. The last chunk may be shorter, and is padded to the device's tiles.
    """
    vocab_size = lm_head.shape[0]
    step = max(_CHUNK_STEP, device.columns)
    size = min(max(_CHUNK_ENTRIES // tokens // step, 1) * step, _LARGEST_CHUNK)
    whole = vocab_size // size

    def add_chunk(index, carry):
        head = lax.dynamic_slice_in_dim(lm_head, index * size, size).astype(dtype)
        return add(carry, head, index * size, size)

    carry = lax.fori_loop(0, whole, add_chunk, carry) if whole else carry
    left = vocab_size - whole * size
    if left:
        head = jnp.pad(lm_head[whole * size :].astype(dtype), ((0, -left % device.columns), (0, 0)))
        carry = add(carry, head, whole * size, left)
    return carry
