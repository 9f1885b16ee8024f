"""A larger policy that computes the same function: to measure what a large one costs, with the behaviour of a
small one that this machine could train.

New channels of the residual stream, new neurons of the MLP and new layers get random weights, but what they
write into the residual stream is multiplied by zero (as in Net2Net, Chen et al., 2016, and LLaMA Pro, Wu et
al., 2024). From the first update on they learn along.
"""

import dataclasses

import jax.numpy as jnp
from jax import Array

from rljax.models.config import ModelConfig
from rljax.models.transformer import Params, init_params

_READS_STREAM = ("q", "k", "v", "gate", "up", "lm_head")
_WRITES_STREAM = ("o", "down", "embed")


def grown_config(config: ModelConfig, hidden_size: int, mlp_size: int, num_layers: int) -> ModelConfig:
    """The config of a policy that `grow` has made larger; raises as it does."""
    sizes = {"hidden_size": hidden_size, "mlp_size": mlp_size, "num_layers": num_layers}
    if config.gemma is not None:
        raise ValueError("a Gemma cannot grow: its norms behind attention and MLP would see the new channels")
    for name, size in sizes.items():
        if size < getattr(config, name):
            raise ValueError(f"cannot grow to {name} {size} from {getattr(config, name)}")
    wider = hidden_size / config.hidden_size
    return dataclasses.replace(config, norm_epsilon=config.norm_epsilon / wider, **sizes)


def grow(
    params: Params, config: ModelConfig, hidden_size: int, mlp_size: int, num_layers: int, seed: int
) -> tuple[Params, ModelConfig]:
    """`params` at a larger size, and its config.

    A norm divides by the root of the mean square over the residual stream, which new channels of zeros make
    smaller: its weights and epsilon make up for that.

    Raises:
      ValueError: a size below the present one, or norms after attention and MLP (Gemma).
    """
    grown = grown_config(config, hidden_size, mlp_size, num_layers)
    wider = hidden_size / config.hidden_size
    new = init_params(grown, seed)

    def larger(name: str, old: Array, fresh: Array) -> Array:
        if name in ("attention_norm", "mlp_norm", "final_norm"):
            return jnp.concatenate([old * wider**-0.5, fresh[old.shape[0] :]])
        if name in _WRITES_STREAM:
            return jnp.pad(
                old, [(0, after - before) for before, after in zip(old.shape, fresh.shape, strict=True)]
            )
        if name in _READS_STREAM:
            rows = jnp.concatenate([old, fresh[: old.shape[0], old.shape[1] :]], axis=1)
            return jnp.concatenate([rows, fresh[old.shape[0] :]])
        return old  # biases and norms of heads

    layers = [
        {name: larger(name, old[name], fresh[name]) for name in old}
        for old, fresh in zip(params["layers"], new["layers"], strict=False)
    ]
    for fresh in new["layers"][config.num_layers :]:
        layers.append(fresh | {name: jnp.zeros_like(fresh[name]) for name in ("o", "down")})
    rest = {name: larger(name, params[name], new[name]) for name in params if name != "layers"}
    return rest | {"layers": layers}, grown
