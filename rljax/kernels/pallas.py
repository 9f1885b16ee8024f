"""Pallas under all supported versions of JAX, with replacements for what JAX 0.10 cannot interpret."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu


def gpu_interpreter() -> Any:
    """Returns the value of `plgpu.kernel(..., interpret=...)` that runs on a CPU."""
    if hasattr(plgpu, "InterpretGPUParams"):  # since JAX 0.11
        return plgpu.InterpretGPUParams()
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    return InterpretGPUParams()


def gpu_layout(value: Array, layout: Any, interpret: bool) -> Array:
    """`plgpu.layout_cast`."""
    return value if interpret else plgpu.layout_cast(value, layout)


def gpu_iota(shape: tuple[int, ...], axis: int, layout: Any, interpret: bool) -> Array:
    """`plgpu.broadcasted_iota`, int32."""
    if interpret:
        return lax.broadcasted_iota(jnp.int32, shape, axis)
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout)


def gpu_load(ref: Any, layout: Any, interpret: bool) -> Array:
    """As `plgpu.load` of the whole `ref`, in registers of `layout`, in as many pieces as needed."""
    if interpret:
        return ref[...]
    index = () if jax.__version_info__ >= (0, 11) else ((),)
    return plgpu.load(ref, *index, layout=layout, optimized=False)


def gpu_store(ref: Any, value: Array, interpret: bool) -> None:
    """Stores to the whole of `ref`, in global memory. By `ref[...] =` JAX 0.12 would load the old values
    first, and refuses parts of 32-byte sectors.
    """
    if interpret or jax.__version_info__ < (0, 12):
        ref[...] = value
    else:
        plgpu.store(ref, value, optimized=False)
