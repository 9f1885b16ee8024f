"""A GRPO step here and in TRL: `python scripts/bench_peers.py [--config FILE] [key=value ...]`.

Both get the same exported policy, prompts, group size, lengths, learning rate and number type, and train for
the same number of steps, each in a process of its own, ours before and after TRL: once as it is, and once
without leaving out responses that have no advantage. TRL is installed into an environment of its own.
`docs/benchmarks.md` says what each row means.
"""

import itertools
import json
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from peer_benchmarks.environment import interpreter
from peer_benchmarks.job import WARM_STEPS, Step, check_config, write_job
from rljax.benchmark_runs import Benchmark, Measurement
from rljax.benchmarking import Row, counted_row
from rljax.config import ExperimentConfig
from rljax.engine.number_type import with_number_type
from rljax.errors import UserError
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
_HERE = Path(__file__).parent


def _step_rows(arguments: Namespace) -> list[Row]:
    config = with_number_type(arguments.config)
    check_config(config)
    micro_batch = _micro_batch(arguments.micro_batch, config)
    python = interpreter(arguments.environment, arguments.python)
    settings = [*_OVERRIDES, *arguments.overrides, f"policy.compute_dtype={config.policy.compute_dtype}"]
    return rows_of(config, settings, python, arguments.file, micro_batch)


BENCHMARK = Benchmark(
    "peers",
    __doc__,
    lambda arguments: [Measurement("step", "a GRPO step", _step_rows, (arguments,))],
    config=REAL_CONFIG,
    settings=_OVERRIDES,
    options={
        "--environment": {
            "type": Path,
            "default": Path("cache/peers/trl"),
            "metavar": "DIR",
            "help": "where TRL is installed at the first use (default: cache/peers/trl)",
        },
        "--micro-batch": {
            "type": int,
            "metavar": "N",
            "help": "sequences that TRL updates with at a time, where memory does not do for all of a step"
            " (default: all)",
        },
        "--python": {"metavar": "FILE", "help": "the interpreter to make the environment with"},
    },
)


def _micro_batch(wanted: int | None, config: ExperimentConfig) -> int:
    """Returns how many sequences TRL updates with at a time: all of a step, or `wanted`."""
    group = config.rollout.samples_per_prompt
    size = group * config.rollout.prompts_per_step
    if wanted is None:
        return size
    if wanted < 1 or wanted % group or size % wanted:
        raise UserError(
            f"--micro-batch: {wanted} is not a number of whole groups of {group} sequences"
            f" that divides the {size} of a step"
        )
    return wanted


def rows_of(
    config: ExperimentConfig,
    settings: Sequence[str],
    python: Path,
    file: str | Path,
    micro_batch: int,
) -> list[Row]:
    with tempfile.TemporaryDirectory() as directory:
        job = Path(directory)
        parameters = _write_job(config, micro_batch, job)

        def ours(when: str) -> dict[str, list[Step]]:
            return {
                way: _ours(file, [*settings, *keys], job, f"{when}-{number}")
                for number, (way, keys) in enumerate(_WAYS.items())
            }

        before = ours("before")
        steps, versions = _theirs(python, job)
        after = ours("after")
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
            "our_seconds_before_and_after": [_per_step(before[way]), _per_step(after[way])],
            "our_tokens_per_step": sum(step.tokens for step in both) / len(both),
            "peer_tokens_per_step": sum(step.tokens for step in steps) / len(steps),
            "our_reward": sum(step.reward for step in both) / len(both),
            "peer_reward": sum(step.reward for step in steps) / len(steps),
            "versions": versions,
        }
        seconds, rates = (_per_step(both), _per_step(steps)), (_rate(both), _rate(steps))
        rows += [
            counted_row(f"{way}/trl/time", *seconds, "s/step", "trl", less=True, **details),
            counted_row(f"{way}/trl/tokens", *rates, "response tokens/s", "trl", **details),
        ]
    return rows


def _write_job(config: ExperimentConfig, micro_batch: int, job: Path) -> int:
    """Writes the job; returns the number of the policy's parameters."""
    with open_run(config) as (run, _):
        collector, per_step = run.collector, config.rollout.prompts_per_step
        prompts = []
        for index in range(config.training.steps * per_step):
            problem = collector.task.problem("train", index)
            (request,) = collector.requests(WantedGroups("train", [index], 1, TRAINING, 0))
            text = collector.tokenizer.decode(list(request.prompt_ids))
            prompts.append({"prompt": text, "answer": problem.answer})
        write_job(run, prompts, micro_batch, job)
        return num_params(run.engine.config)


def _ours(file: str | Path, settings: Sequence[str], job: Path, name: str) -> list[Step]:
    """Trains the job's policy with `scripts/train.py`."""
    run_dir = job / name
    settings = [*settings, f"run_dir={run_dir}", f"policy.path={job / 'policy'}", "policy.shape=null"]
    settings += ["policy.growth=null", "warm_start=null"]
    _run([sys.executable, _HERE / "train.py", "--config", file, *settings], "rljax")
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    metrics = [line for line in map(json.loads, lines) if "time/step" in line]
    steps = [Step(line["time/step"], line["rollout/tokens"], line["reward/mean"]) for line in metrics]
    return steps[WARM_STEPS:]


def _theirs(python: Path, job: Path) -> tuple[list[Step], dict[str, str]]:
    """Trains the job with TRL; returns its steps, and versions."""
    output = job / "trl.json"
    _run([python, _HERE / "peer_benchmarks" / "trl_grpo.py", job / "job.json", output], "trl")
    results = json.loads(output.read_text(encoding="utf-8"))
    calls = results["calls"]
    # From one call of the reward function to the next: an update, and the rollout of the tokens counted.
    steps = [
        Step(call["at"] - before["at"], call["tokens"], call["reward"])
        for before, call in itertools.pairwise(calls)
    ]
    return steps[WARM_STEPS:], results["versions"]


def _run(command: Sequence[str | Path], name: str) -> None:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode:
        said = " / ".join(done.stderr.strip().splitlines()[-3:])
        raise UserError(f"{name} ended with status {done.returncode}: {said}")


def _per_step(steps: Sequence[Step]) -> float:
    return sum(step.seconds for step in steps) / len(steps)


def _rate(steps: Sequence[Step]) -> float:
    return sum(step.tokens for step in steps) / sum(step.seconds for step in steps)


if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
