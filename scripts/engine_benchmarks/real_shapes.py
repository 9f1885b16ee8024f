"""Policies of real shapes with random weights, and an engine as a run on one accelerator has it."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp

from rljax.assembly.decoding import unmeasured_numerics
from rljax.config import ExperimentConfig, load_config
from rljax.engine.buckets import make_buckets
from rljax.engine.engine import DecodeEngine
from rljax.engine.executables import ExecutablePool
from rljax.models.config import ModelConfig
from rljax.models.transformer import Params, param_shapes
from rljax.numerics.rows import Numerics
from rljax.sampling.distribution import SamplingParams

_CONFIG = Path(__file__).resolve().parents[2] / "configs" / "qwen2.5-1.5b.yaml"
_MOST_DRAFTS = 8  # draft steps in sequence, where nothing is verified
KERNELS = {
    "noisy_argmax": ["mosaic_gpu", "xla"],
    "token_logprobs": ["mosaic_gpu", "xla"],
    "tree_attention": ["mosaic_gpu", "xla"],
    "quantized_product": ["mosaic_gpu", "xla"],
    "round_to_nearest": ["mosaic_gpu", "xla"],
    "compaction": ["xla"],  # beside Mosaic attention, whose layout of the cache a scatter writes in place
}
"""Kernels by name, and what computes the shapes that they refuse."""


def _qwen(
    architecture: str, vocab: int, hidden: int, layers: int, heads: int, kv_heads: int, mlp: int, tied: bool
) -> ModelConfig:
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=128,
        mlp_size=mlp,
        rope_theta=1e6,
        tie_embeddings=tied,
        attention_bias=architecture == "qwen2",
        qk_norm=architecture == "qwen3",
        max_positions=32_768,
    )


POLICIES = {
    "Qwen3-1.7B": _qwen("qwen3", 151_936, 2048, 28, 16, 8, 6144, tied=True),
    "Qwen3-8B": _qwen("qwen3", 151_936, 4096, 36, 32, 8, 12_288, tied=False),
    "Qwen2.5-1.5B": _qwen("qwen2", 151_936, 1536, 28, 12, 2, 8960, tied=True),
    "Qwen2.5-7B": _qwen("qwen2", 152_064, 3584, 28, 28, 4, 18_944, tied=False),
}
TINY = _qwen("qwen3", 320, 128, 1, 2, 1, 256, tied=True)
"""For a look at a CPU."""


def gpu_config(*overrides: str) -> ExperimentConfig:
    """Returns the config of a run on one H100: bfloat16, kernels by name, differences counted."""
    kernels = [f"kernels.{op}=[{','.join(names)}]" for op, names in KERNELS.items()]
    return load_config(_CONFIG, ["mesh.fsdp=1", *kernels, *overrides])


def gpu_numerics(model: ModelConfig, quick: bool) -> Numerics:
    """Returns the numerics of such a run; `quick` names no kernels, for a CPU."""
    without = [f"kernels.{op}=xla" for op in KERNELS] if quick else []
    return unmeasured_numerics(gpu_config(*without), model, None)


def random_params(config: ModelConfig) -> Params:
    """Makes normally distributed weights on the device: bfloat16 matrices, norms of 1 and biases of 0."""

    @functools.partial(jax.jit, static_argnums=1)
    def normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return config.hidden_size**-0.5 * jax.random.normal(key, shape, jnp.bfloat16)

    shapes = jax.tree_util.tree_leaves_with_path(param_shapes(config), is_leaf=_is_shape)
    leaves = []
    for index, (path, shape) in enumerate(shapes):
        if len(shape) > 1:
            leaves.append(normal(jax.random.key(index), shape))
        else:
            leaves.append(jnp.full(shape, 1.0 if path[-1].key.endswith("norm") else 0.0, jnp.float32))
    return jax.tree.unflatten(jax.tree.structure(param_shapes(config), is_leaf=_is_shape), leaves)


def _is_shape(node: object) -> bool:
    return isinstance(node, tuple)


def read_bytes(params: Params) -> int:
    """Returns the bytes of weights that a step reads: all except an untied input embedding."""
    unread = params["embed"].nbytes if "lm_head" in params else 0
    return sum(leaf.nbytes for leaf in jax.tree.leaves(params)) - unread


def cache_bytes(config: ModelConfig, positions: float) -> float:
    """Returns the bytes of keys and values of so many positions, in bfloat16."""
    return positions * config.num_layers * 2 * config.num_kv_heads * config.head_dim * 2


def make_engine(
    config: ModelConfig,
    numerics: Numerics,
    pool: ExecutablePool,
    batch: int,
    length: int,
    rows: tuple[int, ...] = (),
) -> DecodeEngine:
    """Returns an engine with one batch bucket and one cache bucket, whose verifying passes have so many rows,
    all of which may be one slot's.
    """
    buckets = make_buckets(
        batch,
        length,
        numerics.row_invariant,
        batch_buckets=(batch,),
        cache_buckets=(length,),
        verify_buckets=rows,
        max_drafts=max((each // batch - 1 for each in rows), default=_MOST_DRAFTS),
    )
    return DecodeEngine(config, numerics, SamplingParams(), buckets, (), pool=pool)
