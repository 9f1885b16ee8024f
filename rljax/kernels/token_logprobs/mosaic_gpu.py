"""For Hopper: tiles of 256 tokens times 128 entries by wgmma, which a memory warp feeds through TMA.

Blocks are persistent and take one tile after another, so that the first loads of the next tile overlap with
the reduction of a tile's products to statistics or errors.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import Mesh

from rljax.kernels.noisy_argmax.race import LOG2_E
from rljax.kernels.pallas import gpu_interpreter, gpu_load
from rljax.kernels.token_logprobs import passes
from rljax.kernels.token_logprobs.passes import Statistics
from rljax.numerics.rows import Numerics
from rljax.sampling.distribution import Responses, SamplingParams

_WARPGROUPS = 2  # compute warpgroups, which share the tokens of a tile
_TILE = 128  # rows and columns that a warpgroup computes
_DEPTH = 64  # width of hidden states in a step: 128 bytes, a swizzled row of shared memory
_SLICE = 32  # entries whose exponentials are in registers together
_BLOCKS = 132
_TRANSFORMS = (plgpu.TilingTransform((8, _DEPTH)), plgpu.SwizzleTransform(2 * _DEPTH))
_BAND = 8  # tiles of tokens for which a part of the vocabulary stays in L2


def token_logprobs(
    hidden: Array,
    lm_head: Array,
    targets: Array,
    sampling: SamplingParams,
    numerics: Numerics,
    chunk: int,
    mesh: Mesh | None,
    responses: Responses | None = None,
    entropy_gradient: bool = False,
    used_rows: int | None = None,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """See the package's `token_logprobs`."""
    del numerics, chunk, responses  # logits never exist
    passes.refuse_entropy_gradient(entropy_gradient)
    device = _INTERPRETED if interpret else _DEVICE
    return passes.differentiable(device, hidden, lm_head, targets, sampling, used_rows or len(lm_head), mesh)


def _statistics(
    hidden: Array, head: Array, targets: Array, scale: float, width: int, interpret: bool
) -> Statistics:
    tokens, entries = len(hidden), head.shape[0]

    def kernel(hidden, head, targets, top, total, weighted, chosen) -> None:
        def finish(accumulator, token, entry):
            tile_tokens = pl.ds(token, _TILE)
            tile_targets = _per_token(targets, tile_tokens, interpret)
            x = accumulator[...] * scale
            columns = _columns(entry, interpret)
            if width % _TILE:
                x = jnp.where(columns < width, x, -jnp.inf)
            largest = jnp.max(x, axis=1)
            sums = products = hits = 0.0
            for start in range(0, _TILE, _SLICE):
                part = slice(start, start + _SLICE)
                hit = jnp.where(columns[:, part] == _across(tile_targets, _SLICE), x[:, part], 0.0)
                hits += jnp.sum(hit, axis=1)
                below = x[:, part] - _across(largest, _SLICE)
                terms = jnp.exp2(below * LOG2_E)
                sums += jnp.sum(terms, axis=1)
                if width % _TILE:
                    below = jnp.maximum(below, -1e30)  # it is multiplied by an exponential of 0
                products += jnp.sum(below * terms, axis=1)
            row = lax.div(entry, _TILE)
            top[row, tile_tokens], total[row, tile_tokens] = largest, sums
            weighted[row, tile_tokens], chosen[row, tile_tokens] = products, hits

        _tiles(hidden, head, finish, ahead=4, turned=_turned(interpret))

    out = jax.ShapeDtypeStruct((entries // _TILE, tokens), jnp.float32)
    return Statistics(*_call(kernel, hidden, head, [targets], [out] * 4, {}, interpret))


def _errors(
    hidden: Array,
    head: Array,
    targets: Array,
    log_totals: Array,
    gradients: Array,
    scale: float,
    width: int,
    interpret: bool,
) -> Array:
    def kernel(hidden, head, targets, log_totals, gradients, errors, staged) -> None:
        def finish(accumulator, token, entry):
            tile_tokens = pl.ds(token, _TILE)
            tile_targets = _per_token(targets, tile_tokens, interpret)
            log_total = _per_token(log_totals, tile_tokens, interpret)
            gradient = _per_token(gradients, tile_tokens, interpret)
            x = accumulator[...]
            columns = _columns(entry, interpret)
            own_stage = staged.at[lax.axis_index("wg")]
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for start in range(0, _TILE, _DEPTH):
                part = slice(start, start + _DEPTH)
                probabilities = jnp.exp2((x[:, part] * scale - _across(log_total, _DEPTH)) * LOG2_E)
                if width % _TILE:
                    probabilities = jnp.where(columns[:, part] < width, probabilities, 0.0)
                error = jnp.where(columns[:, part] == _across(tile_targets, _DEPTH), 1.0, 0.0) - probabilities
                own_stage[start // _DEPTH] = (_across(gradient, _DEPTH) * error).astype(errors.dtype)
            plgpu.commit_smem()
            for start in range(0, _TILE, _DEPTH):
                plgpu.copy_smem_to_gmem(
                    own_stage.at[start // _DEPTH], errors.at[tile_tokens, pl.ds(entry + start, _DEPTH)]
                )

        # The staged errors take the memory of a fourth step.
        _tiles(hidden, head, finish, ahead=3, turned=_turned(interpret))
        plgpu.wait_smem_to_gmem(0)

    out = jax.ShapeDtypeStruct((len(hidden), head.shape[0]), hidden.dtype)
    shape = (_WARPGROUPS, _TILE // _DEPTH, _TILE, _DEPTH)
    scratch = {"staged": plgpu.SMEM(shape, hidden.dtype, transforms=_TRANSFORMS)}
    vectors = [targets, log_totals, gradients * scale]
    return _call(kernel, hidden, head, vectors, out, scratch, interpret)


def _call(kernel, hidden: Array, head: Array, vectors: list[Array], out_type, scratch, interpret: bool):
    """Runs a kernel in as many blocks as have work; `vectors` have one value per token."""
    tiles = len(hidden) // (_WARPGROUPS * _TILE) * (head.shape[0] // _TILE)
    return plgpu.kernel(
        kernel,
        out_type=out_type,
        scratch_types=scratch,
        grid=(min(_BLOCKS, tiles),),
        grid_names=("block",),
        num_threads=_WARPGROUPS + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=gpu_interpreter() if interpret else None,
    )(hidden, head.T if _turned(interpret) else head, *vectors)


def _turned(interpret: bool) -> bool:
    """Returns whether kernels get the LM head as [d, C]: JAX 0.10 cannot interpret transposed tiles."""
    return interpret and jax.__version_info__ < (0, 11)


def _tiles(hidden, head, finish: Callable[..., None], ahead: int, turned: bool) -> None:
    """Multiplies hidden states [N, d] with the LM head [C, d], in global memory, tile by tile.

    Args:
      finish: called with a warpgroup's accumulator, float32 [128, 128], and its first token and entry.
      ahead: number of steps to load ahead.
      turned: whether the LM head is [d, C].
    """
    depth = hidden.shape[1] // _DEPTH
    side = _WARPGROUPS * _TILE
    counts = hidden.shape[0] // side, head.shape[turned] // _TILE
    group = lax.axis_index("wg")

    def spec(rows, turned=False):
        return plgpu.BlockSpec(
            (_DEPTH, rows) if turned else (rows, _DEPTH),
            lambda step: (step, 0) if turned else (0, step),
            transforms=_TRANSFORMS,
            memory_space=plgpu.SMEM,
        )

    def pipeline(body, context):
        return plgpu.emit_pipeline_warp_specialized(
            body,
            grid=(depth,),
            memory_registers=40,
            in_specs=[spec(side), spec(_TILE, turned)],
            wg_axis="wg",
            num_compute_wgs=_WARPGROUPS,
            max_concurrent_steps=min(ahead, depth),
            compute_context=context,
        )

    def every_tile(allocations):
        @plgpu.nd_loop((counts[0] * counts[1],), collective_axes="block")
        def _(loop):
            row, column = plgpu.planar_snake(loop.index[0], counts, 0, _BAND)

            def context(run):
                def accumulated(accumulator):
                    run(accumulator)
                    finish(accumulator, row * side + group * _TILE, column * _TILE)

                pl.run_scoped(accumulated, plgpu.ACC((_TILE, _TILE), jnp.float32))

            def step(_, hidden_tile, head_tile, accumulator):
                rows = hidden_tile.at[pl.ds(group * _TILE, _TILE)]
                plgpu.wgmma(accumulator, rows, head_tile if turned else head_tile.transpose((1, 0)))
                plgpu.wgmma_wait(0)  # after it, the memory of the step is reused, even by the next tile
                return accumulator

            tokens, entries = pl.ds(row * side, side), pl.ds(column * _TILE, _TILE)
            part = head.at[:, entries] if turned else head.at[entries]
            pipeline(step, context)(hidden.at[tokens], part, allocations=allocations)

    def nothing(*_):
        pass

    # The allocations of the pipeline do not depend on its body.
    allocations = pipeline(nothing, nothing).get_allocations(hidden, head)
    pl.run_scoped(every_tile, allocations, collective_axes="wg")


def _per_token(ref, tokens, interpret: bool) -> Array:
    """Loads values of 128 tokens, in the register layout of sums over the entries of a tile."""
    return gpu_load(ref.at[tokens], plgpu.Layout.WGMMA.reduce(1), interpret)


def _across(values: Array, entries: int) -> Array:
    """Broadcasts [128] to [128, entries]."""
    return lax.broadcast_in_dim(values, (_TILE, entries), (0,))


def _columns(entry, interpret: bool) -> Array:
    """Returns the vocabulary entries of a tile's columns, int32 [128, 128]."""
    columns = lax.broadcasted_iota(jnp.int32, (_TILE, _TILE), 1)
    columns = columns if interpret else plgpu.layout_cast(columns, plgpu.Layout.WGMMA)
    return columns + entry


def _device(interpret: bool) -> passes.Device:
    return passes.Device(
        statistics=functools.partial(_statistics, interpret=interpret),
        errors=functools.partial(_errors, interpret=interpret),
        rows=_WARPGROUPS * _TILE,
        columns=_TILE,
    )


_DEVICE, _INTERPRETED = _device(False), _device(True)
