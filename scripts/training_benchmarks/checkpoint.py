"""Saving and restoring the state of a run, against only writing and reading its bytes."""

import dataclasses
import functools
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

from rljax.assembly.checkpoint import RunCheckpoints
from rljax.benchmarking import Row, compare
from rljax.config import OptimizerConfig
from rljax.learning.accumulation import TrainState, apply_gradients
from rljax.learning.optimizer import make_optimizer
from rljax.models.config import ModelConfig
from rljax.models.transformer import init_params, num_params


def timed(action: Callable[..., Any], *args: Any) -> tuple[float, float, Any]:
    """Returns seconds, processor seconds of all threads, and the action's result, once it is ready."""
    start, processor = time.perf_counter(), time.process_time()
    result = jax.block_until_ready(action(*args))
    return time.perf_counter() - start, time.process_time() - processor, result


def random_state(config: ModelConfig, optimizer: optax.GradientTransformation) -> TrainState:
    """Returns random weights and moments: zeros would take less space and time than the state of a run."""
    params = init_params(config, seed=0)
    rng = np.random.default_rng(0)

    def fill(leaf: jax.Array) -> jax.Array:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        return jnp.asarray(1e-3 * np.abs(rng.standard_normal(leaf.shape, np.float32)))

    moments = jax.tree.map(fill, optimizer.init(params))
    return jax.block_until_ready(TrainState(params, moments, jnp.zeros((), jnp.int32)))


def write_plainly(file: Path, state: TrainState) -> None:
    """Writes the bytes and waits until they are on disk, the least work of a reliable save."""
    with open(file, "wb") as stream:
        for leaf in jax.tree.leaves(state):
            stream.write(np.asarray(leaf).tobytes() if leaf.ndim == 0 else np.asarray(leaf).data)
        stream.flush()
        os.fsync(stream.fileno())


def read_plainly(file: Path, template: TrainState) -> TrainState:
    """Reads a file of `write_plainly` to JAX's default device."""

    def read(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.device_put(np.fromfile(stream, leaf.dtype, leaf.size).reshape(leaf.shape))

    with open(file, "rb") as stream:
        return jax.tree.map(read, template)


def save_with_orbax(directory: Path, state: TrainState, compression: bool) -> None:
    """Saves by Orbax as `RunCheckpoints` does, with or without zstd."""
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=compression)) as checkpointer:
        checkpointer.save(directory, args=ocp.args.PyTreeSave(state), force=True)


def bytes_in(directory: Path) -> int:
    """Size of all files below a directory."""
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


@dataclasses.dataclass
class Rounds:
    """Times of every round by action, ours and the baseline's."""

    ours: dict[str, list[float]] = dataclasses.field(default_factory=lambda: defaultdict(list))
    baseline: dict[str, list[float]] = dataclasses.field(default_factory=lambda: defaultdict(list))

    def note(self, what: str, ours: float, baseline: float) -> None:
        self.ours[what].append(ours)
        self.baseline[what].append(baseline)


def checkpoint_rows(name: str, config: ModelConfig, repeats: int) -> list[Row]:
    """Measures saving and restoring a train state, in the system's temporary directory.

    Args:
      name: name of the policy.
      config: its architecture.
      repeats: rounds, after one that does not count.
    """
    optimizer = make_optimizer(**OptimizerConfig().model_dump(), total_updates=1)
    state = random_state(config, optimizer)
    template = jax.eval_shape(lambda: state)
    zeros = jax.tree.map(jnp.zeros_like, state.params)
    apply = jax.jit(functools.partial(apply_gradients, optimizer=optimizer), donate_argnums=0)
    state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    rounds = Rounds()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        checkpoints = RunCheckpoints(path / "run", keep=1)
        for step in range(0, 2 * (repeats + 1), 2):
            start, processor = time.perf_counter(), time.process_time()
            checkpoints.save(step, state, {})
            blocked = time.perf_counter() - start
            checkpoints.wait()
            complete, busy = time.perf_counter() - start, time.process_time() - processor
            written, writing, _ = timed(write_plainly, path / "plain", state)
            rounds.note("blocked", blocked, written)
            rounds.note("complete", complete, written)
            rounds.note("processor", busy, writing)
            restored, *_ = timed(checkpoints.restore, template)
            read, *_ = timed(read_plainly, path / "plain", template)
            rounds.note("restore", restored, read)
            _, fast, _ = timed(save_with_orbax, path / "raw", state, False)
            _, slow, _ = timed(save_with_orbax, path / "zstd", state, True)
            rounds.note("uncompressed", fast, slow)
            # Each step consumes the state and makes the next one.
            alone, _, (state, _) = timed(apply, state, zeros)
            checkpoints.save(step + 1, state, {})
            meanwhile, _, (state, _) = timed(apply, state, zeros)
            rounds.note("step", meanwhile, alone)
            checkpoints.wait()
        checkpoints.close()
        disk_bytes, zstd_bytes = bytes_in(checkpoints.directory), bytes_in(path / "zstd")

    details = {"params": num_params(config), "rounds": repeats, "state_bytes": state_bytes}

    def row(what: str, measured: str, baseline: str, **more: Any) -> Row:
        ours = rounds.ours[measured][1:]
        timing = compare(ours, rounds.baseline[measured][1:])
        return Row(
            name=f"checkpoint/{name}/{what}",
            value=timing.seconds,
            unit="s",
            baseline=baseline,
            baseline_value=timing.baseline_seconds,
            ratio=timing.ratio,
            details={
                **details,
                "low": min(ours),
                "high": max(ours),
                "ratio_low": timing.ratio_low,
                "ratio_high": timing.ratio_high,
                **more,
            },
        )

    write, read = "numpy write and fsync", "numpy read"
    return [
        Row(
            name=f"checkpoint/{name}/on disk",
            value=disk_bytes / 1e6,
            unit="MB",
            baseline="the arrays' bytes",
            baseline_value=state_bytes / 1e6,
            ratio=state_bytes / disk_bytes,
            details=details,
        ),
        row("save blocks", "blocked", write),
        row("save complete", "complete", write),
        row("save, processor time", "processor", write),
        row("restore", "restore", read),
        row("optimizer step during a save", "step", "no save"),
        row(
            "Orbax uncompressed, processor time",
            "uncompressed",
            "Orbax with zstd",
            baseline_bytes=zstd_bytes,
        ),
    ]
