"""Time for which a checkpoint of the head blocks training: selective and asynchronous, against a full,
synchronous one (TLT, Figure 17a).
"""

import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from drafters.eagle.model import HeadConfig, head_shapes
from drafters.eagle.saving import AsyncHeadSaver
from drafters.eagle.spot_trainer import head_optimizer
from drafters.eagle.training import init_state
from rljax.benchmarking import Row, compare
from rljax.durable_files import write_durably
from rljax.models.config import ModelConfig
from rljax.models.transformer import Params
from training_benchmarks.checkpoint import Rounds, timed


def saving_rows(name: str, policy: ModelConfig, repeats: int) -> list[Row]:
    """Measures seconds of `AsyncHeadSaver.save`, against writing head, optimizer, embeddings and LM head.

    Args:
      name: name of the policy.
      policy: architecture of the policy; only embeddings and LM head are made.
      repeats: timed rounds, after one for warming up.
    """
    rng = np.random.default_rng(0)

    def random(shape: tuple[int, ...]) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32))

    vocab = (policy.vocab_size, policy.hidden_size)
    shared = {key: random(vocab) for key in ("embed", *(() if policy.tie_embeddings else ("lm_head",)))}
    shapes = head_shapes(HeadConfig("eagle", policy))
    params = jax.tree.map(random, shapes, is_leaf=lambda x: isinstance(x, tuple))
    state = init_state(params, head_optimizer(1e-3))
    everything = jax.block_until_ready({"state": state, "shared": shared})
    rounds = Rounds()
    with tempfile.TemporaryDirectory() as directory:
        saver, whole = AsyncHeadSaver(Path(directory) / "head"), Path(directory) / "whole"
        for step in range(repeats + 1):
            full, *_ = timed(save_in_place, whole, everything)
            head_seconds, *_ = timed(save_in_place, whole, state.params)
            start = time.perf_counter()
            saver.save(step, state.params)
            held = time.perf_counter() - start
            saver.wait()
            rounds.note("held up", held, full)
            rounds.note("head alone, in place", head_seconds, full)
            rounds.note("on disk", time.perf_counter() - start, full)
    rows = []
    for what, ours in rounds.ours.items():
        timing = compare(ours[1:], rounds.baseline[what][1:])
        rows.append(
            Row(
                f"checkpoint/{name}/{what}",
                timing.seconds,
                "s",
                "head, optimizer, embeddings and LM head in place",
                timing.baseline_seconds,
                timing.ratio,
                {
                    "rounds": repeats,
                    "ratio_low": timing.ratio_low,
                    "ratio_high": timing.ratio_high,
                    "bytes": _bytes(state.params),
                    "baseline_bytes": _bytes(everything),
                },
            )
        )
    return rows


def save_in_place(file: Path, tree: Params) -> None:
    """Writes all leaves and waits until they are on disk."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    tensors = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}
    write_durably(file, safetensors.numpy.save(tensors))


def _bytes(tree: Params) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
