"""Compaction on Hopper: one block of threads per block of the cache that a path may reach.

It loads the block, and the path's nodes at their positions in it, by bulk copies (TMA), merges them, and
copies the result back. The cache is a mutable array for the kernel, so the result is in the same memory.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from rljax.kernels.compaction.blocks import fresh_blocks, reach, written
from rljax.kernels.pallas import gpu_interpreter, gpu_iota, gpu_load
from rljax.numerics.attention import KEY_BLOCK
from rljax.numerics.kernel_choice import Refused


def compaction(
    keys: Array,
    values: Array,
    node_keys: Array,
    node_values: Array,
    path: Array,
    count: Array,
    lengths: Array,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """See the package."""
    batch, kv_heads, blocks, dim, _ = keys.shape
    if keys.dtype not in (jnp.float32, jnp.bfloat16):
        raise Refused(f"keys and values are float32 or bfloat16, not {keys.dtype}")
    if dim not in (64, 128):
        raise Refused(f"heads are 64 or 128 wide, not {dim}")
    fresh_keys, fresh_values = (fresh_blocks(x, path, lengths) for x in (node_keys, node_values))
    # pl.kernel and not plgpu.kernel: on JAX 0.10, that one takes no mutable arrays.
    cache = [jax.new_ref(x, memory_space=plgpu.GMEM) for x in (keys, values)]
    mesh = plgpu.Mesh(
        grid=(reach(path.shape[1]), batch * kv_heads),
        grid_names=("index", "slot_head"),
        num_threads=1,
        thread_name="warpgroup",
    )
    pl.kernel(
        functools.partial(_compact, kv_heads=kv_heads, in_cache=blocks, interpret=interpret),
        out_type=(),
        mesh=mesh,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        name="compaction",
        interpret=gpu_interpreter() if interpret else False,
    )(*cache, lengths, count, fresh_keys.swapaxes(-1, -2), fresh_values)
    keys, values = (jax.freeze(ref) for ref in cache)
    return keys, values


def _compact(
    keys, values, lengths, count, fresh_keys, fresh_values, *, kv_heads: int, in_cache: int, interpret: bool
) -> None:
    """Changes one block of one slot and head.

    Refs: keys [B, Hk, S / L, D, L] and values [B, Hk, S, D], changed; lengths and count [B]; fresh_keys
    [B, Hk, reach, D, L] and fresh_values [B, Hk, reach, L, D].
    """
    index = lax.axis_index("index")
    slot, head = (
        lax.div(lax.axis_index("slot_head"), kv_heads),
        lax.rem(lax.axis_index("slot_head"), kv_heads),
    )
    block, first, end = written(lengths[slot], count[slot], index, in_cache)
    dtype, dim = keys.dtype, keys.shape[-2]
    tiled = (plgpu.TilingTransform((8, 128 // dtype.itemsize)), plgpu.SwizzleTransform(128))

    def change(old, new, axis, old_smem, new_smem, here):
        plgpu.copy_gmem_to_smem(old, old_smem, here.at[0])
        plgpu.copy_gmem_to_smem(new, new_smem, here.at[1])
        for barrier in (0, 1):
            plgpu.barrier_wait(here.at[barrier])
        position = gpu_iota(old_smem.shape, axis, plgpu.Layout.WGMMA, interpret)
        old_block, new_block = (gpu_load(ref, plgpu.Layout.WGMMA, interpret) for ref in (old_smem, new_smem))
        old_smem[...] = jnp.where((position >= first) & (position < end), new_block, old_block)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(old_smem, old)
        plgpu.wait_smem_to_gmem(0)

    def in_shared_memory(shape, function):
        block_smem = plgpu.SMEM(shape, dtype, transforms=tiled)
        pl.run_scoped(
            function, block_smem, block_smem, plgpu.Barrier(num_barriers=2), collective_axes="warpgroup"
        )

    @pl.when(first < end)
    def _():
        old, new = keys.at[slot, head, block], fresh_keys.at[slot, head, index]
        in_shared_memory((dim, KEY_BLOCK), functools.partial(change, old, new, 1))
        old = values.at[slot, head, pl.ds(block * KEY_BLOCK, KEY_BLOCK)]
        new = fresh_values.at[slot, head, index]
        in_shared_memory((KEY_BLOCK, dim), functools.partial(change, old, new, 0))
