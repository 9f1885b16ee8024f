"""What ranking SRT's candidates under the noise is worth, by how much its history knows.

Candidates are ranked by `log share + G` (`drafters/host_noise.py`) or by their share of what followed. Noise
helps as far as shares are the policy's probabilities, so the history is what is varied: none but the group's
running samples (epoch 1), earlier epochs of policies that differ little or much, and ever more samples of the
very policy. Recorded responses to the small policy are replayed, so nothing but the ranking differs.
"""

from collections.abc import Sequence

import numpy as np

from drafters.base import Drafter, DraftRequest
from drafters.registry import make_drafter
from rljax.benchmarking import Row
from rljax.config import ExperimentConfig
from rljax.rollout.records import Completion, Request
from rollout_benchmarks.ahead import decode, replay, small_policy
from rollout_benchmarks.variants import collect_step, open_run, step_requests, unrewarded

_OTHER_NOISE = 2000  # purposes from here on: nothing samples for them
_WAYS = {"SRT": False, "SRT ranked by the noise": True}


def epoch_rows(config: ExperimentConfig, learning_rates: Sequence[float], epochs: int) -> list[Row]:
    """Tokens a pass of SRT ranked under the noise against SRT, with real updates between the steps."""
    per_epoch = max(config.task.problems // config.rollout.prompts_per_step, 1)
    steps, rows = epochs * per_epoch, []
    for rate in learning_rates:
        with open_run(small_policy(config, rate, steps)) as (run, progress):
            progress.stage("bench", steps)
            drafters = _drafters(rollouts=4)
            counts = {name: np.zeros(2, int) for name in _WAYS}
            for step in range(steps):
                requests = step_requests(run, step)
                groups, _, _ = collect_step(run, run.collector, step)
                completions = [completion for group in groups for completion in group.completions]
                for name, drafter in drafters.items():
                    counts[name] += _replay(config, drafter, requests, completions)
                    drafter.learn(unrewarded(requests, completions))
                if (step + 1) % per_epoch == 0:
                    epoch = (step + 1) // per_epoch
                    rows.append(_row(f"ranking/learning rate {rate:g}/epoch {epoch}", counts))
                    counts = {name: np.zeros(2, int) for name in _WAYS}
                run.learn(groups)
                progress.step(step + 1, {"tokens_per_second": 0.0})
    return rows


def same_policy_rows(config: ExperimentConfig, rollouts: Sequence[int]) -> list[Row]:
    """The same with a history of so many rollouts by the very policy, and without running samples."""
    rows, drafters = [], _drafters(rollouts=max(rollouts), live=False)
    with open_run(small_policy(config, config.optimizer.learning_rate, 1)) as (run, progress):
        progress.stage("bench", max(rollouts))
        requests = step_requests(run, 0)
        completions = decode(run, requests)
        for number in range(1, max(rollouts) + 1):
            others = step_requests(run, 0, _OTHER_NOISE + number)
            known = unrewarded(others, decode(run, others))
            for drafter in drafters.values():
                drafter.learn(known)
            if number in rollouts:
                counts = {
                    name: _replay(config, drafter, requests, completions)
                    for name, drafter in drafters.items()
                }
                samples = number * config.rollout.samples_per_prompt
                rows.append(_row(f"ranking/same policy/{samples} samples", counts))
            progress.step(number, {"tokens_per_second": 0.0})
    return rows


def _drafters(**args: int | bool) -> dict[str, Drafter]:
    return {name: make_drafter("srt", noise_ranking=ranked, **args) for name, ranked in _WAYS.items()}


def _replay(
    config: ExperimentConfig,
    drafter: Drafter,
    requests: Sequence[Request],
    completions: Sequence[Completion],
) -> np.ndarray:
    asked = [DraftRequest(request.prompt_ids, request.noise_key) for request in requests]
    return replay(drafter, asked, completions, config.speculation.max_drafts)


def _row(name: str, counts: dict[str, np.ndarray]) -> Row:
    plain, ranked = (float(counts[way][0] / counts[way][1]) for way in _WAYS)
    return Row(
        name=name,
        value=ranked,
        unit="tokens a pass",
        baseline="SRT",
        baseline_value=plain,
        ratio=ranked / plain,
        details={"tokens": int(counts["SRT"][0])},
    )
