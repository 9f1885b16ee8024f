"""Part `ceilings`: what the device can do, with which every other part is compared.

Bytes a second of a copy and of a read, operations a second of a large bfloat16 product, and what it costs to
start something: a program from the host, a kernel within a program, and a turn of a loop that ends when the
device says so, as decoding does.
"""

import functools
import time

import jax
import jax.numpy as jnp
from jax import Array, lax

from gpu_parts.part import Part, run
from kernel_benchmarks.ceilings import copy_bandwidth, matrix_rate, median_seconds

_REPEATS = 7
_TURNS = 256


def measure(part: Part) -> None:
    """Measures the ceilings, those that everything is compared with first."""
    megabytes, size, kernels = (8, 128, 4) if part.quick else (2048, 8192, 64)
    row = functools.partial(part.row, repeats=_REPEATS)
    row("copy", copy_bandwidth(megabytes) / 1e9, "GB/s", megabytes=megabytes)
    row("bfloat16 product", matrix_rate(size) / 1e12, "TFLOP/s", size=size)
    array = jax.random.normal(jax.random.key(0), (megabytes, 2**19), jnp.bfloat16)  # 1 MiB a row
    number = jnp.ones(128)
    for name, function, x, calls, amount, details in (
        ("read", lambda x: jnp.sum(x, axis=1, dtype=jnp.float32), array, 1, 0, {"megabytes": megabytes}),
        ("program, one after another", lambda x: x + 1, number, 100, 1, {}),
        ("program, waited for", lambda x: x + 1, number, 1, 1, {}),
        ("kernel in a program", functools.partial(_chain, kernels=kernels), number, 1, kernels, {}),
        ("turn of a loop of unknown length", _loop, number, 1, _TURNS, {}),
    ):
        start = time.perf_counter()
        compiled = jax.jit(function).lower(x).compile()
        to_compile = time.perf_counter() - start
        seconds = median_seconds(compiled, x, calls=calls, repeats=_REPEATS)
        figure = (seconds / amount * 1e6, "µs") if amount else (x.nbytes / seconds / 1e9, "GB/s")
        row(name, *figure, compile_seconds=to_compile, **details)


def _chain(x: Array, kernels: int) -> Array:
    """Takes the mean of x from x again and again, which no compiler fuses: each mean is a kernel."""
    for _ in range(kernels):
        x = x - jnp.mean(x)
    return x


def _loop(x: Array) -> Array:
    return lax.while_loop(lambda x: x[0] < _TURNS, lambda x: x + 1, x * 0)


if __name__ == "__main__":
    run("ceilings", measure)
