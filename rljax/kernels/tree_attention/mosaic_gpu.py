"""Tree attention on Hopper: flash-decoding with the rows of a tree as one matrix.

A block of threads takes up to `_MOST_TILES` times 64 rows (`rows.py`) of one slot and key head, 64 per
warpgroup, and one stretch of `SPLIT` positions of the cache. It streams the stretch in blocks of 64 positions
through a ring of buffers in shared memory: bulk copies (TMA) run ahead, tensor cores multiply, softmax is
online. The nodes follow the cached positions in order, as if they were written there: the block that contains
the slot's length has both (`_pack_tail`), and up to 63 of 64 nodes are in the block after it. Later blocks
and stretches are skipped.

In decoding the block of threads that reads the stretch in which the token stands puts its key and value in
their places there, in shared memory, and writes them to the cache, too, which is a mutable array for the
kernel. Nobody else reads the cache's block, and at most `_TILE` query heads share a key head, so that one
warpgroup does.

Stretches are merged by their log-sum-exp, in float32, one after another. The borders of blocks and stretches
are fixed positions, and the sums of a row depend on its keys and their positions alone. So results do not
depend on batch or cache bucket, and the nodes of a chain, each at its position, have the bits of decoding.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from rljax.kernels.pallas import gpu_interpreter, gpu_iota, gpu_layout, gpu_load, gpu_store
from rljax.kernels.tree_attention.rows import pack_queries, unpack_rows
from rljax.numerics.attention import KEY_BLOCK, MASKED
from rljax.numerics.kernel_choice import Refused
from rljax.numerics.rows import Numerics

SPLIT = 1024
"""Positions of the cache per block of threads: few enough that 16 slots with 2 key heads fill 132
multiprocessors at 4096 positions, and enough that partial results are small compared with the cache.
"""
_TILE = 64  # rows of a warpgroup's matrix product
_MOST_TILES = 2  # warpgroups in a block (and threads of the interpreter, which hangs with more than cores)
_SHARED = {1: 112 * 1024, 2: 208 * 1024}  # bytes by warpgroups; two blocks of one fit together
_MOST_STAGES = 6
_FLOOR = 0.5 * MASKED  # of the running maximum, so that masked scores weigh exactly 0 even alone
_LOG2E = math.log2(math.e)


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
    """See the package. Positions of nodes have no effect here."""
    del depth, numerics
    _require(queries, keys, values)
    nodes, num_heads = queries.shape[1:3]
    kv_heads = values.shape[1]
    group = num_heads // kv_heads
    # A tile's other rows are what shared memory holds: nobody reads what is computed from them.
    rows = pack_queries(queries, kv_heads, multiple=8)
    bits = _pack_ancestors(ancestors, group, _TILE * math.prod(_tiling(group * nodes)))
    given = bits, rows, *_pack_tail(keys, values, lengths, node_keys, node_values)
    out = _attention(keys, values, lengths, given, nodes, group * nodes, interpret)
    return unpack_rows(out.astype(queries.dtype), nodes, num_heads)


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
    del numerics
    _require(queries, keys, values)
    # The heads of one product: XLA makes them one array, in one kernel, where parts of it would be copied.
    heads = jnp.concatenate([queries, node_keys, node_values], axis=2)[:, 0]
    group = queries.shape[2] // values.shape[1]
    keys_ref, values_ref = (jax.new_ref(x, memory_space=plgpu.GMEM) for x in (keys, values))
    out = _attention(keys_ref, values_ref, positions, (heads,), 1, group, interpret)
    out = out.astype(queries.dtype).reshape(queries.shape)
    return out, jax.freeze(keys_ref), jax.freeze(values_ref)


def _require(queries: Array, keys: Array, values: Array) -> None:
    """Raises `Refused` for what the kernel was not made for."""
    num_heads, head_dim = queries.shape[2:]
    if any(x.dtype != jnp.bfloat16 for x in (queries, keys, values)):
        raise Refused(f"queries, keys and values are bfloat16, not {queries.dtype} and {keys.dtype}")
    if head_dim not in (64, 128):
        raise Refused(f"heads are 64 or 128 wide, not {head_dim}")
    if (group := num_heads // values.shape[1]) > _TILE:
        raise Refused(f"at most {_TILE} query heads share a key head, not {group}")


def _tiling(num_rows: int) -> tuple[int, int]:
    """The tiles of a block of threads, and the blocks, for the rows of a key head."""
    tiles = pl.cdiv(num_rows, _TILE)
    groups = pl.cdiv(tiles, _MOST_TILES)
    return pl.cdiv(tiles, groups), groups


def _attention(
    keys: Any,
    values: Any,
    lengths: Array,
    given: tuple[Array, ...],
    nodes: int,
    num_rows: int,
    interpret: bool,
) -> Array:
    """Attention of `num_rows` rows of every slot and key head: float32 [B, Hk, num_rows, D].

    Args:
      keys, values: as of `tree_attention`; in decoding mutable arrays, to which the token is written.
      given: of a tree, what `_attend` has as bits, queries, tail_keys and tail_values; in decoding the heads
        of the token's queries, keys and values, [B, H + 2 Hk, D].
    """
    batch, kv_heads, capacity, head_dim = values.shape
    in_group, groups = _tiling(num_rows)
    splits = pl.cdiv(capacity, SPLIT)
    kept_rows = num_rows + -num_rows % 8
    partial = (batch, kv_heads, splits, kept_rows, head_dim)
    stage_bytes = 2 * KEY_BLOCK * head_dim * 2
    query_bytes = in_group * _TILE * head_dim * 2
    stages = min((_SHARED[in_group] - query_bytes) // stage_bytes, _MOST_STAGES)
    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    scratch = (
        plgpu.SMEM((in_group, _TILE, head_dim), jnp.bfloat16, transforms=tiled),
        plgpu.SMEM((stages, head_dim, KEY_BLOCK), jnp.bfloat16, transforms=tiled),
        plgpu.SMEM((stages, KEY_BLOCK, head_dim), jnp.bfloat16, transforms=tiled),
        plgpu.Barrier(num_barriers=in_group),
        plgpu.Barrier(num_barriers=stages),
        plgpu.Barrier(num_barriers=stages),
        plgpu.Barrier(num_arrivals=in_group, num_barriers=stages),
        # The interpreter multiplies only matrices in shared memory.
        *[plgpu.SMEM((in_group, _TILE, KEY_BLOCK), jnp.bfloat16, transforms=tiled)] * interpret,
    )

    def body(lengths, keys, values, *others):
        attend = functools.partial(
            _attend,
            lengths,
            keys,
            values,
            others[:-3],
            *others[-3:],
            nodes=nodes,
            group=num_rows // nodes,
            splits=splits,
            in_group=in_group,
            stages=stages,
        )
        pl.run_scoped(attend, *scratch, collective_axes="tile")

    # pl.kernel and not plgpu.kernel: on JAX 0.10, that one takes no mutable arrays.
    high, low, lse = pl.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct(partial, jnp.bfloat16),
            jax.ShapeDtypeStruct(partial, jnp.bfloat16),
            jax.ShapeDtypeStruct((batch, kv_heads, splits, _TILE * in_group * groups), jnp.float32),
        ),
        mesh=plgpu.Mesh(
            grid=(splits, batch * kv_heads, groups),
            grid_names=("split", "slot_head", "group"),
            num_threads=in_group,
            thread_name="tile",
        ),
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=0
        ),
        name="tree_attention",
        interpret=gpu_interpreter() if interpret else False,
    )(lengths, keys, values, *given)
    kept = (x[:, :, :, :num_rows] for x in (high, low, lse))
    return _merge(*kept, lengths, nodes)


def _pack_tail(
    keys: Array, values: Array, lengths: Array, node_keys: Array, node_values: Array
) -> tuple[Array, Array]:
    """Returns the keys [B, Hk, T, D, L] and values [B, Hk, T, L, D] from the block that contains the length
    on: what is committed of it, and node j at position length + j.
    """
    nodes = node_keys.shape[1]
    blocks = pl.cdiv(KEY_BLOCK - 1 + nodes, KEY_BLOCK)
    committed = (lengths % KEY_BLOCK)[:, None, None]
    columns = jnp.arange(blocks * KEY_BLOCK, dtype=jnp.int32).reshape(1, blocks, KEY_BLOCK)
    index = jnp.clip(columns - committed, 0, nodes - 1)  # [B, T, L]

    def placed(x: Array) -> Array:
        """[B, M, Hk, D] -> [B, T, L, Hk, D], with L = 1 for a single node."""
        if nodes == 1:
            return x[:, None]
        x = jnp.take_along_axis(x, index.reshape(len(x), -1, 1, 1), axis=1)
        return x.reshape(len(x), blocks, KEY_BLOCK, *x.shape[2:])

    def cached(x: Array) -> Array:
        """The block [B, Hk, 1, ...] of x [B, Hk, S / L, ...]."""
        block = jnp.minimum(lengths // KEY_BLOCK, x.shape[2] - 1)
        return jnp.take_along_axis(x, block[:, None, None, None, None], axis=2)

    from_cache = (columns < committed)[:, None]  # [B, 1, T, L]
    blocks_of_values = values.reshape(*values.shape[:2], -1, KEY_BLOCK, values.shape[-1])
    return (
        jnp.where(from_cache[:, :, :, None], cached(keys), placed(node_keys).transpose(0, 3, 1, 4, 2)),
        jnp.where(
            from_cache[..., None], cached(blocks_of_values), placed(node_values).transpose(0, 3, 1, 2, 4)
        ),
    )


def _pack_ancestors(ancestors: Array, group: int, rows: int) -> Array:
    """bool [B, M, M] -> int32 [B, 2, rows]: bit j of the two words of a row says whether it sees node j."""
    batch, nodes, _ = ancestors.shape
    seen = jnp.pad(ancestors, [(0, 0), (0, 0), (0, KEY_BLOCK - nodes)])
    seen = seen.reshape(batch, nodes, 2, 32).astype(jnp.uint32)
    words = jnp.sum(seen << jnp.arange(32, dtype=jnp.uint32)[None, None, None], axis=-1, dtype=jnp.uint32)
    words = lax.bitcast_convert_type(words, jnp.int32).swapaxes(1, 2)  # [B, 2, M]
    return jnp.pad(jnp.tile(words, (1, 1, group)), [(0, 0), (0, 0), (0, rows - group * nodes)])


def _attend(
    lengths,
    keys,
    values,
    given,
    out_high,
    out_low,
    out_lse,
    queries_smem,
    keys_smem,
    values_smem,
    queries_here,
    keys_here,
    values_here,
    free,
    *terms_smem,
    nodes: int,
    group: int,
    splits: int,
    in_group: int,
    stages: int,
) -> None:
    """One stretch of one slot and key head, for the rows of a group of tiles.

    Refs: lengths [B], keys [B, Hk, S / L, D, L], values [B, Hk, S, D]; given: of a tree bits [B, 2, R],
    queries [B, Hk, kept_rows, D], tail_keys [B, Hk, T, D, L] and tail_values [B, Hk, T, L, D], in decoding
    the new heads [B, H + 2 Hk, D]; out: the stretch's weighted mean as a sum of out_high and out_low [B, Hk,
    splits, kept_rows, D], and the base-2 logarithm of its divisor, out_lse [B, Hk, splits, R].
    """
    decoding = len(given) == 1
    split = lax.axis_index("split")
    kv_heads, in_cache = keys.shape[1:3]
    slot, head = (
        lax.div(lax.axis_index("slot_head"), kv_heads),
        lax.rem(lax.axis_index("slot_head"), kv_heads),
    )
    tile_in_group = lax.axis_index("tile")
    interpret = bool(terms_smem)
    tile = lax.axis_index("group") * in_group + tile_in_group
    head_dim, kept_rows = queries_smem.shape[-1], out_high.shape[3]
    length = lengths[slot]
    last_split = _last_split(length, splits, nodes)
    begin = split * (SPLIT // KEY_BLOCK)  # in blocks, as what follows
    whole_blocks = lax.div(length, KEY_BLOCK)
    last_block = lax.div(length + (nodes - 1), KEY_BLOCK)
    end = jnp.where(split == last_split, last_block + 1, begin + SPLIT // KEY_BLOCK)
    blocks = jnp.clip(whole_blocks - begin, 0, SPLIT // KEY_BLOCK)
    steps = end - begin

    def fetch(step):
        """The step's keys and values, on their way into its stage of the ring."""
        stage = lax.rem(step, stages)

        def load(its_keys, its_values):
            plgpu.copy_gmem_to_smem(its_keys, keys_smem.at[stage], keys_here.at[stage])
            plgpu.copy_gmem_to_smem(its_values, values_smem.at[stage], values_here.at[stage])

        def load_cached(block):
            positions = pl.ds(block * KEY_BLOCK, KEY_BLOCK)
            load(keys.at[slot, head, block], values.at[slot, head, positions])

        if decoding:  # a slot that is full has no place for its token, and nobody reads its result
            load_cached(jnp.minimum(begin + step, in_cache - 1))
            return
        _, _, tail_keys, tail_values = given

        @pl.when(step < blocks)
        def _():
            load_cached(begin + step)

        @pl.when(step >= blocks)
        def _():
            block = begin + step - whole_blocks
            load(tail_keys.at[slot, head, block], tail_values.at[slot, head, block])

    @pl.when(split <= last_split)
    def _():
        own_queries = queries_smem.at[tile_in_group]
        rows = pl.ds(tile * _TILE, _TILE)
        whole, rest = divmod(kept_rows, _TILE)

        @pl.when(tile_in_group == 0)
        def _():
            @pl.loop(0, jnp.minimum(steps, stages))
            def _(step):
                fetch(step)

        def load_head(number, axis):
            """One of the new heads [D], for matrices whose other axis is `axis`."""
            return gpu_load(given[0].at[slot, number], plgpu.Layout.WGMMA.reduce(axis), interpret)

        if decoding:
            shape = (_TILE, head_dim)
            row = gpu_iota(shape, 0, plgpu.Layout.WGMMA, interpret)
            matrix = gpu_layout(jnp.zeros(shape, jnp.bfloat16), plgpu.Layout.WGMMA, interpret)
            for member in range(group):
                query = lax.broadcast_in_dim(load_head(head * group + member, 0), shape, [1])
                matrix = jnp.where(row == member, query, matrix)
            own_queries[...] = matrix
            plgpu.commit_smem()
            key, value = load_head(group * kv_heads + head, 1), load_head((group + 1) * kv_heads + head, 0)
        else:

            def copy_queries(first, count):
                there, here = given[1].at[slot, head, pl.ds(first, count)], own_queries.at[pl.ds(0, count)]
                plgpu.copy_gmem_to_smem(there, here, queries_here.at[tile_in_group])

            if whole:

                @pl.when(tile < whole)
                def _():
                    copy_queries(tile * _TILE, _TILE)

            @pl.when(tile >= whole)
            def _():  # a tile without rows of its own computes those of the last one
                copy_queries((whole if rest else whole - 1) * _TILE, rest or _TILE)

            plgpu.barrier_wait(queries_here.at[tile_in_group])
        shape = (_TILE, KEY_BLOCK)
        columns = gpu_iota(shape, 1, plgpu.Layout.WGMMA, interpret)

        place = lax.rem(length, KEY_BLOCK)

        def put(block_smem, new, axis):
            """Puts the token's key or value in its place along `axis` of its block."""
            shape = block_smem.shape
            block = gpu_load(block_smem, plgpu.Layout.WGMMA, interpret)
            there = gpu_iota(shape, axis, plgpu.Layout.WGMMA, interpret) == place
            block_smem[...] = jnp.where(there, lax.broadcast_in_dim(new, shape, [1 - axis]), block)
            plgpu.commit_smem()

        def attend(step, carry, seen, with_token=False):
            """Online softmax over one more block's `seen`: carry (weighted [64, D], top [64], total [64])."""
            weighted, top, total = carry

            # The stage of the step before is free as soon as all warpgroups are done with it.
            @pl.when((tile_in_group == 0) & (step > 0) & (step - 1 + stages < steps))
            def _():
                plgpu.barrier_wait(free.at[lax.rem(step - 1, stages)])
                fetch(step - 1 + stages)

            stage = lax.rem(step, stages)
            plgpu.barrier_wait(keys_here.at[stage])
            if with_token:
                put(keys_smem.at[stage], key, 1)

            def multiply_keys(accumulator):
                plgpu.wgmma(accumulator, own_queries, keys_smem.at[stage])
                return accumulator[...]

            scores = pl.run_scoped(multiply_keys, plgpu.ACC(shape, jnp.float32))
            scores = jnp.where(seen, scores * (head_dim**-0.5 * _LOG2E), MASKED)
            new_top = jnp.maximum(top, jnp.max(scores, axis=1))
            terms = jnp.exp2(scores - lax.broadcast_in_dim(new_top, shape, [0]))
            shrink = jnp.exp2(top - new_top)
            total = total * shrink + jnp.sum(terms, axis=1)
            rounded = terms.astype(jnp.bfloat16)
            plgpu.barrier_wait(values_here.at[stage])
            if with_token:
                put(values_smem.at[stage], value, 0)

            def multiply_values(accumulator):
                left = rounded
                for interpreted in terms_smem:
                    interpreted[tile_in_group] = rounded
                    left = interpreted.at[tile_in_group]
                plgpu.wgmma(accumulator, left, values_smem.at[stage])
                return accumulator[...]

            more = pl.run_scoped(multiply_values, plgpu.ACC(weighted.shape, jnp.float32))

            @pl.when(step + stages < steps)  # otherwise no step waits for it
            def _():
                plgpu.barrier_arrive(free.at[stage])

            weighted = weighted * lax.broadcast_in_dim(shrink, weighted.shape, [0]) + more
            return weighted, new_top, total

        def cached(step, carry):
            # All is seen. But without a mask the scale and the subtraction of the maximum would be rounded as
            # one, other than in the tail.
            return attend(step, carry, columns < length - (begin + step) * KEY_BLOCK)

        def token(step, carry):
            return attend(step, carry, columns <= length - (begin + step) * KEY_BLOCK, with_token=True)

        def tail(step, carry):
            low, high = (
                gpu_load(given[0].at[slot, word, rows], plgpu.Layout.WGMMA.reduce(1), interpret)
                for word in (0, 1)
            )
            low, high = (lax.broadcast_in_dim(word, shape, [0]) for word in (low, high))
            node = columns + ((begin + step) * KEY_BLOCK - length)
            word = jnp.where(node < 32, low, high)
            is_ancestor = ((word >> (node & 31)) & 1) != 0
            return attend(step, carry, (node < 0) | ((node < nodes) & is_ancestor))

        def full(shape, value, layout):
            return gpu_layout(jnp.full(shape, value, jnp.float32), layout, interpret)

        carry = (
            full((_TILE, head_dim), 0.0, plgpu.Layout.WGMMA),
            full((_TILE,), _FLOOR, plgpu.Layout.WGMMA.reduce(1)),
            full((_TILE,), 0.0, plgpu.Layout.WGMMA.reduce(1)),
        )
        carry = lax.fori_loop(0, blocks, cached, carry)
        weighted, top, total = lax.fori_loop(blocks, steps, token if decoding else tail, carry)

        if decoding:

            @pl.when((split == last_split) & (whole_blocks < in_cache))
            def _():  # its block has been read
                gpu_store(keys.at[slot, head, whole_blocks, :, place], key, interpret)
                gpu_store(values.at[slot, head, length], value, interpret)

        divisor = jnp.where(total == 0, 1.0, total)
        mean = weighted / lax.broadcast_in_dim(divisor, weighted.shape, [0])
        mean_high = mean.astype(jnp.bfloat16)
        out_lse[slot, head, split, rows] = jnp.where(total == 0, -jnp.inf, top + jnp.log(divisor) * _LOG2E)

        def write(source, out):
            """The tile's rows that are kept."""
            plgpu.commit_smem()

            @pl.when(tile < whole)
            def _():
                plgpu.copy_smem_to_gmem(source, out.at[slot, head, split, rows])

            if rest:

                @pl.when(tile == whole)
                def _():
                    last = pl.ds(whole * _TILE, rest)
                    plgpu.copy_smem_to_gmem(source.at[pl.ds(0, rest)], out.at[slot, head, split, last])

        # Shared memory is short: the queries' is used again, twice.
        own_queries[...] = mean_high
        write(own_queries, out_high)
        plgpu.wait_smem_to_gmem(0)
        own_queries[...] = (mean - mean_high.astype(jnp.float32)).astype(jnp.bfloat16)
        write(own_queries, out_low)
        plgpu.wait_smem_to_gmem(0)


def _last_split(length: Array, splits: int, nodes: int) -> Array:
    """The stretch of the last node."""
    return jnp.minimum(lax.div(length + (nodes - 1), SPLIT), splits - 1)


def _merge(high: Array, low: Array, lse: Array, lengths: Array, nodes: int) -> Array:
    """Weighted means of stretches [B, Hk, splits, R, D] -> of all of them, float32 [B, Hk, R, D].

    Stretches that were skipped are not looked at; each weighs 2 to its lse [B, Hk, splits, R].
    """
    splits = lse.shape[2]
    last = _last_split(lengths, splits, nodes)
    there = jnp.arange(splits, dtype=jnp.int32)[None] <= last[:, None]  # [B, splits]
    lse = jnp.where(there[:, None, :, None], lse, -jnp.inf)
    top = jnp.maximum(jnp.max(lse, axis=2, keepdims=True), _FLOOR)
    weights = jnp.exp2(lse - top)
    parts = high.astype(jnp.float32) + low.astype(jnp.float32)
    parts = jnp.where(there[:, None, :, None, None], parts, 0.0) * weights[..., None]
    total = functools.reduce(jnp.add, [weights[:, :, i] for i in range(splits)])[..., None]
    weighted = functools.reduce(jnp.add, [parts[:, :, i] for i in range(splits)])
    return weighted / jnp.where(total == 0, 1.0, total)
