"""Formulations of a policy's product with its weights: for which numbers of rows a row has the same bits, and
what that costs.

A compiler chooses a kernel by the number of rows, and with it an order of summation. Rows in slabs of one
size are multiplied by one kernel, one slab after another.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kernel_benchmarks.ceilings import median_seconds
from rljax.numerics.products import ProductForm, dot, padded_dot

_WEIGHT_BYTES = 96 * 2**20  # of all matrices together, so that the device's cache does not hold them
REPEATS = 5
_THREADS = 8  # that compile


FORMULATIONS = {
    "rows as they are": ProductForm(1),
    "multiples of 64": ProductForm(64, 64),
    "slabs of 64": ProductForm(64, 64, slabs=True),
    "slabs of 256": ProductForm(256, 256, slabs=True),
}
_Program = tuple[int, int]
"""Rows that are multiplied, and rows of a slab; 0 where all of them are multiplied at a time."""


def _program(form: ProductForm, rows: int) -> _Program:
    return form.padded(rows), form.multiple if form.slabs else 0


@dataclasses.dataclass(frozen=True)
class Result:
    """What a formulation does with numbers of rows."""

    differing: tuple[int, ...]  # whose results have other bits than those of the same rows among the most
    share: float  # the largest one of entries that differ
    microseconds: dict[int, float]  # of one product
    price: dict[int, float]  # time over that of the rows as they are


def compare_rows(
    inputs: int, outputs: int, counts: Sequence[int], options: Mapping[str, Any]
) -> tuple[dict[str, Result], float]:
    """Compares the formulations of a bfloat16 product [inputs -> outputs] over ascending numbers of rows,
    compiled with these options. Returns results by the name of the formulation, and the seconds that
    compiling all programs took.
    """
    matrices = max(min(_WEIGHT_BYTES // (2 * inputs * outputs), 8), 1)
    keys = jax.random.split(jax.random.key(0), matrices)
    weights = [jax.random.normal(key, (outputs, inputs), jnp.bfloat16) for key in keys]
    most = max(form.padded(counts[-1]) for form in FORMULATIONS.values())
    # On the host, where neither cutting them nor comparing results compiles anything.
    normals = np.random.default_rng(0).standard_normal((matrices, most, inputs), np.float32)
    all_rows = normals.astype(jnp.bfloat16)
    pairs = sorted({_program(form, count) for form in FORMULATIONS.values() for count in counts})
    start = time.perf_counter()
    compiled = functools.partial(_compiled, weights, dict(options))
    with ThreadPoolExecutor(_THREADS) as threads:
        programs = dict(zip(pairs, threads.map(compiled, pairs), strict=True))
    compile_seconds = time.perf_counter() - start
    computed, seconds = {}, {}
    for pair in pairs:
        rows = [jnp.asarray(each[: pair[0]]) for each in all_rows]
        computed[pair] = jax.device_get(programs[pair](rows, weights))
        taken = median_seconds(programs[pair], rows, weights, repeats=REPEATS)
        seconds[pair] = taken / matrices
    results, plain = {}, {}
    for name, form in FORMULATIONS.items():
        taken = {count: seconds[_program(form, count)] for count in counts}
        plain = plain or taken
        many, shares = computed[_program(form, counts[-1])], {}
        for count in counts:
            pairs = zip(computed[_program(form, count)], many, strict=True)
            shares[count] = max(float(np.mean(a[:count] != b[:count])) for a, b in pairs)
        results[name] = Result(
            tuple(count for count, share in shares.items() if share),
            max(shares.values()),
            {count: 1e6 * time for count, time in taken.items()},
            {count: time / plain[count] for count, time in taken.items()},
        )
    return results, compile_seconds


def float32_error(inputs: int, outputs: int, rows: int) -> float:
    """Returns the relative error of a float32 product: about 3e-4 where factors are rounded to TF32."""
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((size, inputs), np.float32) for size in (rows, outputs))
    expected = a.astype(np.float64) @ b.astype(np.float64).T
    got = np.asarray(jax.jit(dot)(a, b), np.float64)
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


def _compiled(weights: list[Array], options: dict[str, Any], program: _Program) -> Callable[..., list[Array]]:
    """Compiles a program that multiplies by one matrix after another, as many rows each time."""
    (count, slab), form = program, ProductForm(1)
    if slab:
        form = ProductForm(slab, slab, slabs=True)

    def products(rows: list[Array], weights: list[Array]) -> list[Array]:
        return [padded_dot(x, weight, form) for x, weight in zip(rows, weights, strict=True)]

    rows = [jax.ShapeDtypeStruct((count, weight.shape[1]), weight.dtype) for weight in weights]
    return jax.jit(products).lower(rows, weights).compile(compiler_options=options)
