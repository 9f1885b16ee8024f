"""Memory of updates with LoRA, and of loading."""

import dataclasses
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp

from engine_benchmarks.update import GRPO, equal_sequences
from process_memory import forget_peak, memory_kilobytes
from rljax.benchmark_runs import in_fresh_process
from rljax.benchmarking import Row, counted_row
from rljax.config import LoraConfig, OptimizerConfig, TrainingConfig
from rljax.engine.executables import ExecutablePool
from rljax.errors import UserError
from rljax.learning.optimizer import make_optimizer
from rljax.learning.packing import build_batch, pack_sequences
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


@dataclasses.dataclass(frozen=True)
class Kind:
    """A way to train.

    Attributes:
      lora: settings of the adapter; None trains all weights.
      dtype: compute dtype, and with LoRA the type of the base.
    """

    lora: LoraConfig | None = None
    dtype: str = "float32"


UPDATES = {
    "all weights": Kind(),
    "LoRA": Kind(LoraConfig(rank=16)),
    "LoRA, bfloat16": Kind(LoraConfig(rank=16), "bfloat16"),
}


def _trainer(config: ModelConfig, kind: Kind) -> Trainer:
    """Returns a trainer of this kind with a pool of its own; layers are called, as on a CPU with remat."""
    adapter = None
    if kind.lora is not None:
        lora = Lora.of(kind.lora, config)
        adapter = Adapter(lora, init_factors(config, lora, kind.lora.init, seed=0))
    optimizer = make_optimizer(OptimizerConfig(), _REPEATED)
    return Trainer(
        config,
        Numerics(compute_dtype=kind.dtype, outline_layers=True),
        Recipe(SamplingParams(), GRPO, _TRAINING, optimizer),
        ExecutablePool(),
        None,
        adapter,
    )


def peak_of_updates(policy: str, what: str) -> int:
    """Returns the bytes by which the resident memory of this process grows, at its peak, by three updates."""
    jax.block_until_ready(jnp.asarray([1.0]))  # so that the backend's memory is not counted
    config, kind = config_of(policy), UPDATES[what]
    rows, length = _TRAINING.rows_per_microbatch, _TRAINING.pack_length
    sequences = equal_sequences(rows, length, 64, config.vocab_size)
    batch = build_batch(sequences, pack_sequences([length] * rows, length), range(rows))
    trainer, before = _trainer(config, kind), memory_kilobytes("VmRSS")
    params = params_of(policy)
    if kind.lora is not None:
        params = cast_matrices(params, jnp.dtype(kind.dtype))
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
    _needs_linux("lora")
    config, found, trained = config_of(name), {}, {}
    for what, kind in UPDATES.items():
        trainer = _trainer(config, kind)
        state = trainer.init(params_of(name))
        distinct = {id(leaf): leaf for leaf in jax.tree.leaves(state)}  # base and merged policy share arrays
        trained[what] = sum(leaf.size for leaf in jax.tree.leaves(state.factors or state.params))
        trainer.warm_up(state)
        found[what] = {
            "held": sum(leaf.nbytes for leaf in distinct.values()),
            "temporaries": max(trainer.pool.bytes().values()),
            "peak of a process": in_fresh_process(peak_of_updates, name, what),
        }
    whole, rank = found.pop("all weights"), UPDATES["LoRA"].lora.rank
    details = {"params": num_params(config), "rank": rank}
    return [
        counted_row(
            f"lora/{name}/{what}/{measure}",
            size / 1e6,
            whole[measure] / 1e6,
            "MB",
            "all weights, float32",
            less=True,
            trained=trained[what],
            **details,
        )
        for what, sizes in found.items()
        for measure, size in sizes.items()
    ]


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
    """Measures peak resident memory of loading a policy in Hugging Face format, against the loaded weights.

    Args:
      repeats: number of loads, in separate processes.
      cases: dtypes in the checkpoint, and of the loaded weights.
    """
    _needs_linux("loading")
    config, params, rows = config_of(name), params_of(name), []
    with tempfile.TemporaryDirectory() as directory:
        for stored, dtype in cases:
            checkpoint = Path(directory) / stored
            if not checkpoint.exists():
                huggingface.save_model(checkpoint, config, params, stored)
            size = (checkpoint / "model.safetensors").stat().st_size
            weights = num_params(config) * jnp.dtype(dtype).itemsize
            for malloc, environment in _MALLOCS.items():
                peaks = [
                    in_fresh_process(peak_of_loading, str(checkpoint), dtype, **environment)
                    for _ in range(repeats)
                ]
                peak = statistics.median(peaks)
                rows.append(
                    counted_row(
                        f"loading/{name}/{stored} as {dtype}/{malloc}",
                        peak / 1e6,
                        weights / 1e6,
                        "MB",
                        "the weights",
                        less=True,
                        rounds=repeats,
                        params=num_params(config),
                        low=min(peaks) / 1e6,
                        high=max(peaks) / 1e6,
                        ratio_low=weights / max(peaks),
                        ratio_high=weights / min(peaks),
                        checkpoint_bytes=size,
                        peak_over_checkpoint=peak / size,
                        peak_over_checkpoint_high=max(peaks) / size,
                    )
                )
    return rows


def _needs_linux(section: str) -> None:
    if memory_kilobytes("VmHWM") is None:
        raise UserError(f"{section}: needs Linux's count of peak memory (VmHWM); leave it out of --only")
