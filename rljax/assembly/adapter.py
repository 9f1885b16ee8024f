"""The adapter of a run under LoRA: what it starts from, and where its base is kept.

A checkpoint holds the factors and their moments alone. The base is found again in `policy.path` or, where
that is not what the run has adapted (a policy of `policy.shape`, after a warm start, grown), in RUN/base,
which the run writes once as a Hugging Face directory. Every checkpoint names the base by a digest.
"""

import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from rljax import processes
from rljax.config import ExperimentConfig
from rljax.errors import CheckpointError
from rljax.hub import local_directory
from rljax.models.config import ModelConfig
from rljax.models.digest import base_digest
from rljax.models.huggingface import load_params, save_model
from rljax.models.lora import (
    Adapter,
    Factors,
    Lora,
    factor_shapes,
    init_factors,
    matrices_of,
    merge,
    with_matrices,
)
from rljax.models.peft import load_adapter
from rljax.models.transformer import Params
from rljax.numerics.rows import cast_matrices

BASE_DIGEST = "base"
"""Key of a checkpoint's host state: `base_digest` of the base."""


def make_adapter(
    config: ExperimentConfig, model: ModelConfig, params: Params | None = None
) -> Adapter | None:
    """Returns the adapter that a run starts from, or None if it trains all weights.

    Args:
      params: weights of the base, with which an adapter of `policy.lora.path` is compared if that names its
        base; None compares shapes only.

    Raises:
      UserError: the settings do not fit the policy, or there is no such adapter.
    """
    settings = config.policy.lora
    if settings is None:
        return None
    lora = Lora.of(settings, model)
    if settings.path is None:
        return Adapter(lora, init_factors(model, lora, settings.init, config.seed))
    factors, digest = load_adapter(local_directory(settings.path), model, settings)
    if None not in (digest, params) and digest != base_digest(params):
        raise CheckpointError(
            f"policy.lora.path: the adapter in {settings.path} was trained on another base than"
            f" {config.policy.path}"
        )
    return Adapter(lora, factors, is_trained=True)


def adapter_line(config: ExperimentConfig, adapter: Adapter) -> str:
    """Returns one line for the user."""
    count = sum(leaf.size for leaf in jax.tree.leaves(adapter.factors))
    start = "" if config.policy.lora.path is None else f", from {config.policy.lora.path}"
    targets = ", ".join(config.policy.lora.targets)
    return f"LoRA: {count:,} parameters are trained, rank {adapter.lora.rank} of {targets}{start}"


def keeps_base(config: ExperimentConfig) -> bool:
    """Whether a run writes its base to RUN/base."""
    policy = config.policy
    changed = policy.path is None or config.warm_start is not None or policy.growth is not None
    return policy.lora is not None and changed


def base_path(config: ExperimentConfig) -> Path:
    """Returns the directory of a run's base."""
    return Path(config.run_dir) / "base" if keeps_base(config) else local_directory(config.policy.path)


def write_base(config: ExperimentConfig, model: ModelConfig, base: Params, tokenizer_source: Path) -> None:
    """Writes RUN/base, in place of one of an earlier start that left no checkpoint. A collective of
    processes.

    Raises:
      CheckpointError: it cannot be written.
    """
    params = processes.to_host(base) if processes.several() else base

    def write() -> None:
        path = base_path(config)
        try:
            shutil.rmtree(path, ignore_errors=True)
            save_model(path, model, params, "float32", tokenizer_source=tokenizer_source)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be written ({error.strerror})") from error

    processes.from_first(write)


def load_base(config: ExperimentConfig, model: ModelConfig) -> tuple[Params, str]:
    """Reads the base of a run as the run holds it, matrices in the compute dtype, norms and biases float32.
    Returns it with its `base_digest`.

    Raises:
      CheckpointError: it cannot be read.
    """
    base = load_in_compute_dtype(base_path(config), model, config.policy.compute_dtype)
    return base, base_digest(base)


def load_in_compute_dtype(path: Path, model: ModelConfig, dtype: str) -> Params:
    """Reads a policy without ever having its matrices in float32 on the device. Arguments as of
    `load_params`.
    """

    def put(_: object, array: np.ndarray) -> jax.Array:
        return jnp.asarray(array.astype(dtype if array.ndim > 1 else np.float32, copy=False))

    return load_params(path, model, put=put)


def factor_template(model: ModelConfig, lora: Lora) -> Factors:
    """Returns shapes of the factors, to restore them."""
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
        factor_shapes(model, lora),
        is_leaf=lambda node: isinstance(node, tuple),
    )


def merged_in_float32(base: Params, factors: Factors, lora: Lora) -> Params:
    """Returns a policy whose matrices are merged and not rounded afterwards, as a saved policy has them."""
    wide = cast_matrices(base, jnp.float32)
    return with_matrices(wide, jax.jit(merge, static_argnums=2)(matrices_of(wide, lora), factors, lora))


def check_base(path: Path, saved: str | None, found: str, source: Path | None) -> None:
    """Raises a CheckpointError if a checkpoint's factors belong to another base."""
    if saved is not None and saved != found:
        where = "the policy" if source is None else str(source)
        raise CheckpointError(
            f"{path}: its adapter belongs to another base than {where} holds now; give the run the base that"
            " it began with"
        )
