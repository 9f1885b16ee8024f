"""A larger policy that computes the same function: to measure what a large one costs, with the behaviour of a
small one that this machine could train.

New neurons of the MLP and new layers get random weights, but what they write into the residual stream is
multiplied by zero (as in Net2Net, Chen et al., 2016, and LLaMA Pro, Wu et al., 2024). From the first update
on they learn along.
"""

import dataclasses

import jax.numpy as jnp

from rljax.models.config import ModelConfig
from rljax.models.transformer import Params, init_params


def grow(
    params: Params, config: ModelConfig, mlp_size: int, num_layers: int, seed: int
) -> tuple[Params, ModelConfig]:
    """`params` with MLPs of `mlp_size` and `num_layers` layers, neither less than now; and their config.

    Raises:
      ValueError: a size below the present one.
    """
    if mlp_size < config.mlp_size or num_layers < config.num_layers:
        raise ValueError(
            f"cannot grow to mlp_size {mlp_size} and {num_layers} layers from {config.mlp_size} and"
            f" {config.num_layers}"
        )
    grown = dataclasses.replace(config, mlp_size=mlp_size, num_layers=num_layers)
    new = init_params(grown, seed)
    more = mlp_size - config.mlp_size
    layers = []
    for old, fresh in zip(params["layers"], new["layers"][: config.num_layers], strict=True):
        layers.append(
            old
            | {name: jnp.concatenate([old[name], fresh[name][:more]]) for name in ("gate", "up")}
            | {"down": jnp.pad(old["down"], ((0, 0), (0, more)))}
        )
    for fresh in new["layers"][config.num_layers :]:
        layers.append(fresh | {name: jnp.zeros_like(fresh[name]) for name in ("o", "down")})
    return params | {"layers": layers}, grown
