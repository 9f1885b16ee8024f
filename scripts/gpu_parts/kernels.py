"""Part `kernels`: every kernel at a shape of Qwen2.5-7B, its results beside plain JAX's, and its time.

Differences come first, the most important kernel first; times follow as long as there is time. A difference
is |result - plain JAX's| / |plain JAX's|, and of whole numbers, such as tokens, the share that differs.
`tests/kernels` holds plain JAX against references.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import bench_kernels
from gpu_parts.part import Part, run
from kernel_benchmarks.case import Case
from rljax.kernels.compaction import compaction
from rljax.numerics.kernel_choice import Refused

_LEAST_SECONDS = 12.0  # that timing a kernel takes, with what it compiles


@dataclasses.dataclass(frozen=True)
class Check:
    """A kernel at one of its benchmark's cases.

    Attributes:
      number: of the case.
      prepare: changes the case's arguments.
      quick: implementation that a look at a CPU computes beside plain JAX.
    """

    op: str
    number: int
    prepare: Callable[[tuple[Any, ...]], tuple[Any, ...]] = lambda arguments: arguments
    quick: str = ""


def measure(part: Part) -> None:
    """Measures differences, then times."""
    timed: list[tuple[str, Case]] = []
    for check in CHECKS:
        cases = bench_kernels.op_cases(check.op, part.quick)
        if check.number < len(cases):
            case = cases[check.number]
            _write_difference(part, check, case)
            timed.append((check.op, case))
    for op, case in timed if not part.quick else timed[:1]:
        if part.left() < _LEAST_SECONDS and not part.quick:
            part.note(f"{op}, {case.name}: not timed, {part.left():.0f} s are left")
            continue
        start = time.perf_counter()
        for row in bench_kernels.case_rows(op, case, ["mosaic_gpu"], part.quick):
            figures = row.as_json()
            name, value, unit = (figures.pop(key) for key in ("name", "value", "unit"))
            part.row(
                f"time/{name}", value, unit, compile_seconds=None, repeats=figures.pop("rounds"), **figures
            )
        print(f"{op}: timed in {time.perf_counter() - start:.1f} s", flush=True)


def _write_difference(part: Part, check: Check, case: Case) -> None:
    """Writes a row for the kernel."""
    implementation = check.quick if part.quick else "mosaic_gpu"
    if not implementation:
        return
    arguments = check.prepare(case.make(np.random.default_rng(0)))
    expected = jax.jit(case.functions["xla"])(*arguments)
    name, start = f"{check.op}/{case.name}/{implementation}", time.perf_counter()
    try:
        compiled = jax.jit(case.functions[implementation]).lower(*arguments).compile()
    except Refused as refusal:
        part.note(f"{name}: refused: {refusal}")
        return
    except Exception as error:  # the other kernels are checked all the same
        part.note(f"{name}: {type(error).__name__}: {str(error).splitlines()[0]}")
        return
    seconds, results = time.perf_counter() - start, jax.tree.leaves(compiled(*arguments))
    each = [float(_difference(*pair)) for pair in zip(results, jax.tree.leaves(expected), strict=True)]
    part.row(name, max(each), "difference", compile_seconds=seconds, repeats=None, of_results=each)


@jax.jit
def _difference(got: Array, expected: Array) -> Array:
    if not jnp.issubdtype(expected.dtype, jnp.floating):
        return jnp.mean(got != expected)
    expected = expected.astype(jnp.float32)
    return jnp.linalg.norm(got.astype(jnp.float32) - expected) / jnp.linalg.norm(expected)


def _token_in_cache(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Writes the token's key and value into the cache, where plain JAX reads them while decoding."""
    queries, keys, values, lengths, node_keys, node_values, *rest = arguments
    nothing, one = jnp.zeros((len(queries), 1), jnp.int32), jnp.ones(len(queries), jnp.int32)
    keys, values = compaction(keys, values, node_keys, node_values, nothing, one, lengths, "xla")
    return queries, keys, values, lengths, node_keys, node_values, *rest


CHECKS = (
    Check("tree_attention", 1, _token_in_cache),  # decoding
    Check("tree_attention", 0),
    Check("noisy_argmax", 0, quick="interpret_tpu"),
    Check("compaction", 0),
    Check("quantized_product", 0),
    Check("token_logprobs", 0),
    Check("token_logprobs", 1),
    Check("round_to_nearest", 0),
)


if __name__ == "__main__":
    run("kernels", measure)
