"""A whole run small enough for a test: a policy of a few thousand parameters on the quickstart's task.

Its programs are stored where JAX keeps its own as long as the tests run (`tests/conftest.py`): one run
compiles what the others load. A test that puts another function into a program asks for
`engine.compilation_cache=null`. A warm start is made once for all runs of the session that have the same.
"""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

from rljax.config import load_config
from rljax.run_directory import RunDirectory
from rljax.training.session import run

_CONFIG = """
run_dir: {directory}/run
policy:
  shape: {{hidden_size: 64, num_layers: 1, num_heads: 2, num_kv_heads: 1, head_dim: 64, mlp_size: 64,
           tie_embeddings: true, qk_norm: true, max_positions: 256}}
warm_start: {{steps: 3, learning_rate: 1e-2, tokens_per_step: 512, cache_dir: {warm_starts}}}
task: {{name: chain_arithmetic, args: {{max_terms: 3}}}}
rollout: {{prompts_per_step: 2, samples_per_prompt: 4, max_prompt_length: 64, max_response_length: 48}}
engine: {{max_slots: 4, batch_buckets: [4], cache_buckets: [128], compilation_cache: {programs},
          compile: before}}
algorithm: {{kl_coefficient: 0.0}}
optimizer: {{learning_rate: 1e-3}}
training: {{steps: 2, pack_length: 256, rows_per_microbatch: 1}}
checkpoint: {{every: 1}}
evaluation: {{problems: 4}}
tracking: {{report: false}}
"""

SHRINKING = "engine.batch_buckets=[2, 4]"
"""Batches of two sizes; without this the tiny run has one, since each takes programs of its own."""
ONE_PASS = ("speculation.verify_buckets=[16]", "speculation.max_drafts=3")
"""The verifying pass of runs with drafts, for whose tests its size is nothing: they share its program."""
HEAD = (
    "{variant: eagle, train_below: 0, slices: 2, rows: 1, pack_length: 128, depths: [2], unrolled_steps: 1}"
)
"""Arguments of an EAGLE head of few programs, which runs that train one share."""


def write_config(directory: Path) -> Path:
    """The tiny experiment as a file; all that it makes is in `directory`."""
    file = directory / "config.yaml"
    shared = {
        "programs": os.environ["JAX_COMPILATION_CACHE_DIR"],
        "warm_starts": os.environ["RLJAX_TESTS_WARM_STARTS"],
    }
    file.write_text(_CONFIG.format(directory=directory, **shared))
    return file


def train(directory: Path, *overrides: str) -> list[dict[str, Any]]:
    """Runs the tiny experiment in `directory` with overrides, and returns its metrics."""
    config = load_config(write_config(directory), overrides)
    run(config)
    return RunDirectory(config.run_dir).read_metrics()


def numbers(lines: Iterable[dict[str, Any]], *how: str) -> list[dict[str, Any]]:
    """Metrics that repeat: without times, what a session compiles, and what begins with one of `how`."""
    left_out = ("time/", "rollout/tokens_per_second", "engine/compilations", *how)
    return [{key: value for key, value in line.items() if not key.startswith(left_out)} for line in lines]


def digests(run: Path, step: int) -> dict[str, str]:
    """Digests of the bits of a checkpoint's arrays, by name."""
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        arrays = checkpointer.restore(run / "checkpoints" / str(step) / "arrays")
    return {name: hashlib.sha256(np.asarray(array).tobytes()).hexdigest() for name, array in arrays.items()}
