"""Compaction on a TPU: reads, changes and writes the blocks that paths reach, one after another.

XLA keeps keys and values in memory so that their tiles waste little
(`rljax/kernels/tree_attention/mosaic_tpu.py`): as [positions, D] each with heads of 128 and multiples, and as
[D, positions] with heads of 64. The kernel takes these layouts, so transposing for it is free. Of heads of 64
it changes 128 positions at a time, as many as a tile of values has.

The cache is changed in place. A step changes one block of all heads of a slot, while the next step's block is
read and the previous one is written.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from rljax.kernels.compaction.blocks import fresh_blocks, reach, written
from rljax.numerics.attention import KEY_BLOCK
from rljax.numerics.kernel_choice import Refused

_LANES = 128
_NARROW = 64  # the width of heads whose keys and values XLA stores as [D, positions]


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
    narrow = dim == _NARROW
    if dim % _LANES and not narrow:
        raise Refused(
            f"heads are {_NARROW} or a multiple of {_LANES} wide, not {dim}: the cache would be copied"
        )
    size = _LANES if narrow else KEY_BLOCK
    if blocks * KEY_BLOCK % size:
        raise Refused(
            f"a cache of heads of {dim} has a multiple of {size} positions, not {blocks * KEY_BLOCK}"
        )
    in_cache, per_slot = blocks * KEY_BLOCK // size, reach(path.shape[1], size)
    fresh_keys, fresh_values = (fresh_blocks(x, path, lengths, size) for x in (node_keys, node_values))
    if narrow:
        parts = size // KEY_BLOCK
        key_block, value_block = (kv_heads, parts, dim, KEY_BLOCK), (kv_heads, dim, size)
        there = keys.reshape(batch, kv_heads, in_cache, *key_block[1:]), values.swapaxes(-1, -2)
        fresh_keys = fresh_keys.reshape(batch, kv_heads, per_slot, parts, KEY_BLOCK, dim).swapaxes(-1, -2)
        fresh_values = fresh_values.swapaxes(-1, -2)
    else:
        key_block = value_block = (kv_heads, size, dim)
        there = keys.swapaxes(-1, -2), values.reshape(batch, kv_heads, in_cache, size, dim)

    def fresh_block(block: tuple[int, ...]) -> pl.BlockSpec:
        shape = (1, kv_heads, 1, *block[1:])
        return pl.BlockSpec(
            shape, lambda slot, index, lengths, count: (slot, 0, index, *(0,) * len(block[1:]))
        )

    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    semaphores = pltpu.SemaphoreType.DMA((2, 2))
    new_keys, new_values = pl.pallas_call(
        functools.partial(
            _compact, batch=batch, per_slot=per_slot, in_cache=in_cache, size=size, narrow=narrow
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, per_slot),
            in_specs=[fresh_block(key_block), fresh_block(value_block), anywhere, anywhere],
            out_specs=[anywhere, anywhere],
            scratch_shapes=[
                pltpu.VMEM((2, *key_block), keys.dtype),
                pltpu.VMEM((2, *value_block), keys.dtype),
                semaphores,
                semaphores,
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in there],
        input_output_aliases={4: 0, 5: 1},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",) * 2),
        name="compaction",
        interpret=interpret,
    )(lengths, count, fresh_keys, fresh_values, *there)
    if narrow:
        return new_keys.reshape(keys.shape), new_values.swapaxes(-1, -2)
    return new_keys.swapaxes(-1, -2), new_values.reshape(values.shape)


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
    size: int,
    narrow: bool,
) -> None:
    """Changes one block of one slot.

    Refs: lengths and count [B]; fresh_keys and fresh_values [1, Hk, 1, L, D]; keys and values
    [B, Hk, S / L, L, D], in and out the same; scratch: two buffers for a block of each, and a semaphore for
    each. If `narrow`, keys have [2, D, L / 2] in the place of [L, D], and values [D, L], in a cache of
    [B, Hk, D, S].
    """
    step, steps = pl.program_id(0) * per_slot + pl.program_id(1), batch * per_slot

    def on_its_way(of_step, begin: bool, back: bool):
        """Starts, or waits for, the copy of a step's block to its buffer, or back."""
        inside = jnp.clip(of_step, 0, steps - 1)
        slot, index = lax.div(inside, per_slot), lax.rem(inside, per_slot)
        block, first, end = written(lengths[slot], count[slot], index, in_cache, size)

        @pl.when((of_step == inside) & (first < end))
        def _():
            buffer = lax.rem(inside, 2)
            for which, (cache, buffers) in enumerate([(keys, key_buffers), (values, value_buffers)]):
                of_block = (
                    (block,) if cache is keys or not narrow else (slice(None), pl.ds(block * size, size))
                )
                there, here = cache.at[slot, :, *of_block], buffers.at[buffer]
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
    _, first, end = written(lengths[slot], count[slot], pl.program_id(1), in_cache, size)

    @pl.when(first < end)
    def _():
        for buffers, fresh in ((key_buffers, fresh_keys), (value_buffers, fresh_values)):
            for place in itertools.product(*map(range, buffers.shape[1:-2])):  # heads, and parts of a block
                axis, before = (1, sum(place[1:]) * KEY_BLOCK) if narrow else (0, 0)
                position = before + lax.broadcasted_iota(jnp.int32, buffers.shape[-2:], axis)
                new, (head, *part) = (position >= first) & (position < end), place
                here = (buffer, *place)
                buffers[here] = jnp.where(new, fresh[0, head, 0, *part], buffers[here])

    on_its_way(step, begin=True, back=True)

    @pl.when(step == steps - 1)
    def _():
        on_its_way(step, begin=False, back=True)
