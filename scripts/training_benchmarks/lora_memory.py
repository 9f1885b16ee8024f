"""Memory of updates with LoRA and of all weights: what is held, temporaries, and the peak of a process."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from process_memory import forget_peak, memory_kilobytes
from rljax.benchmarking import Row
from rljax.config import AlgorithmConfig, LoraConfig, OptimizerConfig, TrainingConfig
from rljax.engine.executables import ExecutablePool
from rljax.errors import UserError
from rljax.learning.optimizer import make_optimizer
from rljax.learning.packing import PackedBatch, TrainingSequence, build_batch, pack_sequences
from rljax.models.config import ModelConfig
from rljax.models.lora import Adapter, Lora, init_factors
from rljax.models.transformer import init_params, num_params
from rljax.numerics.rows import Numerics, cast_matrices
from rljax.sampling.distribution import SamplingParams
from rljax.training.update import Trainer

_SCRIPT = Path(__file__).resolve().parent.parent / "bench_lora.py"  # its `--updates` is a fresh process
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


def make_trainer(config: ModelConfig, kind: Kind) -> Trainer:
    """Returns a trainer of this kind with a pool of its own; layers are called, as on a CPU with remat."""
    adapter = None
    if kind.lora is not None:
        lora = Lora.of(kind.lora, config)
        adapter = Adapter(lora, init_factors(config, lora, kind.lora.init, seed=0))
    return Trainer(
        config,
        Numerics(compute_dtype=kind.dtype, outline_layers=True),
        SamplingParams(),
        AlgorithmConfig(name="dapo"),
        _TRAINING,
        make_optimizer(**OptimizerConfig().model_dump(), total_updates=_REPEATED),
        ExecutablePool(),
        None,
        adapter,
    )


def _batch(config: ModelConfig) -> PackedBatch:
    rng = np.random.default_rng(0)
    rows, length = _TRAINING.rows_per_microbatch, _TRAINING.pack_length
    prompt, response = 64, length - 64
    sequences = [
        TrainingSequence(
            rng.integers(0, config.vocab_size, prompt),
            rng.integers(0, config.vocab_size, response),
            np.full(response, -np.log(config.vocab_size), np.float32),
            advantage=(-1.0) ** row,
            weight=1 / (rows * response),
        )
        for row in range(rows)
    ]
    return build_batch(sequences, pack_sequences([length] * rows, length), range(rows))


def peak_of_updates(config: ModelConfig, kind: Kind) -> int:
    """Returns the bytes by which the resident memory of this process grows, at its peak, by three updates."""
    jax.block_until_ready(jnp.asarray([1.0]))  # so that the backend's memory is not counted
    trainer, batch = make_trainer(config, kind), _batch(config)
    before = memory_kilobytes("VmRSS")
    params = init_params(config, seed=0)
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


def memory_rows(name: str, config: ModelConfig) -> list[Row]:
    """Measures every kind of `UPDATES` against training all weights.

    Args:
      name: name of the policy in `POLICIES`.
      config: its architecture.
    """
    if memory_kilobytes("VmHWM") is None:
        raise UserError("memory: needs Linux's count of peak memory (VmHWM); leave it out of --only")
    held, temporaries, peaks, trained = {}, {}, {}, {}
    for what, kind in UPDATES.items():
        trainer = make_trainer(config, kind)
        state = trainer.init(init_params(config, seed=0))
        distinct = {id(leaf): leaf for leaf in jax.tree.leaves(state)}  # base and merged policy share arrays
        held[what] = sum(leaf.nbytes for leaf in distinct.values())
        trained[what] = sum(leaf.size for leaf in jax.tree.leaves(state.factors or state.params))
        trainer.warm_up(state)
        temporaries[what] = max(trainer.pool.bytes().values())
        command = [sys.executable, str(_SCRIPT), "--updates", name, what]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        peaks[what] = int(subprocess.check_output(command, env=environment))
    details: dict[str, Any] = {"params": num_params(config), "rank": UPDATES["LoRA"].lora.rank}
    rows = []
    for what in list(UPDATES)[1:]:
        for measure, found in (("held", held), ("temporaries", temporaries), ("peak of a process", peaks)):
            rows.append(
                Row(
                    name=f"memory/{name}/{what}/{measure}",
                    value=found[what] / 1e6,
                    unit="MB",
                    baseline="all weights, float32",
                    baseline_value=found["all weights"] / 1e6,
                    ratio=found["all weights"] / found[what],
                    details={**details, "trained": trained[what]},
                )
            )
    return rows
