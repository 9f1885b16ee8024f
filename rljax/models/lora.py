"""LoRA: a policy whose matrices are base + scale B A, and which learns A and B alone.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", arXiv 2106.09685, section 4; the scale of
rsLoRA is Kalajdzievski's, arXiv 2312.03732. Three trees of matrices, each `{"layers": [{name: ...}]}` with
the adapted matrices alone:

    base      [out, in] in the compute dtype; never changes
    factors   {"a": float32 [rank, in], "b": float32 [out, rank]}; what is trained
    merged    [out, in] in the compute dtype; computed from the two after every update

Everything that reads the policy (decoding, drafters, scoring, the update's forward pass) reads merged
matrices in an ordinary params pytree, so it has the same bits everywhere. They are computed from the base
anew each time: added to merged matrices of before, updates would round away. `docs/lora.md` says what all
this takes.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rljax.config.lora import LoraConfig
from rljax.errors import ConfigError
from rljax.models.config import ModelConfig
from rljax.models.transformer import Params, param_shapes
from rljax.numerics.adapted import AdaptedWeight
from rljax.numerics.products import exact_products

Matrices = dict[str, Any]
"""The adapted matrices: {"layers": [{name: [out, in]}, ...]}."""
Factors = dict[str, Any]
"""The factors of the adapted matrices: {"layers": [{name: {"a": [rank, in], "b": [out, rank]}}, ...]}."""

_PURPOSE = 0x10A  # separates the factors' random numbers from others of the same seed


@dataclasses.dataclass(frozen=True)
class Lora:
    """What programs depend on.

    Attributes:
      rank: rank of B A.
      scale: factor of B A.
      names: adapted matrices of a layer, by their names in the params.
    """

    rank: int
    scale: float
    names: tuple[str, ...]

    @classmethod
    def of(cls, config: LoraConfig, model: ModelConfig) -> "Lora":
        """Returns the settings of a config for a policy.

        Raises:
          ConfigError: the rank is above what a matrix can have.
        """
        shapes = param_shapes(model)["layers"][0]
        for name in config.matrices:
            if config.rank > min(shapes[name]):
                out, inputs = shapes[name]
                raise ConfigError(
                    f"policy.lora.rank: {config.rank} is more than the rank of a matrix {name} of {out} x"
                    f" {inputs} can be; set at most {min(shapes[name])}"
                )
        return cls(config.rank, config.scale, config.matrices)


@dataclasses.dataclass(frozen=True)
class Adapter:
    """Settings and factors.

    Attributes:
      factors: the factors, float32; on the host, or shapes in their place.
      is_trained: whether the factors were trained before, so that the merged policy is not the base.
    """

    lora: Lora
    factors: Factors
    is_trained: bool = False


def factor_shapes(model: ModelConfig, lora: Lora) -> Factors:
    """Returns the factors with a shape tuple in place of every array."""

    def shapes(layer: dict[str, tuple[int, int]]) -> dict[str, dict[str, tuple[int, int]]]:
        return {
            name: {"a": (lora.rank, layer[name][1]), "b": (layer[name][0], lora.rank)} for name in lora.names
        }

    return {"layers": [shapes(layer) for layer in param_shapes(model)["layers"]]}


def init_factors(model: ModelConfig, lora: Lora, init: str, seed: int) -> Factors:
    """Returns the factors of a new adapter, float32 on the host: A random, B zero, so that the merged policy
    is the base.

    Args:
      init: "kaiming", uniform in +-in^-0.5 as Kaiming's with a = sqrt(5) is, or "gaussian", normal with
        standard deviation 1 / rank: the two distributions of PEFT.
    """
    rng = np.random.default_rng((seed, _PURPOSE))

    def make(path: Any, shape: tuple[int, int]) -> np.ndarray:
        if path[-1].key == "b":
            return np.zeros(shape, np.float32)
        if init == "gaussian":
            return rng.standard_normal(shape, dtype=np.float32) / np.float32(lora.rank)
        return (rng.random(shape, dtype=np.float32) * 2 - 1) * np.float32(shape[1] ** -0.5)

    shapes = factor_shapes(model, lora)
    return jax.tree_util.tree_map_with_path(make, shapes, is_leaf=lambda node: isinstance(node, tuple))


def matrices_of(params: Params, lora: Lora) -> Matrices:
    """Returns the matrices of a policy that are adapted; arrays are shared."""
    return {"layers": [{name: layer[name] for name in lora.names} for layer in params["layers"]]}


def with_matrices(params: Params, matrices: Matrices) -> Params:
    """Returns a policy with other matrices instead of the adapted ones; arrays are shared."""
    layers = [layer | others for layer, others in zip(params["layers"], matrices["layers"], strict=True)]
    return params | {"layers": layers}


def merge(base: Matrices, factors: Factors, lora: Lora) -> Matrices:
    """Returns base + scale B A, computed in float32 and rounded to the dtype of the base once."""

    def one(matrix: Any, pair: dict[str, Any]) -> Any:
        # Not in the default precision, in which a GPU or TPU would round the factors.
        inner = (((1,), (0,)), ((), ()))
        change = lax.dot_general(pair["b"], pair["a"], inner, precision=exact_products())
        return (matrix.astype(jnp.float32) + lora.scale * change).astype(matrix.dtype)

    return {
        "layers": [
            {name: one(layer[name], pairs[name]) for name in layer}
            for layer, pairs in zip(base["layers"], factors["layers"], strict=True)
        ]
    }


def adapted(params: Params, factors: Factors, lora: Lora) -> Params:
    """Returns a merged policy whose gradients go to the factors."""

    def one(matrix: Any, pair: dict[str, Any]) -> AdaptedWeight:
        return AdaptedWeight(matrix, pair["a"], pair["b"], lora.scale)

    layers = [
        {name: one(layer[name], pair) for name, pair in pairs.items()}
        for layer, pairs in zip(params["layers"], factors["layers"], strict=True)
    ]
    return with_matrices(params, {"layers": layers})
