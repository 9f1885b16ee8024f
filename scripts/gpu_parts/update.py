"""The update: tokens per second and MFU of a full update at 1.7B, or 0.5B, one row of 4,096 tokens: with the
attention that has decoding's bits, and with FlashAttention in its place.
"""

import dataclasses
import statistics
import time

import jax

from engine_benchmarks.update import GRPO, equal_batch
from gpu_parts.engines import TimedPool, kernel_of, random_params, run_config, run_numerics
from gpu_parts.part import Part, run
from rljax.config import OptimizerConfig
from rljax.errors import UserError
from rljax.learning.optimizer import make_optimizer
from rljax.models.config import ModelConfig
from rljax.models.transformer import num_params
from rljax.numerics.rows import Numerics
from rljax.planning.command import present_topology
from rljax.planning.topologies import hardware_of, parse_topology
from rljax.sampling.distribution import SamplingParams
from rljax.training.update import Recipe, Trainer
from workloads import config_of

_TOKENS, _SEQUENCES, _PROMPT = 4096, 4, 128
_POLICIES = ("Qwen3-1.7B", "Qwen2.5-0.5B")  # the first that there is memory for
_BYTES = 16  # of a parameter: float32 weights, gradients, and two moments
_REPEATS = 5
_LEAST_SECONDS = 25.0  # that another attention takes, with what it compiles


def measure(part: Part) -> None:
    """Times whole updates with either attention."""
    names = ("tiny",) if part.quick else _POLICIES
    name = next((name for name in names if part.has_room(name, _BYTES * num_params(config_of(name)))), None)
    if name is None:
        return
    exact = run_numerics(config_of(name), part.quick)
    flash = "interpret_triton" if part.quick else kernel_of("packed_attention")
    kernels = dataclasses.replace(exact.kernels, packed_attention=(flash, "xla"))
    _measure(part, name, "exact attention", exact)
    if part.has_time("flash attention", _LEAST_SECONDS):
        fast = dataclasses.replace(exact, row_invariant=False, kernels=kernels)
        _measure(part, name, "flash attention", fast)


def _measure(part: Part, name: str, attention: str, numerics: Numerics) -> None:
    """Times whole updates: gradients of one micro-batch, and the optimizer on float32 weights and moments."""
    config, pool = config_of(name), TimedPool()
    tokens, repeats = (256, 1) if part.quick else (_TOKENS, _REPEATS)
    keys = {"pack_length": tokens, "rows_per_microbatch": 1}
    training = run_config(part.quick).training.model_copy(update=keys)
    recipe = Recipe(SamplingParams(), GRPO, training, make_optimizer(OptimizerConfig(), 1))
    trainer = Trainer(config, numerics, recipe, pool)
    params = random_params(config)
    state = trainer.init(params)
    del params
    length = tokens // _SEQUENCES
    batch = equal_batch(_SEQUENCES, length, min(_PROMPT, length // 2), config.vocab_size, tokens)
    taken = []
    for _ in range(1 + repeats):  # the first compiles
        start = time.perf_counter()
        state, metrics = trainer.update(state, [batch])
        jax.block_until_ready(state.params)
        taken.append(time.perf_counter() - start)
    taken, compile_seconds = taken[1:], sum(seconds for _, seconds in pool.by_key.values())
    seconds, flops = statistics.median(taken), _flops(config, [length] * _SEQUENCES)
    details = {"flops": flops, "flops_per_second": flops / seconds}
    if not part.quick:
        try:  # MFU against the data sheet's dense bfloat16 FLOP/s (`rljax/planning/hardware.py`)
            peak = hardware_of(parse_topology(present_topology()), "bfloat16").flops["bfloat16"]
            details |= {"peak": peak, "mfu": flops / seconds / peak}
        except UserError as error:
            part.note(f"no MFU: {error}")
    part.row(
        f"{name}/{tokens} tokens/{attention}",
        tokens / seconds,
        "tokens/s",
        compile_seconds,
        repeats,
        seconds=seconds,
        least_seconds=min(taken),
        most_seconds=max(taken),
        remat=training.remat,
        gradients_compile_seconds=pool.find("gradients")[1],
        gradient_norm=metrics["gradient_norm"],
        **details,
    )


def _flops(config: ModelConfig, lengths: list[int]) -> float:
    """FLOPs of the model in one update: 6 a weight and token, and attention to the tokens before (Chowdhery
    et al., "PaLM", 2022, appendix B). What remat computes again does not count.
    """
    unused = 0 if config.tie_embeddings else config.vocab_size * config.hidden_size
    pairs = sum(length**2 / 2 for length in lengths)
    attention = 12.0 * config.num_layers * config.num_heads * config.head_dim * pairs
    return 6.0 * (num_params(config) - unused) * sum(lengths) + attention


if __name__ == "__main__":
    run("update", measure)
