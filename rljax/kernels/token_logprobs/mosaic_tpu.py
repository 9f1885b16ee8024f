"""For TPUs: tiles of tokens times entries, with statistics per lane until the end of a chunk."""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh

from rljax.kernels.token_logprobs import passes
from rljax.kernels.token_logprobs.passes import Statistics
from rljax.numerics.rows import Numerics
from rljax.sampling.distribution import Responses, SamplingParams

_LANES = 128
_ROWS = 512  # tokens per tile: many, since every tile of tokens reads all tiles of the LM head
_COLUMNS = 256
_VMEM = 64 * 2**20


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


def _call(
    kernel, hidden: Array, head: Array, columns: list[Array], out_shape, out_spec, last: str, interpret: bool
):
    """Runs a kernel on every tile, with the vocabulary innermost; `columns` have one value per token."""
    tokens, width = hidden.shape
    column = pl.BlockSpec((_ROWS, 1), lambda row, part: (row, 0))
    return pl.pallas_call(
        kernel,
        out_shape=out_shape,
        grid=(tokens // _ROWS, head.shape[0] // _COLUMNS),
        in_specs=[
            pl.BlockSpec((_ROWS, width), lambda row, part: (row, 0)),
            pl.BlockSpec((_COLUMNS, width), lambda row, part: (part, 0)),
            *[column] * len(columns),
        ],
        out_specs=out_spec,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", last), vmem_limit_bytes=_VMEM),
        interpret=interpret,
    )(hidden, head, *(vector[:, None] for vector in columns))


def _logits(hidden, head, scale: float) -> Array:
    contract = (((1,), (1,)), ((), ()))
    return lax.dot_general(hidden[...], head[...], contract, preferred_element_type=jnp.float32) * scale


def _statistics(
    hidden: Array, head: Array, targets: Array, scale: float, width: int, interpret: bool
) -> Statistics:
    lanes = jax.ShapeDtypeStruct((len(hidden), _LANES), jnp.float32)
    spec = pl.BlockSpec((_ROWS, _LANES), lambda row, part: (row, 0))
    kernel = functools.partial(_statistics_kernel, scale=scale, width=width)
    outputs = _call(kernel, hidden, head, [targets], [lanes] * 4, [spec] * 4, "arbitrary", interpret)
    return Statistics(*(output.T for output in outputs))


def _statistics_kernel(hidden, head, targets, top, total, weighted, chosen, *, scale, width) -> None:
    part = pl.program_id(1)

    @pl.when(part == 0)
    def _():
        top[...] = jnp.full(top.shape, -jnp.inf, jnp.float32)
        for ref in (total, weighted, chosen):
            ref[...] = jnp.zeros(ref.shape, jnp.float32)

    x = _logits(hidden, head, scale)
    entries = part * _COLUMNS + lax.broadcasted_iota(jnp.int32, x.shape, 1)
    hit = jnp.where(entries == targets[...], x, 0.0)
    if width % _COLUMNS:
        x = jnp.where(entries < width, x, -jnp.inf)
    groups = [slice(start, start + _LANES) for start in range(0, _COLUMNS, _LANES)]
    before = top[...]
    after = functools.reduce(jnp.maximum, [x[:, group] for group in groups], before)
    away = jnp.where(after == -jnp.inf, 0.0, after)
    fall = jnp.where(before == -jnp.inf, 0.0, before - away)
    share = jnp.where(before == -jnp.inf, 0.0, jnp.exp(fall))
    sums, products = total[...], weighted[...]
    products = share * (products + fall * sums)
    sums = share * sums
    for group in groups:
        below = x[:, group] - away
        terms = jnp.exp(below)
        sums += terms
        products += jnp.where(terms > 0, below * terms, 0.0)
        chosen[...] += hit[:, group]
    top[...], total[...], weighted[...] = after, sums, products


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
    out = jax.ShapeDtypeStruct((len(hidden), head.shape[0]), hidden.dtype)
    spec = pl.BlockSpec((_ROWS, _COLUMNS), lambda row, part: (row, part))
    kernel = functools.partial(_errors_kernel, scale=scale, width=width)
    columns = [targets, log_totals, gradients * scale]
    return _call(kernel, hidden, head, columns, out, spec, "parallel", interpret)


def _errors_kernel(hidden, head, targets, log_totals, gradients, errors, *, scale, width) -> None:
    x = _logits(hidden, head, scale)
    entries = pl.program_id(1) * _COLUMNS + lax.broadcasted_iota(jnp.int32, x.shape, 1)
    probabilities = jnp.exp(x - log_totals[...])
    if width % _COLUMNS:
        probabilities = jnp.where(entries < width, probabilities, 0.0)
    hit = jnp.where(entries == targets[...], 1.0, 0.0)
    errors[...] = (gradients[...] * (hit - probabilities)).astype(errors.dtype)


def _device(interpret: bool) -> passes.Device:
    return passes.Device(
        statistics=functools.partial(_statistics, interpret=interpret),
        errors=functools.partial(_errors, interpret=interpret),
        rows=_ROWS,
        columns=_COLUMNS,
    )


_DEVICE, _INTERPRETED = _device(False), _device(True)
