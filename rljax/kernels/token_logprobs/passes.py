"""The forward and the backward pass, of which a device computes the tiles.

The vocabulary is taken a chunk at a time; a kernel multiplies hidden states with a chunk of the LM head, and
what leaves the chip are statistics of the products, not the products:

    forward     a token's largest logit in a part of the chunk, sums of e^x and x e^x, its target's logit
    backward    e[n, v] = gradient[n] (1[v = target] - softmax(x)[v]) / temperature, of one chunk

The backward pass then needs two ordinary products, d hidden += e lm_head and d lm_head = e^T hidden, which
the compiler's library does well. So memory does not grow with tokens times vocabulary.
(That the logits need not exist: Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models", 2024.)
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
_LARGEST_CHUNK = 8192  # entries whose part of the LM head is copied in the compute dtype: 64 MiB at d = 4096


@dataclasses.dataclass(frozen=True)
class Device:
    """The kernels of one device, over N tokens and C entries of the vocabulary, multiples of its tiles.

    Attributes:
      statistics: (hidden [N, d], head [C, d], targets int32 [N], scale, width) -> `Statistics` of [T, N].
        Logits are products times `scale`; entries from `width` on do not count; a target that is not in the
        chunk counts nowhere.
      errors: (hidden, head, targets, log_totals [N], gradients [N], scale, width) -> [N, C] in the dtype of
        `hidden`: gradients (1[v = target] - e^(x - log_totals)) scale, and 0 from `width` on.
      rows, columns: size of a tile.
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
    """Reduces logits x, float32, to the largest, sum e^(x - top), sum (x - top) e^(x - top), and the
    target's.
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


def refuse_entropy_gradient(wanted: bool) -> None:
    """Raises Refused: the backward pass is of the log-probabilities alone."""
    if wanted:
        raise Refused("its entropy has no gradient, which algorithm.entropy_coefficient needs")


def differentiable(
    device: Device, hidden: Array, lm_head: Array, targets: Array, sampling: SamplingParams
) -> tuple[Array, Array]:
    """`token_logprobs` of [R, T] tokens by a device's kernels.

    Raises:
      Refused: for filters, temperature 0, or other types and widths than the kernels have.
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
        rows, wanted = _padded(device, hidden, targets)

        def more(found: Statistics, head: Array, start: Array | int, width: int) -> Statistics:
            part = device.statistics(rows, head, wanted - start, scale, width).merged()
            return jax.tree.map(lambda *both: jnp.stack(both), found, part).merged()

        found = _over_chunks(device, len(rows), lm_head, rows.dtype, more, Statistics.none(len(rows)))
        log_total = jnp.log(found.total)
        normalizer = found.top + log_total
        outputs = found.chosen - normalizer, log_total - found.weighted / found.total
        return tuple(each[:count] for each in outputs), (hidden, lm_head, targets, normalizer)

    def backward(kept, gradients):
        hidden, lm_head, targets, normalizer = kept
        rows, wanted = _padded(device, hidden, targets)
        gradient = jnp.pad(gradients[0], (0, len(rows) - len(targets)))

        def more(found, head: Array, start: Array | int, width: int):
            d_hidden, d_head = found
            errors = device.errors(rows, head, wanted - start, normalizer, gradient, scale, width)
            d_hidden += _product(errors, head, 1, 0)
            own = _product(errors, rows, 0, 0)[:width]
            return d_hidden, lax.dynamic_update_slice(d_head, own, (start, 0))

        nothing = jnp.zeros(rows.shape, jnp.float32), jnp.zeros(lm_head.shape, jnp.float32)
        d_hidden, d_head = _over_chunks(device, len(rows), lm_head, rows.dtype, more, nothing)
        return d_hidden[: len(targets)].astype(hidden.dtype), d_head.astype(lm_head.dtype), None

    score.defvjp(forward, backward)
    return score


def _product(a: Array, b: Array, a_axis: int, b_axis: int) -> Array:
    """Returns the product of matrices over these axes, summed in float32."""
    return lax.dot_general(a, b, (((a_axis,), (b_axis,)), ((), ())), preferred_element_type=jnp.float32)


def _padded(device: Device, hidden: Array, targets: Array) -> tuple[Array, Array]:
    """Tokens up to a multiple of the device's tiles; those added have no target."""
    more = -len(targets) % device.rows
    return jnp.pad(hidden, ((0, more), (0, 0))), jnp.pad(targets, (0, more), constant_values=-1)


def _over_chunks(device: Device, tokens: int, lm_head: Array, dtype: jnp.dtype, more, found):
    """`found = more(found, head, start, width)` over the vocabulary: a chunk of the LM head, where it starts,
    and how many of its rows count. The last one may be shorter, and is padded to the device's tiles.
    """
    vocab_size = lm_head.shape[0]
    step = max(_CHUNK_STEP, device.columns)
    size = min(max(_CHUNK_ENTRIES // tokens // step, 1) * step, _LARGEST_CHUNK)
    whole = vocab_size // size

    def one(index, found):
        head = lax.dynamic_slice_in_dim(lm_head, index * size, size).astype(dtype)
        return more(found, head, index * size, size)

    found = lax.fori_loop(0, whole, one, found) if whole else found
    left = vocab_size - whole * size
    if left:
        head = jnp.pad(lm_head[whole * size :].astype(dtype), ((0, -left % device.columns), (0, 0)))
        found = more(found, head, whole * size, left)
    return found
