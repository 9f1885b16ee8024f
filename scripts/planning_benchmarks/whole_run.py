"""The memory of a whole run, against a plan."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from process_memory import memory_kilobytes
from rljax.benchmarking import Row
from rljax.config import load_config
from rljax.errors import UserError
from rljax.hub import local_directory
from rljax.models.huggingface import load_model_config, save_model
from rljax.models.transformer import init_params
from rljax.planning.planner import Plan
from rljax.tasks.tokenizer_training import train_tokenizer

_SCRIPT = Path(__file__).resolve().parents[1] / "train.py"
_PROBLEMS = 64
_LOOK_EVERY = 0.2  # seconds


def run_rows(config: str, overrides: Sequence[str], plan: Plan) -> list[Row]:
    """Trains one step in a process of its own, and returns its peak memory against the plan's.

    A policy whose weights are not here has random ones, which are written in bfloat16. Where the config names
    a data set, it is one of sums.

    Args:
      config: file with the config.
      overrides: keys of the config.
      plan: the config's plan for this machine.

    Raises:
      UserError: the run has failed, or its memory cannot be read.
    """
    if memory_kilobytes("VmHWM") is None:
        raise UserError("run: needs Linux's count of peak memory (VmHWM); leave it out of --only")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        keys = [*overrides, f"run_dir={directory / 'run'}", "training.steps=1", "evaluation.problems=0"]
        loaded = load_config(config, list(overrides))
        if loaded.policy.path is not None:
            source = local_directory(loaded.policy.path, weights=False)
            if not any(source.glob("*.safetensors")):
                keys.append(f"policy.path={_random_policy(source, directory)}")
        if loaded.task.name == "dataset":
            keys.append(f"task.args.path={_sums(loaded.task.args, directory)}")
        command = [sys.executable, str(_SCRIPT), "--config", config, *keys]
        peak = _peak_of(command, directory / "output.txt")
        metrics = json.loads(
            (directory / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1]
        )
    planned = {phase: size for phase, (size, _) in plan.memory.peaks.items()}
    details = {
        "planned": planned,
        "response_length": metrics["response_length/mean"],
        "mismatch_logprob_abs_max": metrics["mismatch/logprob_abs_max"],
        "seconds": metrics["time/step"],
    }
    most = max(planned.values())
    return [Row("plan/memory of a run", peak / 2**20, "MiB", "planned", most / 2**20, most / peak, details)]


def _peak_of(command: Sequence[str], output: Path) -> int:
    """The largest resident size of a process that ends well, in bytes."""
    peak = 0
    with open(output, "w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=file, env=os.environ | {"JAX_PLATFORMS": "cpu"}
        )
        while process.poll() is None:
            peak = max(peak, memory_kilobytes("VmHWM", process.pid) or 0)
            time.sleep(_LOOK_EVERY)
    if process.returncode:
        raise UserError(f"run: has failed: {output.read_text(encoding='utf-8').splitlines()[-1]}")
    return 1024 * peak


def _random_policy(path: Path, directory: Path) -> Path:
    """A directory with random weights of the architecture in `path`, and a tokenizer."""
    source, written = directory / "source", directory / "policy"
    train_tokenizer([f"What is {i} plus {i % 7}?" for i in range(_PROBLEMS)], 512, source)
    model = load_model_config(path)
    save_model(written, model, init_params(model, 0), "bfloat16", tokenizer_source=source)
    return written


def _sums(columns: dict[str, str], directory: Path) -> Path:
    """A data set with the config's columns."""
    file = directory / "problems.jsonl"
    marker = columns.get("answer_marker", "")
    with open(file, "w", encoding="utf-8") as lines:
        for i in range(_PROBLEMS):
            problem = {
                columns["prompt"]: f"What is {i} plus {i % 7}?",
                columns["answer"]: f"{marker} {i + i % 7}",
            }
            lines.write(json.dumps(problem) + "\n")
    return file
