"""Temporary memory of the compiled gradient of a micro-batch."""

import functools

import jax
import jax.numpy as jnp

from rljax.benchmarking import Row
from rljax.config import AlgorithmConfig
from rljax.engine.executables import row_invariant_compiler_options
from rljax.learning.packing import build_batch, pack_sequences
from rljax.models.config import ModelConfig
from rljax.models.rope import rope_table
from rljax.models.transformer import init_params, num_params
from rljax.numerics.rows import Numerics
from rljax.sampling.distribution import SamplingParams
from rljax.training.objectives import gradients, policy_objective
from rljax.training.scoring import score_packed


@functools.cache
def temporary_bytes(config: ModelConfig, shape: tuple[int, int], remat: bool, logprob_chunk: int) -> int:
    """Returns the temporary bytes of the compiled gradient of one micro-batch [R, T], without running it."""
    rows, length = shape
    score = functools.partial(
        score_packed,
        config=config,
        rope=jnp.asarray(rope_table(config, length)),
        numerics=Numerics(),
        sampling=SamplingParams(),
        remat=remat,
        logprob_chunk=logprob_chunk,
    )
    objective = functools.partial(policy_objective, algorithm=AlgorithmConfig(name="dapo"))

    def step(params, batch):
        return gradients(params, batch, None, lambda params, batch: score(params, batch=batch), objective)

    batch = build_batch([], pack_sequences([], length), range(rows))
    params = jax.eval_shape(lambda: init_params(config, seed=0))
    program = jax.jit(step).lower(params, batch).compile(compiler_options=row_invariant_compiler_options())
    return program.memory_analysis().temp_size_in_bytes


def logits_row(name: str, config: ModelConfig, shape: tuple[int, int], logprob_chunk: int) -> Row:
    """Measures the memory saved by computing the logits of [R, T] in chunks of `logprob_chunk` tokens."""
    tokens = shape[0] * shape[1]
    ours = temporary_bytes(config, shape, False, logprob_chunk)
    whole = temporary_bytes(config, shape, False, tokens)
    details = {
        "vocab_size": config.vocab_size,
        "logprob_chunk": logprob_chunk,
        "logits_mb": 4e-6 * tokens * config.vocab_size,
    }
    return _row(f"{name}/logits in chunks", config, shape, ours, "logits whole", whole, details)


def remat_row(name: str, config: ModelConfig, shape: tuple[int, int], logprob_chunk: int) -> Row:
    """Measures the memory saved by recomputing the layers in a micro-batch's backward pass."""
    ours = temporary_bytes(config, shape, True, logprob_chunk)
    kept = temporary_bytes(config, shape, False, logprob_chunk)
    details = {"layers": config.num_layers, "logprob_chunk": logprob_chunk}
    return _row(f"{name}/remat on", config, shape, ours, "remat off", kept, details)


def _row(
    what: str,
    config: ModelConfig,
    shape: tuple[int, int],
    ours: int,
    baseline: str,
    theirs: int,
    details: dict[str, float],
) -> Row:
    return Row(
        name=f"memory/{what}",
        value=ours / 1e6,
        unit="MB",
        baseline=baseline,
        baseline_value=theirs / 1e6,
        ratio=theirs / ours,
        details={
            "params": num_params(config),
            "rows": shape[0],
            "pack_length": shape[1],
            **details,
        },
    )
