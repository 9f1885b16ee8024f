"""Tree attention on a TPU: the cache streamed past a slot's queries, chunk after chunk.

The grid goes over slots, key heads and chunks of the cache, one after the other, and Pallas fetches the next
step's chunk during a step. A chunk that begins behind a slot's length is not fetched: its step asks for the
chunk that the next head or slot will begin with, which then comes early instead. Softmax is online (Milakov
and Gimelshein, 2018): the running maximum, sum and weighted values are in scratch memory. The nodes are one
more block of keys, behind the last chunk.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from rljax.kernels.switch import Refused
from rljax.kernels.tree_attention.rows import pack_nodes, pack_queries, unpack_rows
from rljax.models.attention import KEY_BLOCK, MASKED
from rljax.models.numerics import Numerics

_CHUNK_BLOCKS = 16  # blocks of the cache in a step: enough bytes to hide what a step costs
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
    nodes_in_cache: bool = False,
    interpret: bool = False,
) -> Array:
    """See the package. Where a node stands, and whether it is in the cache as well, changes nothing here."""
    del depth, numerics, nodes_in_cache
    batch, nodes, num_heads, head_dim = queries.shape
    kv_heads, capacity = values.shape[1:3]
    if keys.dtype not in (jnp.float32, jnp.bfloat16):
        raise Refused(f"keys and values are float32 or bfloat16, not {keys.dtype}")
    if head_dim % 8:
        raise Refused(f"heads are multiples of 8 wide, not {head_dim}")
    blocks = capacity // KEY_BLOCK
    in_chunk = min(_CHUNK_BLOCKS, blocks)
    chunks = pl.cdiv(blocks, in_chunk)

    rows = pack_queries(queries.astype(keys.dtype), kv_heads, multiple=16)  # [B, Hk, R, D]
    num_rows = rows.shape[2]
    tree_keys, tree_values = pack_nodes(node_keys, node_values)  # [B, Hk, D, L], [B, Hk, L, D]
    visible = jnp.pad(ancestors.astype(jnp.int32), [(0, 0), (0, 0), (0, KEY_BLOCK - nodes)])
    visible = jnp.tile(visible, (1, num_heads // kv_heads, 1))
    visible = jnp.pad(visible, [(0, 0), (0, num_rows - visible.shape[1]), (0, 0)])  # [B, R, L]

    def chunk_of(slot, head, chunk, lengths):
        """The chunk of the cache that a step fetches."""
        wanted = chunk * in_chunk * KEY_BLOCK < jnp.maximum(lengths[slot], 1)
        last_head = head == kv_heads - 1
        next_slot = jnp.minimum(jnp.where(last_head, slot + 1, slot), batch - 1)
        next_head = jnp.where(last_head, 0, head + 1)
        return (
            jnp.where(wanted, slot, next_slot),
            jnp.where(wanted, head, next_head),
            jnp.where(wanted, chunk, 0),
            0,
            0,
        )

    def of_head(slot, head, chunk, lengths):
        return slot, head, 0, 0

    def of_slot(slot, head, chunk, lengths):
        return slot, 0, 0

    out = pl.pallas_call(
        functools.partial(_attend, in_chunk=in_chunk, chunks=chunks, scale=head_dim**-0.5),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, kv_heads, chunks),
            in_specs=[
                pl.BlockSpec((1, 1, num_rows, head_dim), of_head),
                pl.BlockSpec((1, 1, in_chunk, head_dim, KEY_BLOCK), chunk_of),
                pl.BlockSpec((1, 1, in_chunk, KEY_BLOCK, head_dim), chunk_of),
                pl.BlockSpec((1, 1, head_dim, KEY_BLOCK), of_head),
                pl.BlockSpec((1, 1, KEY_BLOCK, head_dim), of_head),
                pl.BlockSpec((1, num_rows, KEY_BLOCK), of_slot),
            ],
            out_specs=pl.BlockSpec((1, 1, num_rows, head_dim), of_head),
            scratch_shapes=[
                pltpu.VMEM((in_chunk, num_rows, KEY_BLOCK), jnp.float32),
                pltpu.VMEM((num_rows, 1), jnp.float32),
                pltpu.VMEM((num_rows, 1), jnp.float32),
                pltpu.VMEM((num_rows, head_dim), jnp.float32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(rows.shape, queries.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",) * 3),
        name="tree_attention",
        interpret=interpret,
    )(
        lengths,
        rows,
        keys,
        values.reshape(batch, kv_heads, blocks, KEY_BLOCK, head_dim),
        tree_keys,
        tree_values,
        visible,
    )
    return unpack_rows(out, nodes, num_heads)


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
    in_chunk: int,
    chunks: int,
    scale: float,
) -> None:
    """One chunk of one slot's cache; behind the last one that it fills, its nodes.

    Refs: lengths [B]; queries [1, 1, R, D]; keys [1, 1, C, D, L] and values [1, 1, C, L, D] of the chunk;
    tree_keys [1, 1, D, L], tree_values [1, 1, L, D] and visible [1, R, L] of the nodes; out [1, 1, R, D];
    scratch: scores [C, R, L], top and total [R, 1], weighted [R, D].
    """
    chunk = pl.program_id(2)
    length = lengths[pl.program_id(0)]
    begin = chunk * in_chunk * KEY_BLOCK
    used = jnp.clip(pl.cdiv(length - begin, KEY_BLOCK), 0, in_chunk)  # blocks of the chunk with a position

    @pl.when(chunk == 0)
    def _():
        top[...] = jnp.full(top.shape, _FLOOR, jnp.float32)
        total[...] = jnp.zeros(total.shape, jnp.float32)
        weighted[...] = jnp.zeros(weighted.shape, jnp.float32)

    def score(block_keys, seen):
        return jnp.where(seen, _product(queries[0, 0], block_keys) * scale, MASKED)

    def rescale(largest):
        """The new maximum; what was added up under the old one shrinks."""
        new_top = jnp.maximum(top[...], largest)
        shrink = jnp.exp(top[...] - new_top)
        top[...] = new_top
        total[...] = total[...] * shrink
        weighted[...] = weighted[...] * shrink
        return new_top

    def add(block_scores, block_values, new_top):
        terms = jnp.exp(block_scores - new_top)
        total[...] += jnp.sum(terms, axis=-1, keepdims=True)
        weighted[...] += _product(terms.astype(block_values.dtype), block_values)

    @pl.when(used > 0)
    def _():
        def first_pass(block, largest):
            position = begin + block * KEY_BLOCK + lax.broadcasted_iota(jnp.int32, scores.shape[1:], 1)
            block_scores = score(keys[0, 0, block], position < length)
            scores[block] = block_scores
            return jnp.maximum(largest, block_scores)

        largest = lax.fori_loop(0, used, first_pass, jnp.full(scores.shape[1:], _FLOOR, jnp.float32))
        new_top = rescale(jnp.max(largest, axis=-1, keepdims=True))

        @pl.loop(0, used)
        def _(block):
            add(scores[block], values[0, 0, block], new_top)

    @pl.when(chunk == chunks - 1)
    def _():
        node_scores = score(tree_keys[0, 0], visible[0] != 0)
        add(node_scores, tree_values[0, 0], rescale(jnp.max(node_scores, axis=-1, keepdims=True)))
        sums = total[...]
        out[0, 0] = (weighted[...] / jnp.where(sums == 0, 1.0, sums)).astype(out.dtype)


def _product(a: Array, b: Array) -> Array:
    """[R, K] times [K, N], in float32 as exactly as the types allow."""
    exact = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(
        a, b, (((1,), (0,)), ((), ())), precision=exact, preferred_element_type=jnp.float32
    )
