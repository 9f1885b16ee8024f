"""Compaction on a TPU: reads, changes and writes the blocks that paths reach, one after another.

Heads are multiples of 128 wide: XLA then keeps keys and values in memory as [positions, D] each
(`rljax/kernels/tree_attention/mosaic_tpu.py`), and transposing them for the kernel is free.

The cache is changed in place. A step changes one block of all heads of a slot, while the next step's block is
read and the previous one is written.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from rljax.kernels.compaction.blocks import fresh_blocks, reach, written
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
    if keys.dtype not in (jnp.float32, jnp.bfloat16):
        raise Refused(f"keys and values are float32 or bfloat16, not {keys.dtype}")
    batch, kv_heads, blocks, dim, _ = keys.shape
    if dim % 128:
        raise Refused(f"heads are multiples of 128 wide, not {dim}: the cache would be copied")
    blocked = (batch, kv_heads, blocks, KEY_BLOCK, dim)
    per_slot = reach(path.shape[1])
    entries = [fresh_blocks(x, path, lengths) for x in (node_keys, node_values)]

    def fresh(slot, index, lengths, count):
        return slot, 0, index, 0, 0

    fresh_block = pl.BlockSpec((1, kv_heads, 1, KEY_BLOCK, dim), fresh)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    buffers = pltpu.VMEM((2, kv_heads, KEY_BLOCK, dim), keys.dtype)
    keys, values = pl.pallas_call(
        functools.partial(_compact, batch=batch, per_slot=per_slot, in_cache=blocks),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, per_slot),
            in_specs=[fresh_block, fresh_block, anywhere, anywhere],
            out_specs=[anywhere, anywhere],
            scratch_shapes=[
                buffers,
                buffers,
                pltpu.SemaphoreType.DMA((2, 2)),
                pltpu.SemaphoreType.DMA((2, 2)),
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct(blocked, keys.dtype)] * 2,
        input_output_aliases={4: 0, 5: 1},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",) * 2),
        name="compaction",
        interpret=interpret,
    )(lengths, count, *entries, keys.swapaxes(-1, -2), values.reshape(blocked))
    return keys.swapaxes(-1, -2), values.reshape(batch, kv_heads, -1, dim)


def _compact(
    lengths,
    count,
    fresh_keys,
    fresh_values,
    _keys,
    _values,
    keys,
    values,
    key_buffers,
    value_buffers,
    reads,
    writes,
    *,
    batch: int,
    per_slot: int,
    in_cache: int,
) -> None:
    """Changes one block of one slot.

    Refs: lengths and count [B]; fresh_keys and fresh_values [1, Hk, 1, L, D]; keys and values
    [B, Hk, S / L, L, D], in and out the same; scratch: two buffers for a block of each, and a semaphore for
    each.
    """
    step, steps = pl.program_id(0) * per_slot + pl.program_id(1), batch * per_slot

    def on_its_way(of_step, begin: bool, back: bool):
        """Starts, or waits for, the copy of a step's block to its buffer, or back."""
        inside = jnp.clip(of_step, 0, steps - 1)
        slot, index = lax.div(inside, per_slot), lax.rem(inside, per_slot)
        block, first, end = written(lengths[slot], count[slot], index, in_cache)

        @pl.when((of_step == inside) & (first < end))
        def _():
            buffer = lax.rem(inside, 2)
            for which, (cache, buffers) in enumerate([(keys, key_buffers), (values, value_buffers)]):
                there, here = cache.at[slot, :, block], buffers.at[buffer]
                source, target = (here, there) if back else (there, here)
                semaphore = (writes if back else reads).at[buffer, which]
                copy = pltpu.make_async_copy(source, target, semaphore)
                copy.start() if begin else copy.wait()

    @pl.when(step == 0)
    def _():
        on_its_way(step, begin=True, back=False)

    on_its_way(step - 1, begin=False, back=True)  # the next step uses its buffer
    on_its_way(step + 1, begin=True, back=False)
    on_its_way(step, begin=False, back=False)

    slot, buffer = pl.program_id(0), lax.rem(step, 2)
    _, first, end = written(lengths[slot], count[slot], pl.program_id(1), in_cache)

    @pl.when(first < end)
    def _():
        position = lax.broadcasted_iota(jnp.int32, key_buffers.shape[2:], 0)
        new = (position >= first) & (position < end)
        for head in range(key_buffers.shape[1]):
            for buffers, fresh in ((key_buffers, fresh_keys), (value_buffers, fresh_values)):
                buffers[buffer, head] = jnp.where(new, fresh[0, head, 0], buffers[buffer, head])

    on_its_way(step, begin=True, back=True)

    @pl.when(step == steps - 1)
    def _():
        on_its_way(step, begin=False, back=True)
