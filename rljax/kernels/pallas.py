"""Pallas under both versions of JAX."""

from typing import Any

import jax
from jax import Array
from jax.experimental.pallas import mosaic_gpu as plgpu


def gpu_interpreter() -> Any:
    """What `plgpu.kernel(..., interpret=...)` wants in order to run on a CPU."""
    if hasattr(plgpu, "InterpretGPUParams"):  # JAX 0.11
        return plgpu.InterpretGPUParams()
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    return InterpretGPUParams()


def gpu_load(ref: Any, index: Any, layout: Any) -> Array:
    """Part of a reference in registers, entry by entry where nothing faster gives this layout."""
    if jax.__version_info__ >= (0, 11):
        return plgpu.load(ref.at[index], layout=layout, optimized=False)
    return plgpu.load(ref, index, layout=layout, optimized=False)
