"""Engines of policies of real shapes as a run on one accelerator has them, with random weights, and the
seconds that compiling their programs took.
"""

import functools
import itertools
import time
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from rljax import target
from rljax.assembly.decoding import unmeasured_numerics
from rljax.config import ExperimentConfig, load_config
from rljax.config.decoding import KernelsConfig
from rljax.engine.background import compile_all
from rljax.engine.buckets import make_buckets
from rljax.engine.engine import DecodeEngine
from rljax.engine.executables import ExecutablePool
from rljax.models.config import ModelConfig
from rljax.models.transformer import Params, param_shapes
from rljax.numerics.rows import Numerics
from rljax.sampling.distribution import SamplingParams

_CONFIG = Path(__file__).resolve().parents[2] / "configs" / "qwen2.5-1.5b.yaml"
_MOST_DRAFTS = 8  # draft steps in sequence, where nothing is verified


# --- engines ---------------------------------------------------------------------------------------------


def kernel_of(op: str) -> str:
    """Returns the name of an operation's kernel for the accelerator that programs are traced for."""
    if target.platform() == "tpu":
        return "mosaic_tpu"
    return "triton" if op == "packed_attention" else "mosaic_gpu"


def kernel_keys(quick: bool) -> list[str]:
    """Returns the keys of a config that name this device's kernels, and plain JAX for the shapes that they
    refuse; `quick` names no kernels, for a CPU.
    """
    names = {op: ["xla"] if quick else [kernel_of(op), "xla"] for op in KernelsConfig.model_fields}
    names["packed_attention"] = ["xla"]  # which has decoding's bits
    if names["compaction"][0] == "mosaic_gpu":
        names["compaction"] = ["xla"]  # a scatter writes the layout of Mosaic attention's cache in place
    return [f"kernels.{op}=[{','.join(chosen)}]" for op, chosen in names.items()]


def run_config(quick: bool) -> ExperimentConfig:
    """Returns the config of a run on one accelerator: bfloat16, kernels by name, differences counted."""
    return load_config(_CONFIG, ["mesh.fsdp=1", *kernel_keys(quick)])


def run_numerics(model: ModelConfig, quick: bool) -> Numerics:
    """Returns the numerics of such a run."""
    return unmeasured_numerics(run_config(quick), model, None)


def random_params(config: ModelConfig) -> Params:
    """Makes normally distributed weights on the device: bfloat16 matrices, norms of 1 and biases of 0."""

    @functools.partial(jax.jit, static_argnums=1)
    def normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return config.hidden_size**-0.5 * jax.random.normal(key, shape, jnp.bfloat16)

    keys = itertools.count()

    def make(path: tuple[Any, ...], shape: tuple[int, ...]) -> jax.Array:
        if len(shape) > 1:
            return normal(jax.random.key(next(keys)), shape)
        return jnp.full(shape, 1.0 if path[-1].key.endswith("norm") else 0.0, jnp.float32)

    shapes = param_shapes(config)
    return jax.tree_util.tree_map_with_path(make, shapes, is_leaf=lambda node: isinstance(node, tuple))


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
    steps: int = 64,
) -> DecodeEngine:
    """Returns an engine with one batch bucket and one cache bucket, whose verifying passes have so many rows,
    all of which may be one slot's; `steps` are those between two host syncs.
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
    return DecodeEngine(config, numerics, SamplingParams(), buckets, (), steps, pool)


# --- compiled programs -----------------------------------------------------------------------------------


class TimedPool(ExecutablePool):
    """Compiled programs, with their seconds in `by_key`. A key begins with a kind such as "generate"."""

    def __init__(self) -> None:
        super().__init__()
        self.by_key: dict[tuple[Hashable, ...], tuple[Any, float]] = {}

    def get(
        self, key: Hashable, function: Callable[..., Any], args: tuple, donate_argnums: tuple[int, ...] = ()
    ) -> Callable[..., Any]:
        """See `ExecutablePool.get`."""
        start, known = time.perf_counter(), key in self
        program = super().get(key, function, args, donate_argnums)
        if not known:
            self.by_key[key] = program, time.perf_counter() - start
        return program

    def find(self, *key: Hashable) -> tuple[Any, float]:
        """Returns (program, seconds) of the first program whose key begins so."""
        return next(found for other, found in self.by_key.items() if other[: len(key)] == key)


def compile_together(calls: list[Callable[[], object]]) -> float:
    """Makes calls that compile, side by side; returns the seconds until the last is done."""
    start = time.perf_counter()
    compile_all(calls)
    return time.perf_counter() - start
