"""Pallas under both versions of JAX."""

from typing import Any

from jax import Array
from jax.experimental.pallas import mosaic_gpu as plgpu


def gpu_interpreter() -> Any:
    """What `plgpu.kernel(..., interpret=...)` wants in order to run on a CPU."""
    if hasattr(plgpu, "InterpretGPUParams"):  # JAX 0.11
        return plgpu.InterpretGPUParams()
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    return InterpretGPUParams()


def load(ref: Any, layout: Any, interpret: bool) -> Array:
    """All of `ref`, in a kernel for GPUs, in registers of `layout`."""
    if interpret:  # JAX 0.10 interprets no other way to load
        return ref[...]
    if hasattr(plgpu, "InterpretGPUParams"):  # JAX 0.11
        return plgpu.load(ref, layout=layout, optimized=False)
    return plgpu.load(ref, (), layout=layout, optimized=False)
