"""Copies of a policy's matrices in the compute dtype, which every micro-batch of an update reads.

Those of the layers: embedding and LM head are cast by the rows and chunks of them that are read.
"""

from collections.abc import Callable
from typing import Any

from jax import Array
from jax.sharding import Mesh

from rljax.config import TrainingConfig
from rljax.models.config import ModelConfig
from rljax.models.sharding import param_shardings
from rljax.models.transformer import Params
from rljax.numerics.cast_weight import CastWeight
from rljax.numerics.rows import Numerics
from rljax.sharding import constrain


def copying(
    config: ModelConfig, numerics: Numerics, training: TrainingConfig, mesh: Mesh | None
) -> Callable[[Params], tuple[Params, ...]]:
    """Returns what makes copies of params, `{"layers": [{name: [out, in]}]}`, with their layout on a mesh. It
    makes none where the compute dtype is float32, or without `training.cast_once`.
    """
    if numerics.compute_dtype == "float32" or not training.cast_once:
        return lambda params: ()

    def copies(params: Params) -> tuple[Params, ...]:
        names = [name for name, leaf in params["layers"][0].items() if leaf.ndim > 1]
        layers = [{name: layer[name].astype(numerics.dtype) for name in names} for layer in params["layers"]]
        if mesh is not None:
            shardings = param_shardings(config, mesh)["layers"]
            layers = constrain(layers, [{name: layer[name] for name in names} for layer in shardings])
        return ({"layers": layers},)

    return copies


def with_copies(params: Params, copies: Params) -> Params:
    """Returns a policy that reads the copies, and whose gradients go to `params`."""

    def layer_with(layer: dict[str, Array], copied: dict[str, Array]) -> dict[str, Any]:
        return layer | {name: CastWeight(layer[name], copy) for name, copy in copied.items()}

    return params | {"layers": list(map(layer_with, params["layers"], copies["layers"]))}
