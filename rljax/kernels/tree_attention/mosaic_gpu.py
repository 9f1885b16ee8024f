"""Tree attention on Hopper: flash-decoding with the rows of a tree as one matrix.

A block of threads takes up to `_MOST_TILES` times 64 rows (`rows.py`) of one slot and key head, 64 per
warpgroup, and streams the cache in blocks of 64 positions through a ring of buffers in shared memory: bulk
copies (TMA) run ahead, tensor cores multiply, softmax is online. The nodes follow the cached positions in
order, as if they were written there: the block that contains the slot's length has both (`_pack_tail`), and
up to 63 of 64 nodes are in the block after it. Later blocks are skipped.

In decoding the block of threads that reads the token's place puts its key and value there, in shared memory,
and writes them to the cache, too, which is a mutable array for the kernel. Nobody else reads the cache's
block, and at most `_TILE` query heads share a key head, so that one warpgroup does.

Every stretch of `SPLIT` positions has a mean and a log-sum-exp of its own, and stretches are merged in
float32, one after another. Where slots and key heads are enough for the device, a block of threads takes all
stretches and merges them in registers; where they are few, a block takes one stretch, and a second kernel
merges (flash-decoding). The borders of blocks and stretches are fixed positions, and the sums of a row depend
on its keys and their positions alone. So results do not depend on batch or cache bucket, and the nodes of a
chain, each at its position, have the bits of decoding.
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
"""Positions of a stretch: few enough that 16 slots with 2 key heads fill 132 multiprocessors at 4096
positions, and enough that partial results are small compared with the cache.
"""
_FILLED = 64
"""Blocks of threads that keep an H100's memory busy, so that each may merge its stretches itself: 96 KB in
flight for each are together twice the 2.7 MB of 3.35 TB/s times a latency of 0.8 microseconds.
"""
_TILE = 64  # rows of a warpgroup's matrix product
_MOST_TILES = 2  # warpgroups in a block (and threads of the interpreter, which hangs with more than cores)
_SHARED = {1: 112 * 1024, 2: 208 * 1024}  # bytes by warpgroups; two blocks of one fit together
_MOST_STAGES = 6
_TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # of matrices in shared memory
_BLOCKS = SPLIT // KEY_BLOCK  # of a stretch
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
    return _attention(keys, values, lengths, given, nodes, group, interpret)


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
    group: int,
    interpret: bool,
) -> Array:
    """Attention of every node with `group` query heads a key head: bfloat16 [B, M, H, D].

    Args:
      keys, values: as of `tree_attention`; in decoding mutable arrays, to which the token is written.
      given: of a tree, what `_attend` has as bits, queries, tail_keys and tail_values; in decoding the heads
        of the token's queries, keys and values, [B, H + 2 Hk, D].
    """
    batch, kv_heads, capacity, head_dim = values.shape
    num_rows = group * nodes
    in_group, groups = _tiling(num_rows)
    splits = pl.cdiv(capacity, SPLIT)
    kept_rows = _kept(num_rows)
    rows_of_slot = (kv_heads, kept_rows) if nodes > 1 else (kv_heads * group,)
    result = jax.ShapeDtypeStruct((batch, *rows_of_slot, head_dim), jnp.bfloat16)
    merges = splits == 1 or batch * kv_heads * groups >= _FILLED
    partial = (batch, kv_heads, splits)
    parts = (
        jax.ShapeDtypeStruct((*partial, kept_rows, head_dim), jnp.bfloat16),
        jax.ShapeDtypeStruct((*partial, kept_rows, head_dim), jnp.bfloat16),
        jax.ShapeDtypeStruct((*partial, _TILE * in_group * groups), jnp.float32),
    )
    stage_bytes = 2 * KEY_BLOCK * head_dim * 2
    query_bytes = in_group * _TILE * head_dim * 2
    stages = min((_SHARED[in_group] - query_bytes) // stage_bytes, _MOST_STAGES)
    scratch = (
        plgpu.SMEM((in_group, _TILE, head_dim), jnp.bfloat16, transforms=_TILED),
        plgpu.SMEM((stages, head_dim, KEY_BLOCK), jnp.bfloat16, transforms=_TILED),
        plgpu.SMEM((stages, KEY_BLOCK, head_dim), jnp.bfloat16, transforms=_TILED),
        plgpu.Barrier(num_barriers=in_group),
        plgpu.Barrier(num_barriers=stages),
        plgpu.Barrier(num_barriers=stages),
        plgpu.Barrier(num_arrivals=in_group, num_barriers=stages),
        # The interpreter multiplies only matrices in shared memory.
        *[plgpu.SMEM((in_group, _TILE, KEY_BLOCK), jnp.bfloat16, transforms=_TILED)] * interpret,
    )

    def body(lengths, keys, values, *others):
        attend = functools.partial(
            _attend,
            lengths,
            keys,
            values,
            others[: len(given)],
            others[len(given) :],
            nodes=nodes,
            group=group,
            splits=splits,
            in_group=in_group,
            stages=stages,
        )
        heads = pl.run_scoped(attend, *scratch, collective_axes="tile")
        if heads is not None:
            _write_heads(heads, others[-1], group, kv_heads, interpret)

    kernel = functools.partial(
        pl.kernel,  # not plgpu.kernel: on JAX 0.10, that one takes no mutable arrays
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=0
        ),
        name="tree_attention",
        interpret=gpu_interpreter() if interpret else False,
    )
    blocks = (("split", 1 if merges else splits), ("slot_head", batch * kv_heads), ("group", groups))
    out = kernel(body, out_type=(result,) if merges else parts, mesh=_mesh(blocks, in_group))(
        lengths, keys, values, *given
    )
    if not merges:
        blocks = (("slot_head", batch * kv_heads), ("tile_of_head", in_group * groups))
        merge = functools.partial(_merge_stretches, nodes=nodes, group=group, interpret=interpret)
        out = kernel(merge, out_type=(result,), mesh=_mesh(blocks, 1))(lengths, *out)
    if nodes == 1:
        return out[0][:, None]
    return unpack_rows(out[0], nodes, kv_heads * group)


def _kept(num_rows: int) -> int:
    """Rows that are copied from and to shared memory: bulk copies take 8."""
    return num_rows + -num_rows % 8


def _mesh(blocks: tuple[tuple[str, int], ...], warpgroups: int) -> plgpu.Mesh:
    """Blocks of threads by the name and size of their axes, of so many warpgroups."""
    names, sizes = zip(*blocks, strict=True)
    return plgpu.Mesh(grid=sizes, grid_names=names, num_threads=warpgroups, thread_name="tile")


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
    out,
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
) -> Array | None:
    """One slot and key head, for the rows of a group of tiles: all stretches, or one.

    Refs: lengths [B], keys [B, Hk, S / L, D, L], values [B, Hk, S, D]; given: of a tree bits [B, 2, R],
    queries [B, Hk, kept_rows, D], tail_keys [B, Hk, T, D, L] and tail_values [B, Hk, T, L, D], in decoding
    the new heads [B, H + 2 Hk, D]; out: of all stretches [B, Hk, kept_rows, D]; of one, as
    `_merge_stretches` reads it.

    Returns:
      The results of all stretches of one node, bfloat16 [64, D], which are left to write; otherwise None.
    """
    decoding, all_stretches = len(given) == 1, len(out) == 1
    kv_heads, in_cache = keys.shape[1:3]
    slot, head = _slot_and_head(kv_heads)
    tile_in_group = lax.axis_index("tile")
    interpret = bool(terms_smem)
    tile = lax.axis_index("group") * in_group + tile_in_group
    head_dim, kept_rows = queries_smem.shape[-1], _kept(nodes * group)
    length = lengths[slot]
    last_split = _last_split(length, splits, nodes)
    split = jnp.int32(0) if all_stretches else lax.axis_index("split")
    reads_last = (split == last_split) | all_stretches
    begin = split * _BLOCKS  # in blocks, as what follows
    whole_blocks = lax.div(length, KEY_BLOCK)
    last_block = lax.div(length + (nodes - 1), KEY_BLOCK)
    steps = jnp.where(reads_last, last_block + 1 - begin, _BLOCKS)
    blocks = jnp.clip(whole_blocks - begin, 0, steps)

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

    def read():
        own_queries = queries_smem.at[tile_in_group]
        rows = pl.ds(tile * _TILE, _TILE)

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
            there = given[1].at[slot, head]
            _copy_rows(there, own_queries, tile, kept_rows, queries_here.at[tile_in_group])
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

        def stretch(number):
            """The mean and log-sum-exp of a stretch, of those that this block of threads reads."""
            start = number * _BLOCKS
            stop = jnp.where(split + number == last_split, steps, start + _BLOCKS)
            border = jnp.clip(blocks, start, stop)
            carry = lax.fori_loop(start, border, cached, _nothing(head_dim, interpret))
            carry = lax.fori_loop(border, stop, token if decoding else tail, carry)
            mean, (_, top, total) = _mean(carry), carry
            high = mean.astype(jnp.bfloat16)
            low = (mean - high.astype(jnp.float32)).astype(jnp.bfloat16)
            divisor = jnp.where(total == 0, 1.0, total)
            return high, low, jnp.where(total == 0, -jnp.inf, top + jnp.log(divisor) * _LOG2E)

        def write(matrix, there):  # the queries' memory is used again
            _write_rows(matrix, own_queries, there, tile, kept_rows)

        if all_stretches:

            def merge(number, merged):
                return _merge(merged, *stretch(number))

            merged = lax.fori_loop(0, last_split + 1, merge, _nothing(head_dim, interpret))
        else:
            high, low, lse = stretch(0)

        if decoding:

            @pl.when(reads_last & (whole_blocks < in_cache))
            def _():  # its block has been read
                gpu_store(keys.at[slot, head, whole_blocks, :, place], key, interpret)
                gpu_store(values.at[slot, head, length], value, interpret)

        if not all_stretches:
            write(high, out[0].at[slot, head, split])
            write(low, out[1].at[slot, head, split])
            out[2][slot, head, split, rows] = lse
            return None
        if nodes == 1:
            return _heads(merged, group, interpret)
        write(_mean(merged), out[0].at[slot, head])
        return None

    if all_stretches:
        return read()
    pl.when(split <= last_split)(read)
    return None


def _copy_rows(there: Any, here: Any, tile: Any, kept_rows: int, barrier: Any) -> None:
    """Starts to copy a tile's rows of [kept_rows, D] to shared memory, or as many as there are; a tile
    without rows of its own computes those of the last one.
    """
    whole, rest = divmod(kept_rows, _TILE)

    def copy(first: Any, count: int) -> None:
        plgpu.copy_gmem_to_smem(there.at[pl.ds(first, count)], here.at[pl.ds(0, count)], barrier)

    if whole:

        @pl.when(tile < whole)
        def _():
            copy(tile * _TILE, _TILE)

    @pl.when(tile >= whole)
    def _():
        copy((whole if rest else whole - 1) * _TILE, rest or _TILE)


def _write_rows(matrix: Array, here: Any, there: Any, tile: Any, kept_rows: int) -> None:
    """Copies a tile [64, D] to its place in [kept_rows, D], as many rows as there are, and waits."""
    whole, rest = divmod(kept_rows, _TILE)
    here[...] = matrix.astype(here.dtype)
    plgpu.commit_smem()

    @pl.when(tile < whole)
    def _():
        plgpu.copy_smem_to_gmem(here, there.at[pl.ds(tile * _TILE, _TILE)])

    if rest:

        @pl.when(tile == whole)
        def _():
            plgpu.copy_smem_to_gmem(here.at[pl.ds(0, rest)], there.at[pl.ds(whole * _TILE, rest)])

    plgpu.wait_smem_to_gmem(0)


def _heads(merged: tuple[Array, Array, Array], group: int, interpret: bool) -> Array:
    """The mean, bfloat16 [64, D], with zeros in rows from `group` on: the compiler then computes fewer."""
    mean = _mean(merged)
    row = gpu_iota(mean.shape, 0, plgpu.Layout.WGMMA, interpret)
    return jnp.where(row < group, mean, 0.0).astype(jnp.bfloat16)


def _write_heads(matrix: Array, out: Any, group: int, kv_heads: int, interpret: bool) -> None:
    """Writes the first `group` rows of [64, D], the heads of one node, to their places in [B, H, D]."""
    slot, head = _slot_and_head(kv_heads)

    def write(here: Any) -> None:
        gpu_store(here, matrix, interpret)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(here.at[pl.ds(0, group)], out.at[slot, pl.ds(head * group, group)])
        plgpu.wait_smem_to_gmem(0)

    # As it is, without tiles of 8 rows.
    pl.run_scoped(write, plgpu.SMEM(matrix.shape, out.dtype), collective_axes="tile")


def _slot_and_head(kv_heads: int) -> tuple[Array, Array]:
    """Those of this block of threads."""
    both = lax.axis_index("slot_head")
    return lax.div(both, kv_heads), lax.rem(both, kv_heads)


def _last_split(length: Array, splits: int, nodes: int) -> Array:
    """The stretch of the last node."""
    return jnp.minimum(lax.div(length + (nodes - 1), SPLIT), splits - 1)


def _nothing(head_dim: int, interpret: bool) -> tuple[Array, Array, Array]:
    """(weighted sum [64, D], maximum [64], divisor [64]) of nothing, for an online softmax."""

    def full(shape: tuple[int, ...], value: float, layout: Any) -> Array:
        return gpu_layout(jnp.full(shape, value, jnp.float32), layout, interpret)

    return (
        full((_TILE, head_dim), 0.0, plgpu.Layout.WGMMA),
        full((_TILE,), _FLOOR, plgpu.Layout.WGMMA.reduce(1)),
        full((_TILE,), 0.0, plgpu.Layout.WGMMA.reduce(1)),
    )


def _merge(
    merged: tuple[Array, Array, Array], high: Array, low: Array, lse: Array
) -> tuple[Array, Array, Array]:
    """Adds a stretch, the mean of which is high + low [64, D], and which weighs 2 to its lse [64]."""
    weighted, top, total = merged
    new_top = jnp.maximum(top, lse)
    shrink, weight = jnp.exp2(top - new_top), jnp.exp2(lse - new_top)
    shrinks, weights = (lax.broadcast_in_dim(x, weighted.shape, [0]) for x in (shrink, weight))
    mean = high.astype(jnp.float32) + low.astype(jnp.float32)
    return weighted * shrinks + mean * weights, new_top, total * shrink + weight


def _mean(merged: tuple[Array, Array, Array]) -> Array:
    """float32 [64, D]; zeros where nothing was seen."""
    weighted, _, total = merged
    divisor = jnp.where(total == 0, 1.0, total)
    return weighted / lax.broadcast_in_dim(divisor, weighted.shape, [0])


def _merge_stretches(lengths, high, low, lse, out, *, nodes: int, group: int, interpret: bool) -> None:
    """Merges the stretches of a slot and key head, for the rows of a tile.

    Refs: lengths [B]; a stretch's weighted mean as a sum of high and low [B, Hk, splits, kept_rows, D], and
    the base-2 logarithm of its divisor, lse [B, Hk, splits, R]; out [B, Hk, kept_rows, D], of one node
    [B, H, D].
    """
    kv_heads, splits, kept_rows, head_dim = high.shape[1:]
    slot, head = _slot_and_head(kv_heads)
    tile = lax.axis_index("tile_of_head")

    def of_stretches(high_smem, low_smem, high_here, low_here):
        def merge(split, merged):
            _copy_rows(high.at[slot, head, split], high_smem, tile, kept_rows, high_here)
            _copy_rows(low.at[slot, head, split], low_smem, tile, kept_rows, low_here)
            its_lse = gpu_load(
                lse.at[slot, head, split, pl.ds(tile * _TILE, _TILE)], plgpu.Layout.WGMMA.reduce(1), interpret
            )
            plgpu.barrier_wait(high_here)
            plgpu.barrier_wait(low_here)
            parts = (gpu_load(x, plgpu.Layout.WGMMA, interpret) for x in (high_smem, low_smem))
            merged = _merge(merged, *parts, its_lse)
            plgpu.commit_smem()  # all have read before the next stretch is copied
            return merged

        last = _last_split(lengths[slot], splits, nodes)
        merged = lax.fori_loop(0, last + 1, merge, _nothing(head_dim, interpret))
        if nodes == 1:
            return _heads(merged, group, interpret)
        _write_rows(_mean(merged), high_smem, out.at[slot, head], tile, kept_rows)
        return None

    smem = plgpu.SMEM((_TILE, head_dim), jnp.bfloat16, transforms=_TILED)
    scratch = (smem, smem, plgpu.Barrier(), plgpu.Barrier())
    heads = pl.run_scoped(of_stretches, *scratch, collective_axes="tile")
    if heads is not None:
        _write_heads(heads, out, group, kv_heads, interpret)
