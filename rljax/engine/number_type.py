"""What `policy.compute_dtype: auto` stands for: on a CPU, the number type that is faster and exact.

Processors differ: with AMX or AVX512_BF16 products in bfloat16 take a fraction of the time, with AVX2 several
times as long. So a pretrained policy whose products take most of its time is measured, once a machine. One
made from scratch learns in float32.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from rljax.config import ExperimentConfig, with_compute_dtype
from rljax.durable_files import write_durably
from rljax.engine.executables import row_invariant_compiler_options
from rljax.engine.invariance import RowCounts, measured, surroundings_digest
from rljax.hub import local_directory
from rljax.kernels.linear import product
from rljax.models.config import ModelConfig
from rljax.models.huggingface import load_model_config
from rljax.models.transformer import num_params
from rljax.numerics.rows import Numerics

_LEAST_PARAMS = 50_000_000
"""Below it, a policy is measured nowhere: its time does not go into products."""
_TRAINED_ROWS, _DECODED_ROWS = 1024, 64
_DECODED_PRODUCTS = 4
"""Rows of an update and of a decode step, and how many of these are weighed against one of the former."""
_ROUNDS = 5
_GAIN = 1.1
"""How many times faster bfloat16 must be: it rounds more."""


def with_number_type(config: ExperimentConfig, recorded: str | None = None) -> ExperimentConfig:
    """Returns the config with a number type in the place of auto, and unchanged without auto.

    Args:
      recorded: the number type of the run that goes on; None for a new run.

    Raises:
      CheckpointError: `policy.path` cannot be read.
    """
    auto = config.policy.compute_dtype == "auto" and recorded is None
    if auto and config.policy.path is not None and jax.default_backend() == "cpu":
        model = load_model_config(local_directory(config.policy.path, weights=False))
        if num_params(model) >= _LEAST_PARAMS:
            recorded = _kept(model, bool(config.engine.row_invariant), config.engine.compilation_cache)
    return with_compute_dtype(config, jax.default_backend(), recorded)


def _kept(model: ModelConfig, exact: bool, directory: str | None) -> str:
    """As `_measured_type`, kept in a directory."""
    if directory is None:
        return _measured_type(model, exact, None)
    path = Path(directory) / "numerics" / f"type-{surroundings_digest((model, exact))}.json"
    try:
        return {"float32": "float32", "bfloat16": "bfloat16"}[json.loads(path.read_bytes())]
    except (OSError, ValueError, TypeError, KeyError):
        pass  # Measured anew, whatever was wrong with the file.
    dtype = _measured_type(model, exact, directory)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, json.dumps(dtype).encode())
    except OSError:
        pass  # A later process measures again.
    return dtype


def _measured_type(model: ModelConfig, exact: bool, directory: str | None) -> str:
    """Returns the faster type; float32 where rows must be invariant and bfloat16 is not exact here."""
    seconds = product_seconds(model, exact)
    if seconds["float32"] < _GAIN * seconds["bfloat16"]:
        return "float32"
    counts = RowCounts((1, 8, _DECODED_ROWS, 256), (8,), ())
    if exact and not measured(model, Numerics(True, "bfloat16"), counts, directory).exact:
        return "float32"
    return "bfloat16"


def product_seconds(model: ModelConfig, exact: bool) -> dict[str, float]:
    """Returns the seconds of a policy's MLP products by number type: those of an update and of decode
    steps.
    """
    draw = np.random.default_rng(0).standard_normal
    weight = draw((model.mlp_size, model.hidden_size), np.float32)
    rows = draw((_TRAINED_ROWS, model.hidden_size), np.float32)
    programs = {dtype: _programs(dtype, exact, rows, weight) for dtype in ("float32", "bfloat16")}
    best = dict.fromkeys(programs, float("inf"))
    for _ in range(_ROUNDS):  # alternately, so that a busy machine slows both
        for dtype, (train, decode) in programs.items():
            best[dtype] = min(best[dtype], _seconds(train) + _DECODED_PRODUCTS * _seconds(decode))
    return best


def _programs(
    dtype: str, exact: bool, rows: np.ndarray, weight: np.ndarray
) -> tuple[Callable[[], object], Callable[[], object]]:
    numerics = Numerics(exact, dtype)
    options = row_invariant_compiler_options() if exact else {}

    def decode(rows: Array, weight: Array) -> Array:
        return product(rows, weight, numerics, rounded=True)

    def train(rows: Array, weight: Array) -> tuple[Array, tuple[Array, Array]]:
        y, backward = jax.vjp(decode, rows, weight)
        return y, backward(y)

    args = jnp.asarray(rows, dtype), jnp.asarray(weight, dtype)
    few = args[0][:_DECODED_ROWS], args[1]
    trained = jax.jit(train).lower(*args).compile(compiler_options=options)
    decoded = jax.jit(decode).lower(*few).compile(compiler_options=options)
    return lambda: trained(*args), lambda: decoded(*few)


def _seconds(program: Callable[[], object]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(program())
    return time.perf_counter() - start
