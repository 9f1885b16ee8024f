"""The forward and the backward pass over chunks of the vocabulary, with tiles computed by a device's kernels.

A kernel multiplies hidden states with a chunk of the LM head, and writes only statistics of the products to
memory:

    forward     a token's largest logit in a part of the chunk, sums of e^x and x e^x, its target's logit
    backward    e[n, v] = gradient[n] (1[v = target] - softmax(x)[v]) / temperature, of one chunk

The backward pass then needs two ordinary products, d hidden += e lm_head and d lm_head = e^T hidden, which
the compiler's library does well. So memory does not grow with tokens times vocabulary. (Losses without
materialized logits: Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models", 2024.)

On a mesh, every device does this for its rows of tokens and its part of the vocabulary. The forward pass then
merges the four statistics of each token over the parts, as it does those of chunks; the backward pass adds
d hidden over the parts, and d lm_head over the rows.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, PartitionSpec

from rljax.numerics.kernel_choice import Refused
from rljax.sampling.distribution import SamplingParams
from rljax.sharding import MESH_AXES, row_multiple

_CHUNK_ENTRIES = 2**26  # tokens times entries of a chunk: errors of 128 MiB
_CHUNK_STEP = 1024
_WIDTHS = 64  # of hidden states: multiples of a step of Hopper's kernel
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


@dataclasses.dataclass(frozen=True)
class _Split:
    """How devices share tokens and vocabulary.

    Attributes:
      rows: mesh axes that split the rows of tokens, possibly none.
      vocab: the mesh axis that splits the vocabulary; None where every device has all of it.
    """

    mesh: Mesh
    rows: tuple[str, ...]
    vocab: str | None

    @classmethod
    def of(cls, mesh: Mesh, rows: int, vocab_size: int) -> "_Split":
        """Splits what the devices of `mesh` divide."""
        vocab = MESH_AXES["vocab"]
        return cls(
            mesh,
            MESH_AXES["batch"] if rows % row_multiple(mesh) == 0 else (),
            vocab if vocab_size % mesh.shape[vocab] == 0 else None,
        )

    def over(self, compute: Callable[..., Any], arguments: str, results: str) -> Callable[..., Any]:
        """Returns `compute` on the shards of arrays: t(okens) [R, T, ...] or v(ocabulary) [V, d]."""
        specs = {"t": PartitionSpec(self.rows or None), "v": PartitionSpec(self.vocab)}
        return jax.shard_map(
            compute,
            mesh=self.mesh,
            in_specs=tuple(specs[letter] for letter in arguments),
            out_specs=tuple(specs[letter] for letter in results),
            check_vma=False,
        )


def differentiable(
    device: Device,
    hidden: Array,
    lm_head: Array,
    targets: Array,
    sampling: SamplingParams,
    used_rows: int,
    mesh: Mesh | None = None,
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
    if width % _WIDTHS:
        raise Refused(f"it takes hidden states whose width is a multiple of {_WIDTHS}, not {width}")
    split = None if mesh is None else _Split.of(mesh, len(targets), len(lm_head))
    padding = len(lm_head) - used_rows
    if split is not None and split.vocab is not None and padding * mesh.shape[split.vocab] >= len(lm_head):
        raise Refused(f"{padding} padding rows are all of the vocabulary that one device has")
    score = _differentiable(device, 1.0 / sampling.temperature, padding, split)
    logprobs, entropies = score(hidden, lm_head, targets)
    return logprobs, lax.stop_gradient(entropies)


@functools.cache
def _differentiable(
    device: Device, scale: float, padding: int, split: _Split | None
) -> Callable[..., tuple[Array, Array]]:
    def first_entry(lm_head: Array) -> Array | int:
        """Returns the first entry of the vocabulary in this device's part of the LM head."""
        if split is None or split.vocab is None:
            return 0
        return lax.axis_index(split.vocab) * len(lm_head)

    def over_chunks(tokens: int, lm_head: Array, *args: Any) -> Any:
        """`_over_chunks` without the padding, which is at the end of the last device's part."""

        def over(used_rows: int) -> Any:
            return _over_chunks(device, tokens, lm_head, used_rows, *args)

        rows = len(lm_head)
        if not padding or split is None or split.vocab is None:
            return over(rows - padding)
        last = lax.axis_index(split.vocab) == split.mesh.shape[split.vocab] - 1
        return lax.cond(last, lambda: over(rows - padding), lambda: over(rows))

    def score_shard(hidden: Array, lm_head: Array, targets: Array) -> tuple[Array, Array, Array]:
        """Returns logprobs, entropies and normalizers [R, T]."""
        rows, padded_targets = _padded(device, hidden, targets - first_entry(lm_head))

        def add(statistics: Statistics, head: Array, start: Array | int, width: int) -> Statistics:
            part = device.statistics(rows, head, padded_targets - start, scale, width).merged()
            return jax.tree.map(lambda *parts: jnp.stack(parts), statistics, part).merged()

        statistics = over_chunks(len(rows), lm_head, rows.dtype, add, Statistics.none(len(rows)))
        if split is not None and split.vocab is not None:
            statistics = jax.tree.map(lambda x: lax.all_gather(x, split.vocab), statistics).merged()
        log_total = jnp.log(statistics.total)
        normalizer = statistics.top + log_total
        outputs = (
            statistics.chosen - normalizer,
            log_total - statistics.weighted / statistics.total,
            normalizer,
        )
        return tuple(output[: targets.size].reshape(targets.shape) for output in outputs)

    def gradients_of_shard(
        hidden: Array, lm_head: Array, targets: Array, normalizer: Array, gradient: Array
    ) -> tuple[Array, Array]:
        """Returns gradients of `hidden` and `lm_head`, from those of the logprobs [R, T]."""
        rows, padded_targets = _padded(device, hidden, targets - first_entry(lm_head))
        more = (0, len(rows) - targets.size)
        normalizer, gradient = (jnp.pad(x.reshape(-1), more) for x in (normalizer, gradient))

        def add(gradients, head: Array, start: Array | int, width: int):
            d_hidden, d_head = gradients
            errors = device.errors(rows, head, padded_targets - start, normalizer, gradient, scale, width)
            d_hidden += _product(errors, head, 1, 0)
            head_part = _product(errors, rows, 0, 0)[:width]
            return d_hidden, lax.dynamic_update_slice(d_head, head_part, (start, 0))

        zeros = jnp.zeros(rows.shape, jnp.float32), jnp.zeros(lm_head.shape, jnp.float32)
        d_hidden, d_head = over_chunks(len(rows), lm_head, rows.dtype, add, zeros)
        if split is not None and split.vocab is not None:
            d_hidden = lax.psum(d_hidden, split.vocab)
        if split is not None and split.rows:
            d_head = lax.psum(d_head, split.rows)
        d_hidden = d_hidden[: targets.size].reshape(hidden.shape)
        return d_hidden.astype(hidden.dtype), d_head.astype(lm_head.dtype)

    score_all, gradients_of_all = score_shard, gradients_of_shard
    if split is not None:
        score_all = split.over(score_shard, "tvt", "ttt")
        gradients_of_all = split.over(gradients_of_shard, "tvttt", "tv")

    @jax.custom_vjp
    def score(hidden, lm_head, targets):
        return score_all(hidden, lm_head, targets)[:2]

    def forward(hidden, lm_head, targets):
        *outputs, normalizer = score_all(hidden, lm_head, targets)
        return tuple(outputs), (hidden, lm_head, targets, normalizer)

    def backward(kept, gradients):
        return *gradients_of_all(*kept, gradients[0]), None

    score.defvjp(forward, backward)
    return score


def _product(a: Array, b: Array, a_axis: int, b_axis: int) -> Array:
    """Returns the product of matrices over these axes, summed in float32."""
    return lax.dot_general(a, b, (((a_axis,), (b_axis,)), ((), ())), preferred_element_type=jnp.float32)


def _padded(device: Device, hidden: Array, targets: Array) -> tuple[Array, Array]:
    """Returns tokens [N, d] and targets [N], padded to a multiple of the device's tiles; the padding has no
    target.
    """
    more = -targets.size % device.rows
    rows = jnp.pad(hidden.reshape(-1, hidden.shape[-1]), ((0, more), (0, 0)))
    return rows, jnp.pad(targets.reshape(-1), (0, more), constant_values=-1)


def _over_chunks(device: Device, tokens: int, lm_head: Array, used_rows: int, dtype: jnp.dtype, add, carry):
    """Runs `carry = add(carry, head, start, width)` over the first rows of the LM head, with a chunk of them,
    its start, and its number of valid rows. The last chunk may be shorter, and is padded to the device's
    tiles.
    """
    step = max(_CHUNK_STEP, device.columns)
    size = min(max(_CHUNK_ENTRIES // tokens // step, 1) * step, _LARGEST_CHUNK)
    whole = used_rows // size

    def add_chunk(index, carry):
        head = _cast(lax.dynamic_slice_in_dim(lm_head, index * size, size), dtype)
        return add(carry, head, index * size, size)

    carry = lax.fori_loop(0, whole, add_chunk, carry) if whole else carry
    left = used_rows - whole * size
    if left:
        head = _cast(lm_head[whole * size : used_rows], dtype)
        head = jnp.pad(head, ((0, -left % device.columns), (0, 0)))
        carry = add(carry, head, whole * size, left)
    return carry


def _cast(chunk: Array, dtype: jnp.dtype) -> Array:
    """Casts a part of the LM head. XLA moves a cast that narrows in front of the slice, and so would hold a
    copy of the whole LM head; it leaves a rounding, after which the cast changes nothing, where it is.
    """
    if chunk.dtype == dtype:
        return chunk
    kind = jnp.finfo(dtype)
    return lax.reduce_precision(chunk, kind.nexp, kind.nmant).astype(dtype)
