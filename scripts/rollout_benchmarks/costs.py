"""Cost of a verifying pass, and of a drafter at the beginning of a run."""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rljax.benchmarking import Row, timed_row
from rljax.config import ExperimentConfig, to_yaml
from rljax.errors import UserError
from rljax.speculation.warm_up import time_passes
from rljax.timing import compare
from rollout_benchmarks.variants import SPECULATION_OFF, open_run, with_keys

_TRAIN = Path(__file__).resolve().parent.parent / "train.py"


def pass_rows(config: ExperimentConfig, repeats: int) -> list[Row]:
    """Measures a verifying pass against a plain step, by batch bucket, cache length and number of tokens."""
    rows = []
    with open_run(config) as (run, _):
        params = run.engine.load_params(run.state.params)
        buckets = run.engine.buckets
        for batch in buckets.batch:
            for length in (buckets.cache[0], buckets.cache[-1]):
                seconds = time_passes(run.engine, params, batch, length, repeats)
                plain = seconds.pop(0)
                for size, times in seconds.items():
                    timing, name = compare(times, plain), f"pass/batch {batch}/cache {length}/{size} tokens"
                    even = {"tokens_to_break_even": batch / timing.ratio}
                    rows.append(timed_row(name, timing, "plain step", "ms", 1e3, **even))
    return rows


def first_step_rows(config: ExperimentConfig, repeats: int) -> list[Row]:
    """Measures the seconds of a run until its first step begins, in fresh processes in turns, with the
    config's drafter and without: nothing is compiled yet, then all of it is stored. The warm start is kept,
    so that only programs make a difference.
    """
    drafter = config.speculation.drafter
    if drafter is None:
        raise UserError("speculation.drafter: set one, which is compared with none")
    plain = with_keys(config, speculation=SPECULATION_OFF | {"run_ahead_below": 0})
    begins: dict[str, list[float]] = {"drafted": [], "plain": []}
    takes: dict[str, list[float]] = {"drafted": [], "plain": []}
    stored: dict[str, list[float]] = {"drafted": [], "plain": []}
    with tempfile.TemporaryDirectory() as directory:
        _first_step(plain, Path(directory) / "warm start")  # leaves its warm start in the cache
        for repeat in range(repeats):
            for side, each in (("drafted", config), ("plain", plain)):
                home = Path(directory) / f"{side} {repeat}"
                metrics = _first_step(each, home)
                begins[side].append(metrics["time/elapsed"] - metrics["time/step"])
                takes[side].append(metrics["time/step"])
                again = _first_step(each, home)
                stored[side].append(again["time/elapsed"] - again["time/step"])
    later = [a - b for a, b in zip(begins["drafted"], begins["plain"], strict=True)]
    details = {
        "later": statistics.median(later),
        "first_step_seconds": statistics.median(takes["drafted"]),
        "baseline_first_step_seconds": statistics.median(takes["plain"]),
        "stored": statistics.median(stored["drafted"]),
        "baseline_stored": statistics.median(stored["plain"]),
    }
    timing = compare(begins["drafted"], begins["plain"])
    return [timed_row(f"first step/begins/{drafter}", timing, "no drafter", **details)]


def _first_step(config: ExperimentConfig, directory: Path) -> dict[str, float]:
    """Trains one step in a fresh process with the programs that `directory` has, and returns its metrics."""
    directory.mkdir(exist_ok=True)
    file, run_dir = directory / "config.yaml", Path(tempfile.mkdtemp(dir=directory)) / "run"
    file.write_text(to_yaml(config), encoding="utf-8")
    overrides = [f"run_dir={run_dir}", f"engine.compilation_cache={directory / 'compiled'}"]
    overrides += ["training.steps=1", "evaluation.problems=0", "checkpoint.every=0", "tracking.report=false"]
    command = [sys.executable, str(_TRAIN), "--config", str(file), *overrides]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = " / ".join(done.stderr.strip().splitlines()[-3:])
        raise UserError(f"train.py ended with status {done.returncode}: {said}")
    return json.loads((run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
