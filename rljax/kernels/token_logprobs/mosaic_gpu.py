"""For Hopper: tiles of 256 tokens times 128 entries by wgmma, which a memory warp feeds through TMA.

Blocks stay and take one tile after the other, so that the first loads of the next are under way while a
tile's products are made into statistics, or errors.
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

_WARPGROUPS = 2  # that compute; each has its own tokens of a tile
_TILE = 128  # a side of what one of them computes
_DEPTH = 64  # of hidden states in a step: 128 bytes, what a swizzled row of shared memory holds
_SLICE = 32  # entries whose exponentials are in registers at once
_BLOCKS = 132
_TRANSFORMS = (plgpu.TilingTransform((8, _DEPTH)), plgpu.SwizzleTransform(2 * _DEPTH))
_BAND = 8  # tiles of tokens that are done with a part of the vocabulary before the next: what L2 holds


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
    interpret: bool = False,
) -> tuple[Array, Array]:
    """See the package's `token_logprobs`."""
    del numerics, chunk, mesh, responses  # no logits are held; the caller has one device
    passes.refuse_entropy_gradient(entropy_gradient)
    return passes.differentiable(_INTERPRETED if interpret else _DEVICE, hidden, lm_head, targets, sampling)


def _statistics(
    hidden: Array, head: Array, targets: Array, scale: float, width: int, interpret: bool
) -> Statistics:
    tokens, entries = len(hidden), head.shape[0]

    def kernel(hidden, head, targets, top, total, weighted, chosen) -> None:
        def finish(accumulator, token, entry):
            own = pl.ds(token, _TILE)
            wanted = _per_token(targets, own, interpret)
            x = accumulator[...] * scale
            columns = _columns(entry, interpret)
            if width % _TILE:
                x = jnp.where(columns < width, x, -jnp.inf)
            largest = jnp.max(x, axis=1)
            sums = products = hits = 0.0
            for start in range(0, _TILE, _SLICE):
                part = slice(start, start + _SLICE)
                hit = jnp.where(columns[:, part] == _across(wanted, _SLICE), x[:, part], 0.0)
                hits += jnp.sum(hit, axis=1)
                below = x[:, part] - _across(largest, _SLICE)
                terms = jnp.exp2(below * LOG2_E)
                sums += jnp.sum(terms, axis=1)
                if width % _TILE:
                    below = jnp.maximum(below, -1e30)  # times an exponential of 0
                products += jnp.sum(below * terms, axis=1)
            row = lax.div(entry, _TILE)
            top[row, own], total[row, own] = largest, sums
            weighted[row, own], chosen[row, own] = products, hits

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
            own = pl.ds(token, _TILE)
            wanted = _per_token(targets, own, interpret)
            log_total = _per_token(log_totals, own, interpret)
            gradient = _per_token(gradients, own, interpret)
            x = accumulator[...]
            columns = _columns(entry, interpret)
            mine = staged.at[lax.axis_index("wg")]
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for start in range(0, _TILE, _DEPTH):
                part = slice(start, start + _DEPTH)
                probabilities = jnp.exp2((x[:, part] * scale - _across(log_total, _DEPTH)) * LOG2_E)
                if width % _TILE:
                    probabilities = jnp.where(columns[:, part] < width, probabilities, 0.0)
                error = jnp.where(columns[:, part] == _across(wanted, _DEPTH), 1.0, 0.0) - probabilities
                mine[start // _DEPTH] = (_across(gradient, _DEPTH) * error).astype(errors.dtype)
            plgpu.commit_smem()
            for start in range(0, _TILE, _DEPTH):
                plgpu.copy_smem_to_gmem(
                    mine.at[start // _DEPTH], errors.at[own, pl.ds(entry + start, _DEPTH)]
                )

        _tiles(
            hidden, head, finish, ahead=3, turned=_turned(interpret)
        )  # what is staged takes the memory of a fourth
        plgpu.wait_smem_to_gmem(0)

    out = jax.ShapeDtypeStruct((len(hidden), head.shape[0]), hidden.dtype)
    shape = (_WARPGROUPS, _TILE // _DEPTH, _TILE, _DEPTH)
    scratch = {"staged": plgpu.SMEM(shape, hidden.dtype, transforms=_TRANSFORMS)}
    vectors = [targets, log_totals, gradients * scale]
    return _call(kernel, hidden, head, vectors, out, scratch, interpret)


def _call(kernel, hidden: Array, head: Array, vectors: list[Array], out_type, scratch, interpret: bool):
    """Runs a kernel in as many blocks as there is work for, with a value of each token in `vectors`."""
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
    """Whether kernels get the LM head as [d, C]: JAX 0.10 interprets no product with a transposed tile."""
    return interpret and jax.__version_info__ < (0, 11)


def _tiles(hidden, head, finish: Callable[..., None], ahead: int, turned: bool) -> None:
    """Multiplies hidden states [N, d] with the LM head [C, d], in global memory, tile by tile.

    Args:
      finish: what is done with a warpgroup's part: gets the accumulator, float32 [128, 128], and its first
        token and entry.
      ahead: steps that are loaded before they are needed.
      turned: the LM head is [d, C].
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
                own = hidden_tile.at[pl.ds(group * _TILE, _TILE)]
                plgpu.wgmma(accumulator, own, head_tile if turned else head_tile.transpose((1, 0)))
                plgpu.wgmma_wait(0)  # behind it, the step's memory is loaded anew, also with the next tile
                return accumulator

            tokens, entries = pl.ds(row * side, side), pl.ds(column * _TILE, _TILE)
            part = head.at[:, entries] if turned else head.at[entries]
            pipeline(step, context)(hidden.at[tokens], part, allocations=allocations)

    def nothing(*_):
        pass

    # What the pipeline allocates does not depend on what it does.
    allocations = pipeline(nothing, nothing).get_allocations(hidden, head)
    pl.run_scoped(every_tile, allocations, collective_axes="wg")


def _per_token(ref, tokens, interpret: bool) -> Array:
    """Values of 128 tokens, as sums over the entries of a tile lie in registers."""
    return gpu_load(ref.at[tokens], plgpu.Layout.WGMMA.reduce(1), interpret)


def _across(values: Array, entries: int) -> Array:
    """[128] -> [128, entries]."""
    return lax.broadcast_in_dim(values, (_TILE, entries), (0,))


def _columns(entry, interpret: bool) -> Array:
    """The vocabulary's entries of a tile, int32 [128, 128]."""
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
