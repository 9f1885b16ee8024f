"""Seconds to the first decode step of a fresh process, with and without its programs in the cache."""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from engine_benchmarks.policies import make_engine, random_prompts
from rljax.benchmarking import Row, compare
from rljax.engine.executables import enable_compilation_cache
from rljax.engine.host_sync import Assignment
from rljax.models import huggingface
from rljax.models.config import ModelConfig
from rljax.models.transformer import init_params, num_params
from rljax.sampling.noise import request_key

_SCRIPT = Path(__file__).resolve().parent.parent / "bench_engine.py"  # its `--first-step` is a fresh process


def first_step(checkpoint: Path, cache: Path) -> dict[str, float]:
    """Measures the seconds of a fresh process up to its first decode step; run by `--first-step`."""
    enable_compilation_cache(cache)
    config = huggingface.load_model_config(checkpoint)
    params = huggingface.load_params(checkpoint, config)
    created = time.time()
    engine = make_engine(config, row_invariant=True, slots=8, length=256, cache=cache)
    params = engine.load_params(params)
    prefix = engine.prefill(params, random_prompts(8, config.vocab_size))
    state = engine.init_state(8, 256)
    requests = [Assignment(i, i, request_key(0, i), 128) for i in range(8)]
    state = engine.bulk_insert(prefix, state, requests)
    engine.generate(params, state, max_steps=1)
    return {"created": created, "decoded": time.time(), "compiling_seconds": engine.pool.seconds}


def startup_rows(name: str, config: ModelConfig, repeats: int) -> list[Row]:
    """Seconds to the first decode step of a second process, its programs cached, against a first one."""
    runs: dict[str, list[dict[str, float]]] = {"first": [], "second": []}
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = Path(directory) / "policy"
        huggingface.save_model(checkpoint, config, init_params(config, seed=0), "float32")
        for repeat in range(repeats):
            command = [
                sys.executable,
                str(_SCRIPT),
                "--first-step",
                str(checkpoint),
                f"{directory}/cache{repeat}",
            ]
            for process in ("first", "second"):
                started = time.time()
                output = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
                times = json.loads(output.stdout)
                runs[process].append(
                    {
                        "process start": times["decoded"] - started,
                        "engine creation": times["decoded"] - times["created"],
                        "compiling": times["compiling_seconds"],
                    }
                )

    def seconds(process: str, since: str) -> list[float]:
        return [run[since] for run in runs[process]]

    rows = []
    for since in ("process start", "engine creation"):
        timing = compare(seconds("second", since), seconds("first", since))
        rows.append(
            Row(
                name=f"startup/{name}/{since} to first decode step",
                value=timing.seconds,
                unit="s",
                baseline="empty compilation cache",
                baseline_value=timing.baseline_seconds,
                ratio=timing.ratio,
                details={
                    "params": num_params(config),
                    "rounds": repeats,
                    "ratio_low": timing.ratio_low,
                    "ratio_high": timing.ratio_high,
                    "compiling_s": statistics.median(seconds("second", "compiling")),
                    "baseline_compiling_s": statistics.median(seconds("first", "compiling")),
                },
            )
        )
    return rows
