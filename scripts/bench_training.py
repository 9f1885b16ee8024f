"""Memory and checkpoints of training: `python scripts/bench_training.py [--policy NAMES]`.

What these cost SmolLM2, or the policies that are named, for the pages of `docs` that say so.
`docs/benchmarks.md` says what each row means; only those of checkpoints are seconds.
"""

import functools
import os
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import safetensors.numpy

from drafters.eagle.model import HeadConfig, head_shapes
from drafters.eagle.saving import AsyncHeadSaver
from drafters.eagle.spot_trainer import head_optimizer
from drafters.eagle.training import init_state
from rljax.assembly.checkpoint import RunCheckpoints
from rljax.benchmark_runs import Benchmark, Measurement
from rljax.benchmarking import Row, counted_row, timed_row
from rljax.config import OptimizerConfig
from rljax.durable_files import write_durably
from rljax.learning.accumulation import TrainState, apply_gradients
from rljax.learning.optimizer import make_optimizer
from rljax.models.transformer import Params, num_params
from rljax.timing import compare
from training_benchmarks.memory import loading_rows, lora_rows
from workloads import POLICY_OPTION, config_of, params_of, policies_of


def timed(action: Callable[..., Any], *args: Any) -> tuple[float, float, Any]:
    """Returns seconds, processor seconds of all threads, and the action's result, once it is ready."""
    start, processor = time.perf_counter(), time.process_time()
    result = jax.block_until_ready(action(*args))
    return time.perf_counter() - start, time.process_time() - processor, result


def random_state(name: str, optimizer: optax.GradientTransformation) -> TrainState:
    """Returns weights and random moments: zeros would take less space and time than the state of a run."""
    params = params_of(name)
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
    """As `RunCheckpoints` does, with or without zstd."""
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=compression)) as checkpointer:
        checkpointer.save(directory, args=ocp.args.PyTreeSave(state), force=True)


Round = dict[tuple[str, str], tuple[float, float]]
"""Figures by action and name of the baseline, ours and the baseline's; a first round is for warming up."""


def columns(rounds: Sequence[Round], key: tuple[str, str]) -> tuple[list[float], list[float]]:
    """Returns an action's figures of the rounds that count."""
    return [each[key][0] for each in rounds[1:]], [each[key][1] for each in rounds[1:]]


def checkpoint_rows(name: str, repeats: int) -> list[Row]:
    """Measures saving and restoring a train state in the system's temporary directory, in so many rounds
    after one that does not count.
    """
    optimizer = make_optimizer(OptimizerConfig(), 1)
    state = random_state(name, optimizer)
    template, state_bytes = jax.eval_shape(lambda: state), _bytes(state)
    zeros = jax.tree.map(jnp.zeros_like, state.params)
    apply = jax.jit(functools.partial(apply_gradients, optimizer=optimizer), donate_argnums=0)
    rounds: list[Round] = []
    write, read, zstd = "numpy write and fsync", "numpy read", "Orbax with zstd"
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
            restored, *_ = timed(checkpoints.restore, template)
            reading, *_ = timed(read_plainly, path / "plain", template)
            _, fast, _ = timed(save_with_orbax, path / "raw", state, False)
            _, slow, _ = timed(save_with_orbax, path / "zstd", state, True)
            # Each step consumes the state and makes the next one.
            alone, _, (state, _) = timed(apply, state, zeros)
            checkpoints.save(step + 1, state, {})
            meanwhile, _, (state, _) = timed(apply, state, zeros)
            checkpoints.wait()
            rounds.append(
                {
                    ("save blocks", write): (blocked, written),
                    ("save complete", write): (complete, written),
                    ("save, processor time", write): (busy, writing),
                    ("restore", read): (restored, reading),
                    ("optimizer step during a save", "no save"): (meanwhile, alone),
                    ("Orbax uncompressed, processor time", zstd): (fast, slow),
                }
            )
        checkpoints.close()
        disk_bytes, zstd_bytes = (
            sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
            for directory in (checkpoints.directory, path / "zstd")
        )

    details = {"params": num_params(config_of(name)), "state_bytes": state_bytes}
    sizes, label = (disk_bytes / 1e6, state_bytes / 1e6), f"checkpoint/{name}/on disk"
    rows = [counted_row(label, *sizes, "MB", "the arrays' bytes", less=True, **details)]
    for what, baseline in rounds[0]:
        ours, theirs = columns(rounds, (what, baseline))
        more = {"baseline_bytes": zstd_bytes} if baseline == zstd else {}
        more |= {"low": min(ours), "high": max(ours)}
        label = f"checkpoint/{name}/{what}"
        rows.append(timed_row(label, compare(ours, theirs), baseline, **details, **more))
    return rows


# --- a head ----------------------------------------------------------------------------------------------


def saving_rows(name: str, repeats: int) -> list[Row]:
    """Measures seconds for which a checkpoint of the head, selective and asynchronous, blocks training,
    against writing head, optimizer, embeddings and LM head (TLT, Figure 17a). Of the policy only these are
    made.
    """
    policy = config_of(name)
    rng = np.random.default_rng(0)

    def random(shape: tuple[int, ...]) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32))

    vocab = (policy.vocab_size, policy.hidden_size)
    shared = {key: random(vocab) for key in ("embed", *(() if policy.tie_embeddings else ("lm_head",)))}
    config = HeadConfig("eagle", policy)
    params = jax.tree.map(random, head_shapes(config), is_leaf=lambda x: isinstance(x, tuple))
    state = init_state(params, head_optimizer(1e-3))
    everything = jax.block_until_ready({"state": state, "shared": shared})
    rounds: list[Round] = []
    baseline = "head, optimizer, embeddings and LM head in place"
    with tempfile.TemporaryDirectory() as directory:
        saver, whole = AsyncHeadSaver(Path(directory) / "head"), Path(directory) / "whole"
        for step in range(repeats + 1):
            full, *_ = timed(_save_in_place, whole, everything)
            alone, *_ = timed(_save_in_place, whole, state.params)
            start = time.perf_counter()
            saver.save(step, state.params, config)
            held = time.perf_counter() - start
            saver.wait()
            on_disk = time.perf_counter() - start
            figures = {"held up": held, "head alone, in place": alone, "on disk": on_disk}
            rounds.append({(what, baseline): (seconds, full) for what, seconds in figures.items()})
    sizes = {"bytes": _bytes(state.params), "baseline_bytes": _bytes(everything)}
    return [
        timed_row(f"checkpoint/{name}/{what}", compare(*columns(rounds, (what, baseline))), baseline, **sizes)
        for what, _ in rounds[0]
    ]


def _save_in_place(file: Path, tree: Params) -> None:
    """Writes all leaves and waits until they are on disk."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    tensors = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}
    write_durably(file, safetensors.numpy.save(tensors))


def _bytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


# --- the command line ------------------------------------------------------------------------------------

_CASES = (  # the section, what measures it, and its arguments after the policy
    ("checkpoint", checkpoint_rows, (5,)),
    ("loading", loading_rows, (5,)),
    ("lora", lora_rows, ()),
)


def _plan(arguments: Namespace) -> list[Measurement]:
    names = policies_of(arguments)
    return [
        Measurement(section, name, run, (name, *more), section == "checkpoint")
        for section, run, more in _CASES
        for name in names
    ]


BENCHMARK = Benchmark(
    name="training",
    description=__doc__,
    plan=_plan,
    options=POLICY_OPTION,
    packages=("numpy", "orbax-checkpoint", "tensorstore", "safetensors"),
    on_cpu="the figures are a CPU's",
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
