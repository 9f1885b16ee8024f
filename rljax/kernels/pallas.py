"""Pallas under both versions of JAX."""

import inspect
from typing import Any

from jax import Array
from jax.experimental.pallas import mosaic_gpu as plgpu


def gpu_interpreter() -> Any:
    """What `plgpu.kernel(..., interpret=...)` wants in order to run on a CPU."""
    if hasattr(plgpu, "InterpretGPUParams"):  # JAX 0.11
        return plgpu.InterpretGPUParams()
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    return InterpretGPUParams()


def gpu_load(ref: Any, layout: Any) -> Array:
    """`plgpu.load` of all that `ref` says, into registers of a layout, in as many pieces as it takes."""
    index = (
        ((),) if inspect.signature(plgpu.load).parameters["idx"].default is inspect.Parameter.empty else ()
    )
    return plgpu.load(ref, *index, layout=layout, optimized=False)
