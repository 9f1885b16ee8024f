"""Is speculation lossless? Counts tokens and logprobs that differ from those of plain decoding.

Covers every drafter, batches that shrink bucket by bucket, passes of all sizes in turn whatever their
predicted gain, responses that join and leave, drafting for one half while the other is verified, with and
without run-ahead. The policy is not grown, since bits do not depend on the cost of a pass.
"""

from collections.abc import Sequence

import numpy as np

from drafters.registry import make_drafter, states_read
from rljax.benchmarking import Row
from rljax.config import ExperimentConfig
from rljax.requests import Completion, DecodeStatistics, accumulate
from rljax.rollout.scheduler import Scheduler
from rljax.speculation.pass_times import PassTimes
from rljax.speculation.run_ahead import RunAhead
from rljax.speculation.speculator import Speculator
from rljax.training.training_run import TrainingRun
from rollout_benchmarks.every_pass import EveryPass, take_turns
from rollout_benchmarks.variants import open_run, step_requests, unrewarded

_DRAFTERS = {
    "prompt_lookup": ("prompt_lookup",),
    "suffix_decoding": ("suffix_decoding",),
    "histospec": ("histospec",),
    "srt": ("srt",),
    "srt with run-ahead": ("srt",),
    "quantized": ("quantized",),
    "eagle": ("eagle",),
    "all in turn": ("srt", "quantized", "eagle"),
    "all mixed": ("srt", "quantized", "eagle"),
}
ARGUMENTS = {"eagle": {"depths": [1, 3], "slices": 2, "learning_rate": 3e-3}}
_SLOTS = (6, 24)  # of 64 requests
_BATCHES = (2, 6, 24, 64)
_SIZES = (16, 32, 64, 128)


def lossless_rows(config: ExperimentConfig, steps: int) -> list[Row]:
    """Counts tokens and logprobs that differ."""
    chosen = config.model_copy(
        update={
            "policy": config.policy.model_copy(update={"growth": None}),
            "engine": config.engine.model_copy(update={"max_slots": 64, "batch_buckets": _BATCHES}),
            "speculation": config.speculation.model_copy(
                update={"verify_buckets": _SIZES, "max_drafts": 15, "max_batch": 64}
            ),
        }
    )
    rows = []
    with open_run(chosen) as (run, progress):
        progress.stage("bench", len(_DRAFTERS))
        params = run.engine.load_params(run.state.params)
        plain = []
        for step in range(steps):
            requests = step_requests(run, step)
            plain.append(Scheduler(run.engine, len(requests)).run(params, requests)[0])
        times = PassTimes()
        for number, name in enumerate(_DRAFTERS):
            row = f"lossless/{run.config.policy.compute_dtype}/{name}"
            rows.append(_compare(run, row, name, plain, times))
            progress.step(number + 1, {"tokens_per_second": 0.0})
    return rows


def _compare(
    run: TrainingRun, label: str, name: str, plain: Sequence[Sequence[Completion]], times: PassTimes
) -> Row:
    params = run.engine.load_params(run.state.params)
    run_ahead = RunAhead(64, 1.0) if "run-ahead" in name else None
    drafters = {each: make_drafter(each, **ARGUMENTS.get(each, {})) for each in _DRAFTERS[name]}
    engine = run.engine.handing_out(states_read(drafters, run.engine.config))
    every_pass = EveryPass()
    choice = every_pass.choice(mix="mixed" in name)
    speculator = Speculator(engine, drafters, 64, run_ahead, times, choice)
    speculator.warm_up(params, run.config.rollout.max_prompt_length)
    take_turns(speculator, every_pass, alone="turn" in name)
    total, tokens, logprobs, ahead = DecodeStatistics(), 0, 0, 0
    for step, expected in enumerate(plain):
        slots, overlap = _SLOTS[step % 2], step % 3 == 2
        requests = step_requests(run, step)
        if run_ahead is not None:
            run_ahead.plan(step_requests(run, step + 1))
        drafted, statistics = Scheduler(engine, slots, None, speculator, overlap).run(params, requests)
        for one, other in zip(expected, drafted, strict=True):
            difference = _differing(one, other)
            tokens, logprobs = tokens + difference[0], logprobs + difference[1]
        speculator.learn(unrewarded(requests, drafted))
        if run_ahead is not None:
            ahead += int(speculator.metrics(statistics)["speculation/ahead_agreed"])
        accumulate(total, statistics)
    return Row(
        name=label,
        value=tokens,
        unit="tokens that differ",
        baseline="tokens",
        baseline_value=total.tokens,
        ratio=1 - tokens / total.tokens,
        details={
            "logprobs_that_differ": logprobs,
            "requests": len(plain) * len(requests),
            "verifying_passes": total.verified,
            "plain_steps": total.steps - total.verified,
            "drafted": total.drafted,
            "accepted": total.accepted,
            "sampled_ahead": total.ahead_tokens,
            "sampled_ahead_and_again": ahead,
        },
    )


def _differing(one: Completion, other: Completion) -> tuple[int, int]:
    """Counts differing tokens and logprobs of two completions; those of the longer one's rest count as
    well.
    """
    length = min(len(one.response_ids), len(other.response_ids))
    longer = max(len(one.response_ids), len(other.response_ids)) - length
    return (
        int(np.sum(one.response_ids[:length] != other.response_ids[:length])) + longer,
        int(np.sum(one.logprobs[:length] != other.logprobs[:length])) + longer,
    )
