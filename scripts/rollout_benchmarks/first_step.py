"""Seconds of a run until its first step begins, with the config's drafter and without, in fresh processes.

Nothing is compiled yet; the warm start is kept, so that only programs make a difference.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rljax.benchmarking import Row, compare
from rljax.config import ExperimentConfig, to_yaml
from rljax.errors import UserError
from rollout_benchmarks.variants import SPECULATION_OFF

_TRAIN = Path(__file__).resolve().parent.parent / "train.py"


def first_step_rows(config: ExperimentConfig, repeats: int) -> list[Row]:
    """Returns one row: when the first step begins with `speculation.drafter`, against none; in turns."""
    drafter = config.speculation.drafter
    if drafter is None:
        raise UserError("speculation.drafter: set one, which is compared with none")
    without = config.speculation.model_copy(update=SPECULATION_OFF | {"run_ahead_below": 0})
    plain = config.model_copy(update={"speculation": without})
    begins: dict[str, list[float]] = {"drafted": [], "plain": []}
    takes: dict[str, list[float]] = {"drafted": [], "plain": []}
    with tempfile.TemporaryDirectory() as directory:
        _first_step(plain, Path(directory) / "warm start")  # leaves its warm start in the cache
        for repeat in range(repeats):
            for side, each in (("drafted", config), ("plain", plain)):
                metrics = _first_step(each, Path(directory) / f"{side} {repeat}")
                begins[side].append(metrics["time/elapsed"] - metrics["time/step"])
                takes[side].append(metrics["time/step"])
    timing = compare(begins["drafted"], begins["plain"])
    details = {
        "later": statistics.median(a - b for a, b in zip(begins["drafted"], begins["plain"], strict=True)),
        "first_step_seconds": statistics.median(takes["drafted"]),
        "baseline_first_step_seconds": statistics.median(takes["plain"]),
        "rounds": repeats,
        "ratio_low": timing.ratio_low,
        "ratio_high": timing.ratio_high,
    }
    name = f"first step/begins/{drafter}"
    return [Row(name, timing.seconds, "s", "no drafter", timing.baseline_seconds, timing.ratio, details)]


def _first_step(config: ExperimentConfig, directory: Path) -> dict[str, float]:
    """Trains one step in a fresh process with an empty compilation cache, and returns its metrics."""
    directory.mkdir()
    file, run_dir = directory / "config.yaml", directory / "run"
    file.write_text(to_yaml(config), encoding="utf-8")
    overrides = [f"run_dir={run_dir}", f"engine.compilation_cache={directory / 'compiled'}"]
    overrides += ["training.steps=1", "evaluation.problems=0", "checkpoint.every=0", "tracking.report=false"]
    command = [sys.executable, str(_TRAIN), "--config", str(file), *overrides]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = " / ".join(done.stderr.strip().splitlines()[-3:])
        raise UserError(f"train.py ended with status {done.returncode}: {said}")
    return json.loads((run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
