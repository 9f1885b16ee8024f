"""Part `kernels`: every kernel at a shape of Qwen2.5-7B against float64, beside plain JAX, and its time.

Errors come first, the most important kernel first; times follow as long as there is time. An error is
|result - reference| / |reference| for what is summed, and the share of entries with other bits for what is
copied, counted or chosen.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import bench_kernels
from gpu_parts.engines import kernel_of
from gpu_parts.part import Part, run
from kernel_benchmarks.cases import Case
from rljax.kernels.compaction.base import only_node
from rljax.kernels.round_to_nearest import round_to_nearest
from rljax.models.config import ModelConfig
from rljax.numerics.attention import KEY_BLOCK
from rljax.numerics.kernel_choice import Refused
from rljax.numerics.quantized import QuantizedWeight, dequantize
from rljax.sampling.noise import gumbel_rows

_LEAST_SECONDS = 12.0  # that timing a kernel takes, with what it compiles
_TOKENS = 512  # whose logits exist at once in float64
_EPSILON = ModelConfig.norm_epsilon


@dataclasses.dataclass(frozen=True)
class Check:
    """A kernel at one of its benchmark's cases. The reference, computed from the case's arguments with
    float64 switched on, is float64 where results are compared by their size, else of the result's type.
    """

    op: str
    number: int  # of the case
    reference: Callable[..., tuple[Array, ...]]
    prepare: Callable[[tuple[Any, ...]], tuple[Any, ...]] = lambda arguments: arguments  # changes them
    quick: str = ""  # implementation that a look at a CPU computes beside plain JAX


def measure(part: Part) -> None:
    """Measures errors, then times."""
    timed: list[tuple[str, Case]] = []
    for check in CHECKS:
        for case in bench_kernels.op_cases(check.op, part.quick)[check.number :][:1]:
            write_errors(part, check, case)
            timed.append((check.op, case))
    for op, case in timed if not part.quick else timed[:1]:
        if not part.has_time(f"times of {op}, {case.name}", _LEAST_SECONDS):
            continue
        for row in bench_kernels.case_rows(op, case, [kernel_of(op)], part.quick):
            figures = row.as_json()
            name, value, unit = (figures.pop(key) for key in ("name", "value", "unit"))
            part.row(f"time/{name}", value, unit, repeats=figures.pop("rounds"), **figures)


def write_errors(part: Part, check: Check, case: Case) -> None:
    """Writes a row for the kernel and one for plain JAX."""
    arguments = check.prepare(case.make(np.random.default_rng(0)))
    expected = _expected(check.reference, arguments)
    own = [check.quick] if part.quick else [kernel_of(check.op)]
    for implementation in filter(None, [*own, "xla"]):
        name = f"{check.op}/{case.name}/{implementation}"
        start = time.perf_counter()
        try:
            compiled = jax.jit(case.functions[implementation]).lower(*arguments).compile()
        except Refused as refusal:
            part.note(f"{name}: refused: {refusal}")
            continue
        except Exception as error:  # the other kernels are checked all the same
            part.note(f"{name}: {type(error).__name__}: {str(error).splitlines()[0]}")
            continue
        seconds = time.perf_counter() - start
        with jax.enable_x64(True):
            errors = [
                float(_error(jax.device_put(got, right.sharding), right))
                for got, right in zip(jax.tree.leaves(compiled(*arguments)), expected, strict=True)
            ]
        part.row(name, max(errors), "error", seconds, errors=errors)


def _expected(reference: Callable[..., tuple[Array, ...]], arguments: tuple[Any, ...]) -> tuple[Array, ...]:
    """Computes a reference; what takes float64, beside a TPU, which has none."""
    with jax.enable_x64(True):
        compiled = jax.jit(reference)
        types = {each.dtype for each in jax.eval_shape(compiled, *arguments)}
        if jax.default_backend() == "tpu" and jnp.float64 in types:
            arguments = jax.device_put(arguments, jax.devices("cpu")[0])
        return jax.block_until_ready(compiled(*arguments))


@jax.jit
def _error(got: Array, expected: Array) -> Array:
    if expected.dtype != jnp.float64:
        return jnp.mean(got != expected)
    return jnp.linalg.norm(got.astype(jnp.float64) - expected) / jnp.linalg.norm(expected)


def _rows_of_one_layer(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The rows of the first of several layers, and its matrices, which come last."""
    x, *others, matrices = arguments
    return x[:1], *others, matrices[: len(matrices) // len(x)]


# -- references --------------------------------------------------------------------------------------------


def _decoding(
    keys: Array, values: Array, queries: Array, positions: Array, node_keys: Array, node_values: Array
) -> tuple[Array, ...]:
    """The cache with every slot's token, and the attention of a tree of one node."""
    node = node_keys, node_values
    written = _compacted(keys, values, *node, *only_node(positions), positions)
    itself = jnp.ones((len(queries), 1, 1), bool)
    return *written, *_attention(queries, keys, values, positions, *node, itself)


def _attention(*arguments: Array) -> tuple[Array]:
    """Attention of the nodes, slot by slot."""
    queries, keys, values, lengths, node_keys, node_values, ancestors, *_ = arguments
    _, nodes, heads, dim = queries.shape
    kv_heads, capacity = values.shape[1:3]

    def of_slot(arguments: tuple[Array, ...]) -> Array:
        *arrays, length, ancestors = arguments
        q, k, v, more_k, more_v = (array.astype(jnp.float64) for array in arrays)
        k = k.swapaxes(-1, -2).reshape(kv_heads, capacity, dim)
        k = jnp.concatenate([k, more_k.swapaxes(0, 1)], axis=1)
        v = jnp.concatenate([v, more_v.swapaxes(0, 1)], axis=1)
        committed = jnp.broadcast_to(jnp.arange(capacity) < length, (nodes, capacity))
        seen = jnp.concatenate([committed, ancestors], axis=1)
        q = q.reshape(nodes, kv_heads, heads // kv_heads, dim)
        scores = jnp.einsum("mkgd,ksd->kgms", q, k) * dim**-0.5
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
        return jnp.einsum("kgms,ksd->mkgd", weights, v).reshape(nodes, heads, dim)

    return (lax.map(of_slot, (queries, keys, values, node_keys, node_values, lengths, ancestors)),)


def _packed(
    q: Array, k: Array, v: Array, weights: Array, segment_ids: Array
) -> tuple[Array, Array, Array, Array]:
    """Attention of a packed row and its gradients, a key/value head at a time."""
    _, tokens, heads, dim = q.shape
    seen = np.tri(tokens, dtype=bool) & (segment_ids[0, :, None] == segment_ids[0, None, :])

    def of_head(arguments: tuple[Array, ...]) -> tuple[Array, ...]:
        q, k, v, weights = arguments  # [g, T, D], [T, D], [T, D], [g, T, D]

        def weighed(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
            scores = jnp.where(seen, jnp.einsum("gtd,sd->gts", q, k) * dim**-0.5, -jnp.inf)
            out = jax.nn.softmax(scores, axis=-1) @ v
            return jnp.sum(weights * out), out

        gradients, out = jax.grad(weighed, (0, 1, 2), has_aux=True)(q, k, v)
        return out, *gradients

    def heads_first(x: Array) -> Array:
        return x[0].astype(jnp.float64).swapaxes(0, 1)

    q, k, v, weights = (heads_first(x) for x in (q, k, v, weights))
    grouped = (len(k), heads // len(k), tokens, dim)
    out, *gradients = lax.map(of_head, (q.reshape(grouped), k, v, weights.reshape(grouped)))
    return tuple(x.reshape(-1, tokens, dim).swapaxes(0, 1)[None] for x in (out, *gradients))


def _compacted(*arguments: Array) -> tuple[Array, Array]:
    """Every position takes its node, where it has one: a gather, in place of a scatter."""
    keys, values, node_keys, node_values, path, count, lengths = arguments
    batch, kv_heads, capacity, dim = values.shape
    depth = jnp.arange(capacity) - lengths[:, None]
    node = jnp.take_along_axis(path, jnp.clip(depth, 0, path.shape[1] - 1), axis=1)
    taken = ((depth >= 0) & (depth < count[:, None]))[:, None, :, None]

    def written(cache: Array, nodes: Array) -> Array:
        new = jnp.take_along_axis(nodes, node[:, :, None, None], axis=1).swapaxes(1, 2)
        return jnp.where(taken, new, cache)

    in_a_row = keys.swapaxes(-1, -2).reshape(batch, kv_heads, capacity, dim)
    in_blocks = written(in_a_row, node_keys).reshape(batch, kv_heads, -1, KEY_BLOCK, dim)
    return in_blocks.swapaxes(-1, -2), written(values, node_values)


def _sampled(logits: Array, keys: Array, positions: Array) -> tuple[Array, Array]:
    """Tokens, and their logprobs."""
    noisy = logits.astype(jnp.float64) + gumbel_rows(keys, positions, logits.shape[-1]).astype(jnp.float64)
    tokens = jnp.argmax(noisy, axis=-1).astype(jnp.int32)
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float64))
    return tokens, jnp.take_along_axis(logprobs, tokens[:, None], axis=1)[:, 0]


def _product(x: list[Array], weights: list[QuantizedWeight], _: list[Array]) -> tuple[Array]:
    matrix = dequantize(weights[0]).astype(x[0].dtype)
    return (x[0].astype(jnp.float64) @ matrix.astype(jnp.float64).T,)


def _gated(x: Array, weights: list[Array]) -> tuple[Array]:
    wide, (gate, up) = x[0].astype(jnp.float64), (weight.astype(jnp.float64).T for weight in weights)
    return (jax.nn.silu((wide @ gate).astype(x.dtype).astype(wide.dtype)) * (wide @ up),)


def _heads(x: Array, angles: Array, matrices: list[Array]) -> tuple[Array]:
    """Rounded before the norms, as every backend does."""
    heads, dim = [], 2 * angles.shape[-1]
    cos, sin = (angles[:, :, None, part].astype(jnp.float64) for part in (0, 1))
    for number, matrix in enumerate(matrices):
        y = x[0].astype(jnp.float64) @ matrix.astype(jnp.float64).T
        y = y.astype(x.dtype).astype(jnp.float64).reshape(len(y), 1, -1, dim)
        if number < 2:
            y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + _EPSILON)
            first, second = jnp.split(y, 2, axis=-1)
            y = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
        heads.append(y)
    return (jnp.concatenate(heads, axis=2),)


def _rounded(weight: Array) -> tuple[Array, ...]:
    """What plain JAX rounds to: every backend has its bits."""
    with jax.enable_x64(False):
        return tuple(jax.tree.leaves(round_to_nearest(weight, 4, 128, "xla")))


def _scores(hidden: Array, lm_head: Array, targets: Array) -> tuple[Array, Array]:
    """Logprobs of the targets, and entropies."""
    head = lm_head.astype(jnp.float64)

    @jax.checkpoint
    def of_chunk(chunk: tuple[Array, Array]) -> tuple[Array, Array]:
        logprobs = jax.nn.log_softmax(chunk[0].astype(jnp.float64) @ head.T)
        chosen = jnp.take_along_axis(logprobs, chunk[1][:, None], axis=1)[:, 0]
        return chosen, -jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1)

    size = min(_TOKENS, targets.shape[1])
    chunks = hidden.reshape(-1, size, hidden.shape[-1]), targets.reshape(-1, size)
    return tuple(each.reshape(targets.shape) for each in lax.map(of_chunk, chunks))


def _gradients(hidden: Array, lm_head: Array, targets: Array) -> tuple[Array, Array]:
    arguments = hidden.astype(jnp.float64), lm_head.astype(jnp.float64)
    return jax.grad(lambda *args: jnp.sum(_scores(*args, targets)[0]), (0, 1))(*arguments)


CHECKS = (
    Check("tree_attention", 1, _decoding),
    Check("tree_attention", 0, _attention),
    Check("noisy_argmax", 0, _sampled, quick="interpret_tpu"),
    Check("compaction", 0, _compacted),
    Check("gated_product", 0, _gated, _rows_of_one_layer),
    Check("head_products", 0, _heads, _rows_of_one_layer),
    Check("quantized_product", 0, _product, lambda arguments: tuple(each[:1] for each in arguments)),
    Check("token_logprobs", 0, _scores),
    Check("packed_attention", 0, _packed, quick="interpret_triton"),
    Check("token_logprobs", 1, _gradients),
    Check("round_to_nearest", 0, _rounded),
)


if __name__ == "__main__":
    run("kernels", measure)
