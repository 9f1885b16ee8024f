"""A GRPO step here and in TRL: `python scripts/bench_peers.py [--config FILE] [key=value ...]`.

Both get the same exported policy, prompts, group size, lengths, learning rate and number type, and train for
the same number of steps, each in a process of its own, ours before and after TRL: once as it is, and once
without leaving out responses that have no advantage. TRL, whose requirements exclude ours, is installed into
an environment of its own. `docs/benchmarks.md` says what each row means.
"""

import dataclasses
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from processes import run_process, train
from rljax.benchmark_runs import Benchmark, Measurement
from rljax.benchmarking import Row, counted_row
from rljax.config import ExperimentConfig
from rljax.engine.number_type import with_number_type
from rljax.errors import UserError
from rljax.models.huggingface import save_model
from rljax.models.transformer import num_params
from rljax.rollout.collector import TRAINING, WantedGroups
from rollout_benchmarks.variants import open_run
from workloads import REAL_CONFIG

_OVERRIDES = (
    "rollout.prompts_per_step=8", "rollout.samples_per_prompt=8", "training.minibatches_per_step=1",
    "training.steps=7", "evaluation.problems=0", "checkpoint.every=0",
)  # fmt: skip
_WAYS = {"step": (), "step without skipping": ("algorithm.skip_zero_advantages=false",)}
"""Our sides, by name of their rows: keys of the config that each sets."""
_PEER = Path(__file__).parent / "trl_grpo.py"
_REQUIREMENTS = ("trl==1.16.0", "torch==2.13.0")
_WARM_STEPS = 1  # at the beginning, that compile and do not count


@dataclasses.dataclass(frozen=True)
class _Step:
    """One step of a library: rollouts of so many response tokens, rewards and update."""

    seconds: float
    tokens: int
    reward: float


def _step_rows(arguments: Namespace) -> list[Row]:
    config = with_number_type(arguments.config)
    if config.algorithm.name != "grpo" or config.algorithm.kl_coefficient:
        raise UserError("algorithm: the comparison is GRPO without KL; set algorithm.kl_coefficient=0")
    if config.training.minibatches_per_step != 1:
        raise UserError("training.minibatches_per_step: the comparison makes one update a step; set it to 1")
    if config.policy.compute_dtype not in ("float32", "bfloat16"):
        raise UserError("policy.compute_dtype: the comparison knows float32 and bfloat16")
    group = config.rollout.samples_per_prompt
    size = group * config.rollout.prompts_per_step
    micro_batch = size if arguments.micro_batch is None else arguments.micro_batch
    if micro_batch < 1 or micro_batch % group or size % micro_batch:
        raise UserError(
            f"--micro-batch: {micro_batch} is not a number of whole groups of {group} sequences"
            f" that divides the {size} of a step"
        )
    settings = [*_OVERRIDES, *arguments.overrides, f"policy.compute_dtype={config.policy.compute_dtype}"]
    return rows_of(config, settings, _interpreter(), arguments.file, micro_batch)


BENCHMARK = Benchmark(
    "peers",
    __doc__,
    lambda arguments: [Measurement("step", "a GRPO step", _step_rows, (arguments,))],
    config=REAL_CONFIG,
    settings=_OVERRIDES,
    options={
        "--micro-batch": {
            "type": int,
            "metavar": "N",
            "help": "sequences that TRL updates with at a time, where memory does not do for all of a step"
            " (default: all)",
        },
    },
)


def _interpreter() -> Path:
    """The Python of TRL's environment, which is made at the first use."""
    directory = Path("cache/peers/trl")
    executable = directory / "bin" / "python"
    if executable.exists():
        return executable
    partial = directory.with_name(f"{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        subprocess.run([sys.executable, "-m", "venv", os.fspath(partial)], check=True)
        subprocess.run([partial / "bin" / "python", "-m", "pip", "install", "-q", *_REQUIREMENTS], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise UserError(f"trl: its environment cannot be made: {error}") from error
    partial.rename(directory)
    return executable


def rows_of(
    config: ExperimentConfig, settings: Sequence[str], python: Path, file: str | Path, micro_batch: int
) -> list[Row]:
    """The rows of both ways, by a config, which `settings` make of `file`, that TRL can be given, in the
    environment of `python`; `micro_batch` are sequences that TRL updates with at a time: whole groups.
    """
    with tempfile.TemporaryDirectory() as directory:
        job = Path(directory)
        parameters = _write_job(config, micro_batch, job)
        before = {way: _ours(file, [*settings, *keys], job) for way, keys in _WAYS.items()}
        output = job / "trl.json"
        run_process([python, _PEER, job / "job.json", output], "trl")
        results = json.loads(output.read_text(encoding="utf-8"))
        after = {way: _ours(file, [*settings, *keys], job) for way, keys in _WAYS.items()}
    # From one call of the reward function to the next: an update, and the rollout of the tokens counted.
    steps = [
        _Step(call["at"] - last["at"], call["tokens"], call["reward"])
        for last, call in itertools.pairwise(results["calls"])
    ][_WARM_STEPS:]
    rows = []
    for way in _WAYS:
        both = [*before[way], *after[way]]
        details = {
            "parameters": parameters,
            "dtype": config.policy.compute_dtype,
            "speculation": config.speculation.drafter,
            "steps": len(steps),
            "peer_micro_batch": micro_batch,
            "our_steps": len(both),
            "our_seconds_before_and_after": [_mean(each, "seconds") for each in (before[way], after[way])],
            "versions": results["versions"],
        }
        for side, of in (("our", both), ("peer", steps)):
            details[f"{side}_tokens_per_step"] = _mean(of, "tokens")
            details[f"{side}_reward"] = _mean(of, "reward")
        seconds = [_mean(of, "seconds") for of in (both, steps)]
        rates = [_mean(of, "tokens") / _mean(of, "seconds") for of in (both, steps)]
        rows += [
            counted_row(f"{way}/trl/time", *seconds, "s/step", "trl", less=True, **details),
            counted_row(f"{way}/trl/tokens", *rates, "response tokens/s", "trl", **details),
        ]
    return rows


def _mean(steps: Sequence[_Step], name: str) -> float:
    return sum(getattr(step, name) for step in steps) / len(steps)


def _write_job(config: ExperimentConfig, micro_batch: int, job: Path) -> int:
    """Writes the job that `trl_grpo.py` reads, and the policy that it begins with; returns the number of its
    parameters.
    """
    with open_run(config) as (run, _):
        collector, prompts = run.collector, []
        for index in range(config.training.steps * config.rollout.prompts_per_step):
            (request,) = collector.requests(WantedGroups("train", [index], 1, TRAINING, 0))
            text = collector.tokenizer.decode(list(request.prompt_ids))  # with the chat template applied
            prompts.append({"prompt": text, "answer": collector.task.problem("train", index).answer})
        model, tokenizer = run.engine.config, run.tokenizer_directory
        save_model(job / "policy", model, run.state.params, "float32", tokenizer)
        settings: dict[str, Any] = {
            "policy": str(job / "policy"),
            "prompts": prompts,
            "micro_batch": micro_batch,
            "steps": config.training.steps,
            "eos_token_ids": list(run.engine.eos_token_ids),
            "learning_rate": config.optimizer.learning_rate,
            "beta2": config.optimizer.beta2,
            "dtype": run.config.policy.compute_dtype,
            "seed": config.seed,
        }
    of_rollouts = "prompts_per_step", "samples_per_prompt", "max_response_length", "temperature"
    settings |= {name: getattr(config.rollout, name) for name in of_rollouts}
    (job / "job.json").write_text(json.dumps(settings), encoding="utf-8")
    return num_params(model)


def _ours(file: str | Path, settings: Sequence[str], job: Path) -> list[_Step]:
    """Trains the job's policy with `scripts/train.py`."""
    policy = f"policy.path={job / 'policy'}", "policy.shape=null", "policy.growth=null", "warm_start=null"
    lines, _ = train(file, Path(tempfile.mkdtemp(dir=job)) / "run", *settings, *policy)
    return [
        _Step(line["time/step"], line["rollout/tokens"], line["reward/mean"])
        for line in lines
        if "time/step" in line
    ][_WARM_STEPS:]


if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
