"""Memory of updates with LoRA, and of loading."""

import functools
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp

from engine_benchmarks.update import GRPO, equal_batch
from processes import forget_peak, memory_kilobytes, needs_linux
from rljax.benchmark_runs import in_fresh_process
from rljax.benchmarking import Row, counted_row
from rljax.config import LoraConfig, OptimizerConfig, TrainingConfig
from rljax.engine.executables import ExecutablePool
from rljax.learning.optimizer import make_optimizer
from rljax.models import huggingface
from rljax.models.config import ModelConfig
from rljax.models.lora import Adapter, Lora, init_factors
from rljax.models.transformer import num_params
from rljax.numerics.rows import Numerics, cast_matrices
from rljax.sampling.distribution import SamplingParams
from rljax.training.update import Recipe, Trainer
from workloads import config_of, params_of

# --- updates with LoRA -----------------------------------------------------------------------------------

_TRAINING = TrainingConfig(pack_length=512, rows_per_microbatch=2)
_REPEATED = 3


UPDATES: dict[str, tuple[LoraConfig | None, str]] = {
    "all weights": (None, "float32"),
    "LoRA": (LoraConfig(rank=16), "float32"),
    "LoRA, bfloat16": (LoraConfig(rank=16), "bfloat16"),
}
"""The adapter, none for training all weights; and the compute dtype, with LoRA the type of the base."""


def _trainer(config: ModelConfig, what: str) -> Trainer:
    """Returns a trainer of `UPDATES` with a pool of its own; layers are called, as on a CPU with remat."""
    (settings, dtype), adapter = UPDATES[what], None
    if settings is not None:
        lora = Lora.of(settings, config)
        adapter = Adapter(lora, init_factors(config, lora, settings.init, seed=0))
    recipe = Recipe(SamplingParams(), GRPO, _TRAINING, make_optimizer(OptimizerConfig(), _REPEATED))
    numerics = Numerics(compute_dtype=dtype, outline_layers=True)
    return Trainer(config, numerics, recipe, ExecutablePool(), None, adapter)


def peak_of_updates(policy: str, what: str) -> int:
    """Returns the bytes by which the resident memory of this process grows, at its peak, by three updates."""
    jax.block_until_ready(jnp.asarray([1.0]))  # so that the backend's memory is not counted
    config, (lora, dtype) = config_of(policy), UPDATES[what]
    rows, length = _TRAINING.rows_per_microbatch, _TRAINING.pack_length
    batch = equal_batch(rows, length, 64, config.vocab_size, length)
    trainer, before = _trainer(config, what), memory_kilobytes("VmRSS")
    params = params_of(policy)
    if lora is not None:
        params = cast_matrices(params, jnp.dtype(dtype))
    state = trainer.init(params)
    del params  # a run without a reference keeps no other copy
    trainer.warm_up(state)
    forget_peak()
    for _ in range(_REPEATED):
        state, _ = trainer.update(state, [batch])
    jax.block_until_ready(state.params)
    return 1024 * (memory_kilobytes("VmHWM") - before)


def lora_rows(name: str) -> list[Row]:
    """Measures what every kind of `UPDATES` holds, its temporaries, and the peak of a process, against
    training all weights.
    """
    needs_linux("lora")
    config, found, trained = config_of(name), {}, {}
    for what in UPDATES:
        trainer = _trainer(config, what)
        state = trainer.init(params_of(name))
        distinct = {id(leaf): leaf for leaf in jax.tree.leaves(state)}  # base and merged policy share arrays
        trained[what] = sum(leaf.size for leaf in jax.tree.leaves(state.factors or state.params))
        trainer.warm_up(state)
        found[what] = {
            "held": sum(leaf.nbytes for leaf in distinct.values()),
            "temporaries": max(trainer.pool.bytes().values()),
            "peak of a process": in_fresh_process(peak_of_updates, name, what),
        }
    whole, rank = found.pop("all weights"), UPDATES["LoRA"][0].rank
    details = {"params": num_params(config), "rank": rank}
    rows = []
    for what, sizes in found.items():
        for measure, size in sizes.items():
            label, both = f"lora/{name}/{what}/{measure}", (size / 1e6, whole[measure] / 1e6)
            more = details | {"trained": trained[what]}
            rows.append(counted_row(label, *both, "MB", "all weights, float32", less=True, **more))
    return rows


# --- loading ---------------------------------------------------------------------------------------------

_MMAP, _TUNABLES = "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"
# The threshold of glibc adapts, and keeps a varying amount of freed memory of small tensors.
_MALLOCS = {"mmap from 1 MB on": {_MMAP: "1000000"}, "glibc's defaults": {_MMAP: "", _TUNABLES: ""}}
_CASES = (("bfloat16", "bfloat16"), ("float32", "float32"), ("bfloat16", "float32"))


def peak_of_loading(checkpoint: str, dtype: str) -> int:
    """Returns the peak bytes of loading in this process."""
    config = huggingface.load_model_config(Path(checkpoint))
    jax.block_until_ready(jnp.asarray([1.0]))  # so that the backend's memory is not counted
    before = memory_kilobytes("VmRSS")
    jax.block_until_ready(huggingface.load_params(Path(checkpoint), config, dtype))
    # Not getrusage: its peak begins with what the parent process had.
    return 1024 * (memory_kilobytes("VmHWM") - before)


def loading_rows(name: str, repeats: int, cases: Sequence[tuple[str, str]] = _CASES) -> list[Row]:
    """Measures peak resident memory of loading a policy in Hugging Face format, in so many processes, against
    the loaded weights; by dtypes in the checkpoint, and of these.
    """
    needs_linux("loading")
    config, params, rows = config_of(name), params_of(name), []
    with tempfile.TemporaryDirectory() as directory:
        for stored, dtype in cases:
            checkpoint = Path(directory) / stored
            if not checkpoint.exists():
                huggingface.save_model(checkpoint, config, params, stored)
            size = (checkpoint / "model.safetensors").stat().st_size
            weights = num_params(config) * jnp.dtype(dtype).itemsize
            for malloc, environment in _MALLOCS.items():
                load = functools.partial(in_fresh_process, peak_of_loading, str(checkpoint), dtype)
                loads = [load(**environment) for _ in range(repeats)]
                peak, low, high = statistics.median(loads), min(loads), max(loads)
                details = {"low": low / 1e6, "high": high / 1e6, "rounds": repeats}
                details |= {"ratio_low": weights / high, "ratio_high": weights / low}
                details |= {"params": num_params(config), "checkpoint_bytes": size}
                details |= {"peak_over_checkpoint": peak / size, "peak_over_checkpoint_high": high / size}
                label, both = f"loading/{name}/{stored} as {dtype}/{malloc}", (peak / 1e6, weights / 1e6)
                rows.append(counted_row(label, *both, "MB", "the weights", less=True, **details))
    return rows
