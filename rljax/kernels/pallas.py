"""Pallas under both versions of JAX."""

from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu


def gpu_interpreter() -> Any:
    """What `plgpu.kernel(..., interpret=...)` wants in order to run on a CPU."""
    if hasattr(plgpu, "InterpretGPUParams"):  # JAX 0.11
        return plgpu.InterpretGPUParams()
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    return InterpretGPUParams()
