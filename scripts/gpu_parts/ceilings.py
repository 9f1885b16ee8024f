"""Part `ceilings`: what the device can do, with which every other part is compared.

Bytes a second of a copy and of a read, operations a second of a large bfloat16 product, and what it costs to
start something: a program from the host, a kernel within a program, and a turn of a loop that ends when the
device says so, as decoding does.
"""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from gpu_parts.part import Part, run
from kernel_benchmarks.ceilings import copy_bandwidth, matrix_rate

_REPEATS = 7
_KERNELS = 64  # in a chain
_TURNS = 256


def measure(part: Part) -> None:
    """Measures the ceilings, those that everything is compared with first."""
    megabytes, size = (8, 128) if part.quick else (2048, 8192)
    bandwidth = copy_bandwidth(megabytes)
    part.row("copy", bandwidth / 1e9, "GB/s", compile_seconds=None, repeats=_REPEATS, megabytes=megabytes)
    rate = matrix_rate(size)
    part.row("bfloat16 product", rate / 1e12, "TFLOP/s", compile_seconds=None, repeats=_REPEATS, size=size)
    array = jax.random.normal(jax.random.key(0), (megabytes, 2**19), jnp.bfloat16)  # 1 MiB a row
    seconds, compiled = _seconds(lambda x: jnp.sum(x, axis=1, dtype=jnp.float32), array)
    part.row(
        "read",
        array.nbytes / seconds / 1e9,
        "GB/s",
        compile_seconds=compiled,
        repeats=_REPEATS,
        megabytes=megabytes,
    )
    number = jnp.ones(128)
    seconds, compiled = _seconds(lambda x: x + 1, number, calls=100)
    part.row("program, one after another", seconds * 1e6, "µs", compile_seconds=compiled, repeats=_REPEATS)
    seconds, compiled = _seconds(lambda x: x + 1, number)
    part.row("program, waited for", seconds * 1e6, "µs", compile_seconds=compiled, repeats=_REPEATS)
    kernels = 4 if part.quick else _KERNELS
    seconds, compiled = _seconds(functools.partial(_chain, kernels=kernels), number)
    part.row("kernel in a program", seconds / kernels * 1e6, "µs", compile_seconds=compiled, repeats=_REPEATS)
    seconds, compiled = _seconds(_loop, number)
    part.row(
        "turn of a loop of unknown length",
        seconds / _TURNS * 1e6,
        "µs",
        compile_seconds=compiled,
        repeats=_REPEATS,
    )


def _chain(x: Array, kernels: int) -> Array:
    """Takes the mean of x from x again and again, which no compiler fuses: each mean is a kernel."""
    for _ in range(kernels):
        x = x - jnp.mean(x)
    return x


def _loop(x: Array) -> Array:
    return lax.while_loop(lambda x: x[0] < _TURNS, lambda x: x + 1, x * 0)


def _seconds(function: Callable[[Array], Any], array: Array, calls: int = 1) -> tuple[float, float]:
    """Returns the median seconds of a call, and what compiling took."""
    start = time.perf_counter()
    compiled = jax.jit(function).lower(array).compile()
    to_compile = time.perf_counter() - start
    jax.block_until_ready(compiled(array))
    taken = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        for _ in range(calls):
            out = compiled(array)
        jax.block_until_ready(out)
        taken.append((time.perf_counter() - start) / calls)
    return statistics.median(taken), to_compile


if __name__ == "__main__":
    run("ceilings", measure)
