"""Peak memory of loading a policy in Hugging Face format."""

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp

from process_memory import memory_kilobytes
from rljax.benchmarking import Row
from rljax.errors import UserError
from rljax.models import huggingface
from rljax.models.config import ModelConfig
from rljax.models.transformer import init_params, num_params

_SCRIPT = Path(__file__).resolve().parent.parent / "bench_training.py"  # its `--load` is a fresh process
_MMAP_THRESHOLD = "MALLOC_MMAP_THRESHOLD_"
# The threshold of glibc adapts, and keeps a varying amount of freed memory of small tensors.
_MALLOCS = {"mmap from 1 MB on": {_MMAP_THRESHOLD: "1000000"}, "glibc's defaults": {"GLIBC_TUNABLES": ""}}
CASES = (("bfloat16", "bfloat16"), ("float32", "float32"), ("bfloat16", "float32"))


def peak_of_loading(checkpoint: Path, dtype: str) -> int:
    """Returns the peak bytes of loading; run by `--load` in a separate process."""
    config = huggingface.load_model_config(checkpoint)
    jax.block_until_ready(jnp.asarray([1.0]))  # so that the backend's memory is not counted
    before = memory_kilobytes("VmRSS")
    jax.block_until_ready(huggingface.load_params(checkpoint, config, dtype))
    # Not getrusage: its peak begins with what the parent process had.
    return 1024 * (memory_kilobytes("VmHWM") - before)


def loading_rows(
    name: str, config: ModelConfig, repeats: int, cases: Sequence[tuple[str, str]] = CASES
) -> list[Row]:
    """Measures peak resident memory of loading a policy in Hugging Face format, against the loaded weights.

    Args:
      name: name of the policy.
      config: its architecture.
      repeats: number of loads, in separate processes.
      cases: dtypes in the checkpoint, and of the loaded weights.
    """
    if memory_kilobytes("VmHWM") is None:
        raise UserError("loading: needs Linux's count of peak memory (VmHWM); leave it out of --only")
    inherited = {key: value for key, value in os.environ.items() if key != _MMAP_THRESHOLD}
    params, rows = init_params(config, seed=0), []
    with tempfile.TemporaryDirectory() as directory:
        for stored, dtype in cases:
            checkpoint = Path(directory) / stored
            if not checkpoint.exists():
                huggingface.save_model(checkpoint, config, params, stored)
            size = (checkpoint / "model.safetensors").stat().st_size
            weights = num_params(config) * jnp.dtype(dtype).itemsize
            command = [sys.executable, str(_SCRIPT), "--load", str(checkpoint), dtype]
            for malloc, environment in _MALLOCS.items():
                peaks = [
                    int(subprocess.check_output(command, env=inherited | environment)) for _ in range(repeats)
                ]
                peak = statistics.median(peaks)
                rows.append(
                    Row(
                        name=f"loading/{name}/{stored} as {dtype}/{malloc}",
                        value=peak / 1e6,
                        unit="MB",
                        baseline="the weights",
                        baseline_value=weights / 1e6,
                        ratio=weights / peak,
                        details={
                            "rounds": repeats,
                            "params": num_params(config),
                            "low": min(peaks) / 1e6,
                            "high": max(peaks) / 1e6,
                            "ratio_low": weights / max(peaks),
                            "ratio_high": weights / min(peaks),
                            "checkpoint_bytes": size,
                            "peak_over_checkpoint": peak / size,
                            "peak_over_checkpoint_high": max(peaks) / size,
                        },
                    )
                )
    return rows
