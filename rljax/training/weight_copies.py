"""Copies of a policy's matrices in the compute dtype, which every micro-batch of an update reads.

Those of the layers: embedding and LM head are cast by the rows and chunks of them that are read.
"""

from typing import Any

from jax import Array

from rljax.config import TrainingConfig
from rljax.models.transformer import Params
from rljax.numerics.cast_weight import CastWeight
from rljax.numerics.rows import Numerics


def weight_copies(params: Params, numerics: Numerics, training: TrainingConfig) -> tuple[Params, ...]:
    """Returns the matrices of the layers in the compute dtype, `{"layers": [{name: [out, in]}]}`, laid out as
    they are; nothing where the dtype is float32, or without `training.cast_once`.
    """
    if numerics.compute_dtype == "float32" or not training.cast_once:
        return ()

    def copies(layer: dict[str, Array]) -> dict[str, Array]:
        return {name: leaf.astype(numerics.dtype) for name, leaf in layer.items() if leaf.ndim > 1}

    return ({"layers": list(map(copies, params["layers"]))},)


def with_copies(params: Params, copies: Params | None = None) -> Params:
    """Returns a policy that reads the copies, if there are any, and whose gradients go to `params`."""
    if copies is None:
        return params

    def layer_with(layer: dict[str, Array], copied: dict[str, Array]) -> dict[str, Any]:
        return layer | {name: CastWeight(layer[name], copy) for name, copy in copied.items()}

    return params | {"layers": list(map(layer_with, params["layers"], copies["layers"]))}
