"""Tree attention on a TPU: streams the cache past the queries of a slot, one chunk after another.

The grid has slots, key heads and chunks of the cache, in order, and Pallas fetches the next step's chunk
during a step. A chunk that begins after a slot's length is not fetched: its step instead prefetches the first
chunk of the next head or slot. Softmax is online (Milakov and Gimelshein, 2018): the running maximum, sum and
weighted values are in scratch memory. The nodes are one more block of keys, after the last chunk.

A kernel takes its arguments in row-major order, and a cache that XLA stores in another order would be copied.
XLA orders the axes of an array so that tiles of 8 by 128 waste little (seen in compiled programs): keys are
stored as [positions, D] with heads of 128, and values as [D, positions] with heads of 64. The kernel takes
these layouts, so that transposing is free.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from rljax.kernels.compaction import compaction
from rljax.kernels.compaction.base import only_node
from rljax.kernels.tree_attention.rows import pack_nodes, pack_queries, unpack_rows
from rljax.numerics.attention import KEY_BLOCK, MASKED
from rljax.numerics.kernel_choice import Refused
from rljax.numerics.rows import Numerics

_CHUNK = 1024  # positions in a step: enough bytes to hide what a step costs
_LANES = 128  # positions that are multiplied at a time
_FLOOR = 0.5 * MASKED  # of the running maximum, so that masked scores weigh exactly 0 even alone


def tree_attention(
    queries: Array,
    keys: Array,
    values: Array,
    lengths: Array,
    node_keys: Array,
    node_values: Array,
    ancestors: Array,
    depth: Array,
    numerics: Numerics,
    interpret: bool = False,
) -> Array:
    """See the package. Where a node stands changes nothing here."""
    del depth, numerics
    batch, nodes, num_heads, head_dim = queries.shape
    kv_heads, capacity = values.shape[1:3]
    if keys.dtype not in (jnp.float32, jnp.bfloat16):
        raise Refused(f"keys and values are float32 or bfloat16, not {keys.dtype}")
    if head_dim % 8:
        raise Refused(f"heads are multiples of 8 wide, not {head_dim}")
    if capacity % _LANES:  # only the shortest caches
        more = [(0, 0), (0, 0), (0, 1)]
        keys, values = (
            jnp.pad(keys, [*more, (0, 0), (0, 0)]),
            jnp.pad(values, [*more[:2], (0, KEY_BLOCK), (0, 0)]),
        )
        capacity += KEY_BLOCK
    chunk = min(_CHUNK, capacity)
    chunks = pl.cdiv(capacity, chunk)

    rows = pack_queries(queries.astype(keys.dtype), kv_heads, multiple=16)  # [B, Hk, R, D]
    num_rows = rows.shape[2]
    tree_keys, tree_values = pack_nodes(node_keys, node_values)  # [B, Hk, D, L], [B, Hk, L, D]
    visible = jnp.pad(ancestors.astype(jnp.int32), [(0, 0), (0, 0), (0, KEY_BLOCK - nodes)])
    visible = jnp.tile(visible, (1, num_heads // kv_heads, 1))
    visible = jnp.pad(visible, [(0, 0), (0, num_rows - visible.shape[1]), (0, 0)])  # [B, R, L]

    def next_fetch(*step):
        return fetched(*step, chunk, kv_heads)

    def chunk_rows(*step):
        return *next_fetch(*step), 0

    def chunk_blocks(*step):
        return *next_fetch(*step), 0, 0

    def chunk_columns(*step):
        slot, head, index = next_fetch(*step)
        return slot, head, 0, index

    def of_head(slot, head, step, lengths):
        return slot, head, 0, 0

    def of_slot(slot, head, step, lengths):
        return slot, 0, 0

    wide = head_dim % _LANES == 0
    if wide:
        keys = keys.swapaxes(-1, -2).reshape(values.shape)
        cache_specs = [pl.BlockSpec((1, 1, chunk, head_dim), chunk_rows)] * 2
    else:
        values = values.swapaxes(-1, -2)
        cache_specs = [
            pl.BlockSpec((1, 1, chunk // KEY_BLOCK, head_dim, KEY_BLOCK), chunk_blocks),
            pl.BlockSpec((1, 1, head_dim, chunk), chunk_columns),
        ]
    out = pl.pallas_call(
        functools.partial(_attend, chunk=chunk, chunks=chunks, wide=wide),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, kv_heads, chunks),
            in_specs=[
                pl.BlockSpec((1, 1, num_rows, head_dim), of_head),
                *cache_specs,
                pl.BlockSpec((1, 1, head_dim, KEY_BLOCK), of_head),
                pl.BlockSpec((1, 1, KEY_BLOCK, head_dim), of_head),
                pl.BlockSpec((1, num_rows, KEY_BLOCK), of_slot),
            ],
            out_specs=pl.BlockSpec((1, 1, num_rows, head_dim), of_head),
            scratch_shapes=[
                pltpu.VMEM((chunk // _LANES, num_rows, _LANES), jnp.float32),
                pltpu.VMEM((num_rows, 1), jnp.float32),
                pltpu.VMEM((num_rows, 1), jnp.float32),
                pltpu.VMEM((num_rows, head_dim), jnp.float32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(rows.shape, queries.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",) * 3),
        name="tree_attention",
        interpret=interpret,
    )(lengths, rows, keys, values, tree_keys, tree_values, visible)
    return unpack_rows(out, nodes, num_heads)


def decode_attention(
    queries: Array,
    keys: Array,
    values: Array,
    positions: Array,
    node_keys: Array,
    node_values: Array,
    numerics: Numerics,
    interpret: bool = False,
) -> tuple[Array, Array, Array]:
    """See the package."""
    # XLA for heads of other widths, and for the shortest caches.
    writers = ("interpret_tpu" if interpret else "mosaic_tpu", "xla")
    token = node_keys, node_values, *only_node(positions)
    keys, values = compaction(keys, values, *token, positions, writers)
    itself, depth = jnp.ones((len(queries), 1, 1), bool), jnp.zeros((len(queries), 1), jnp.int32)
    tree = queries, keys, values, positions, node_keys, node_values, itself, depth
    return tree_attention(*tree, numerics, interpret), keys, values


def fetched(
    slot: Array, head: Array, step: Array, lengths: Array, chunk: int, kv_heads: int
) -> tuple[Array, Array, Array]:
    """Returns slot, head and chunk of the cache that a grid step fetches, all int32 []; lengths [B]."""
    in_use = step * chunk < jnp.maximum(lengths[slot], 1)
    last_head = head == kv_heads - 1
    next_slot = jnp.minimum(jnp.where(last_head, slot + 1, slot), lengths.shape[0] - 1)
    next_head = jnp.where(last_head, 0, head + 1)
    now, soon = (slot, head, step), (next_slot, next_head, 0)
    return tuple(jnp.where(in_use, one, other) for one, other in zip(now, soon, strict=True))


def _attend(
    lengths,
    queries,
    keys,
    values,
    tree_keys,
    tree_values,
    visible,
    out,
    scores,
    top,
    total,
    weighted,
    *,
    chunk: int,
    chunks: int,
    wide: bool,
) -> None:
    """Processes one chunk of one slot's cache, and after the last one its nodes.

    Refs: lengths [B]; queries [1, 1, R, D]; the chunk's keys and values, [1, 1, C, D] both where heads are
    `wide`, else [1, 1, C / L, D, L] and [1, 1, D, C]; the nodes' tree_keys [1, 1, D, L], tree_values
    [1, 1, L, D] and visible [1, R, L]; out [1, 1, R, D]; scratch: scores [C / 128, R, 128], top and total
    [R, 1], weighted [R, D].
    """
    step = pl.program_id(2)
    begin = step * chunk
    here = lengths[pl.program_id(0)] - begin  # committed positions from the start of the chunk on
    used = jnp.clip(pl.cdiv(here, _LANES), 0, chunk // _LANES)
    scale = queries.shape[-1] ** -0.5

    @pl.when(step == 0)
    def _():
        top[...] = jnp.full(top.shape, _FLOOR, jnp.float32)
        total[...] = jnp.zeros(total.shape, jnp.float32)
        weighted[...] = jnp.zeros(weighted.shape, jnp.float32)

    def rescale(largest):
        """Returns the new maximum, and scales the sums under the old one down."""
        new_top = jnp.maximum(top[...], largest)
        shrink = jnp.exp(top[...] - new_top)
        top[...] = new_top
        total[...] = total[...] * shrink
        weighted[...] = weighted[...] * shrink
        return new_top

    def add(its_scores, its_values, new_top, transposed):
        terms = jnp.exp(its_scores - new_top)
        total[...] += jnp.sum(terms, axis=-1, keepdims=True)
        weighted[...] += _product(terms.astype(its_values.dtype), its_values, transposed)

    def fill_scores(group):
        """Returns scores of 128 positions."""
        if wide:
            positions = pl.ds(pl.multiple_of(group * _LANES, _LANES), _LANES)
            scores[group] = _product(queries[0, 0], keys[0, 0, positions], True) * scale
        else:
            for block in range(_LANES // KEY_BLOCK):
                block_keys = keys[0, 0, group * (_LANES // KEY_BLOCK) + block]
                lanes = pl.ds(block * KEY_BLOCK, KEY_BLOCK)
                scores[group, :, lanes] = _product(queries[0, 0], block_keys, False) * scale

    def read_values(group):
        """Returns values of 128 positions, zeros after the length: [128, D] for wide heads, else [D, 128]."""
        positions = pl.ds(pl.multiple_of(group * _LANES, _LANES), _LANES)
        its_values = values[0, 0, positions] if wide else values[0, 0, :, positions]
        position = group * _LANES + lax.broadcasted_iota(jnp.int32, its_values.shape, 0 if wide else 1)
        return jnp.where(position < here, its_values, jnp.zeros_like(its_values))

    @pl.when(used > 0)
    def _():
        def first_pass(group, largest):
            fill_scores(group)
            position = group * _LANES + lax.broadcasted_iota(jnp.int32, scores.shape[1:], 1)
            masked = jnp.where(position < here, scores[group], MASKED)
            scores[group] = masked
            return jnp.maximum(largest, masked)

        largest = lax.fori_loop(0, used, first_pass, jnp.full(scores.shape[1:], _FLOOR, jnp.float32))
        new_top = rescale(jnp.max(largest, axis=-1, keepdims=True))

        @pl.loop(0, used)
        def _(group):
            add(scores[group], read_values(group), new_top, not wide)

    @pl.when(step == chunks - 1)
    def _():
        node_scores = _product(queries[0, 0], tree_keys[0, 0], False) * scale
        node_scores = jnp.where(visible[0] != 0, node_scores, MASKED)
        add(node_scores, tree_values[0, 0], rescale(jnp.max(node_scores, axis=-1, keepdims=True)), False)
        sums = total[...]
        out[0, 0] = (weighted[...] / jnp.where(sums == 0, 1.0, sums)).astype(out.dtype)


def _product(a: Array, b: Array, transposed: bool) -> Array:
    """Multiplies [R, K] by [K, N], or by [N, K] transposed, in float32, as exactly as the types allow."""
    exact = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    contracted = (((1,), (1 if transposed else 0,)), ((), ()))
    return lax.dot_general(a, b, contracted, precision=exact, preferred_element_type=jnp.float32)
