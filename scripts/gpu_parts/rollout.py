"""A rollout with a long tail and a slot for every response: plain, and with three kinds of drafts.

The policy is the one that `REPORT_POLICY` names, as `policy.path` would. Without one it is the long-tail
benchmark's, trained here for a few seconds and grown to 95 million parameters.
"""

import dataclasses
import functools
import os
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from drafters.registry import make_drafters, rehearse_drafters
from gpu_parts.engines import compile_together, kernel_keys
from gpu_parts.part import Part, run
from rljax.assembly.decoding import make_scheduler, unmeasured_numerics, warm_up
from rljax.assembly.policy import Policy, grown_policy, make_policy
from rljax.assembly.task import checked_task
from rljax.config import ExperimentConfig, load_config
from rljax.engine.executables import ExecutablePool
from rljax.numerics.rows import Numerics
from rljax.progress import Progress
from rljax.requests import Completion, Request
from rljax.rollout.collector import Scheduler
from rljax.rollout.prompts import Prompts
from rljax.sampling.noise import request_key
from rljax.training.interruption import StopRequest
from rljax.training.warm_start import warm_start
from rollout_benchmarks.equality import Count
from rollout_benchmarks.variants import unrewarded, with_keys

_CONFIG = Path(__file__).resolve().parents[2] / "configs" / "bench_long_tail.yaml"
_EPOCHS = 2
_SHORT = 8  # tokens of a response before the clock starts
_PER_VARIANT = 15.0  # seconds that compiling and two rollouts take at least

# 64 responses, each in a slot of its own, and few programs: in the tail, 512 rows take the largest trees.
_RUN = (
    "policy.compute_dtype=bfloat16", "rollout.prompts_per_step=8", "rollout.samples_per_prompt=8",
    "rollout.max_prompt_length=64", "engine.max_slots=64", "engine.batch_buckets=[64]",
    "engine.cache_buckets=[512]", "engine.row_invariant=warn", "engine.compilation_cache=null",
    "speculation.verify_buckets=[128,512]", "speculation.max_drafts=15", "speculation.max_batch=64",
)  # fmt: skip
_WARM_START = ("warm_start.steps=300",)
_REAL = (  # nothing is trained, but a config's rows hold its responses
    "policy.shape=null", "policy.growth=null", "warm_start=null", "rollout.max_response_length=896",
    "engine.cache_buckets=[1024]", "training.pack_length=1024",
)  # fmt: skip
_QUICK = (
    "policy.growth=null", "policy.shape.hidden_size=64", "policy.shape.num_layers=1",
    "policy.shape.num_heads=2", "policy.shape.num_kv_heads=1", "policy.shape.mlp_size=64",
    "warm_start=null", "rollout.prompts_per_step=2", "rollout.samples_per_prompt=2",
    "rollout.max_prompt_length=16", "rollout.max_response_length=32", "engine.max_slots=4",
    "engine.batch_buckets=[4]", "engine.cache_buckets=[256]", "speculation.verify_buckets=[16]",
    "speculation.max_drafts=7",
)  # fmt: skip

# The head is new: it learns from the first epoch's responses, all at once behind the rollout.
_HEAD = {"variant": "eagle", "depths": [4], "learning_rate": 3e-3, "train_below": 0, "slices": 128, "rows": 8}
_DRAFTERS: dict[str, dict[str, Any]] = {
    "SRT": {"drafter": "srt"},
    "W4, always a chain of 5": {
        "drafter": "quantized",
        "args": {"bits": 4},
        "choice": "fixed",
        "strategies": [{"drafter": "quantized", "depth": 5, "top_k": 1, "nodes": 5}],
    },
    "EAGLE": {"drafter": "eagle", "args": _HEAD},
}

_QUESTIONS = (
    "A train covers {a} km in {b} minutes. How far does it go in an hour? Explain every step.",
    "Write a short story about a lighthouse keeper who counts {a} ships and {b} stars.",
    "List the steps to bake bread for {a} people, and say why each of them matters.",
    "What is {a} times {b}? Show the calculation, then check the answer.",
    "Explain to a child why the sky is blue, in about {a} words.",
    "Write a Python function that sums the multiples of {b} below {a}, and explain it.",
    "Name {b} countries and a typical dish of each.",
    "Tom has {a} apples and gives {b} to each of his friends. How many friends can he give apples to?",
    "Summarize how a bill becomes a law, in {b} points.",
)
"""For a policy that follows instructions."""


@dataclasses.dataclass(frozen=True)
class _Bench:
    """What all rollouts share: the policy and its `name` in the rows, and requests of all `epochs`, the same
    prompts with other noise.
    """

    part: Part
    name: str
    config: ExperimentConfig
    policy: Policy
    numerics: Numerics
    pool: ExecutablePool
    epochs: list[list[Request]]

    def scheduler(self, keys: dict[str, Any]) -> tuple[Scheduler, Any, float]:
        """Returns a scheduler that drafts by keys of the section `speculation`, the weights that it decodes
        with, and the seconds that compiling took, with measuring the passes and a short rollout.
        """
        speculation = self.config.speculation.model_copy(update={"drafter": None} | keys)
        config = self.config.model_copy(update={"speculation": speculation})
        drafters = make_drafters(speculation)
        scheduler = make_scheduler(config, self.policy, drafters, self.numerics, self.pool, None)
        engine, start = scheduler.engine, time.perf_counter()
        params = engine.load_params(self.policy.params)
        shape = engine.buckets.batch[0], engine.buckets.cache[0]
        longest = engine.prefill_length(config.rollout.max_prompt_length)
        lengths = [padded for padded in engine.prefill_lengths if padded <= longest]
        calls = [functools.partial(engine.compile_plain, params, *shape)]
        calls += [functools.partial(engine.compile_prefill, params, shape[0], padded) for padded in lengths]
        for each in engine.buckets.passes(shape[0]):
            calls.append(functools.partial(engine.compile_verify, params, *shape, *each))
        compile_together(calls)
        warm_up(scheduler, params, config, wait=True)
        # What is loaded or allocated when it first runs is not timed either. Drafters learn nothing of this.
        short = [
            dataclasses.replace(each, prompt_ids=each.prompt_ids[::-1], max_response=_SHORT, training=False)
            for each in self.epochs[0]
        ]
        scheduler.run(params, short)
        return scheduler, params, time.perf_counter() - start


def measure(part: Part) -> None:
    """Rolls out plainly, and then with one drafter after another; counts what differs from plain decoding."""
    with ThreadPoolExecutor(1) as beside, tempfile.TemporaryDirectory() as directory:
        path = None if part.quick else os.environ.get("REPORT_POLICY")
        of_policy = _QUICK if part.quick else (*_REAL, f"policy.path={path}") if path else _WARM_START
        config = load_config(_CONFIG, [*_RUN, *kernel_keys(part.quick), *of_policy])
        speculation = config.speculation.model_copy(update=_DRAFTERS["SRT"])
        rehearsed = beside.submit(rehearse_drafters, speculation)  # numba's loops, while XLA compiles
        bench = _make_bench(part, config, path, Path(directory))
        baseline = _roll_out(bench, "plain", {})
        rehearsed.result()
        for name, keys in _DRAFTERS.items():
            if part.quick and name == "EAGLE":
                part.note("EAGLE left out: its many programs take a CPU too long for a look")
                continue
            if part.has_time(name, _PER_VARIANT):
                _roll_out(bench, name, keys, baseline)


def _make_bench(part: Part, config: ExperimentConfig, path: str | None, directory: Path) -> _Bench:
    task, rollout, pool = checked_task(config), config.rollout, ExecutablePool()
    policy, start = make_policy(config, task, directory / "tokenizer"), time.perf_counter()
    if config.warm_start is not None:
        # Trained in float32, and rolled out in bfloat16 like larger ones.
        trained_in = with_keys(config, policy={"compute_dtype": "float32"})
        numerics = unmeasured_numerics(trained_in, policy.config, None)
        with Progress() as progress:
            shared = (numerics, pool, None, progress, directory / "warm_start", StopRequest(progress.message))
            policy = warm_start(trained_in, policy, task, *shared)
        part.note(f"the policy's warm start took {time.perf_counter() - start:.0f} s")
    if config.policy.growth is not None:
        policy = grown_policy(policy, config.policy.growth, config.seed)
    if path is not None:
        rng, system = np.random.default_rng(0), "Answer in full sentences."  # short, as prompts are
        texts = [
            question.format(a=rng.integers(30, 90), b=rng.integers(3, 9))
            for question in _QUESTIONS[: rollout.prompts_per_step]
        ]
        chats = [[{"role": "system", "content": system}, {"role": "user", "content": text}] for text in texts]
        prompts = [tuple(policy.tokenizer.encode_chat(chat)) for chat in chats]
    else:
        source = Prompts(task, policy.tokenizer, rollout.max_prompt_length, leave_out=True)
        indices, _ = source.next_problems("train", 0, rollout.prompts_per_step)
        prompts = [source.tokens(task.problem("train", index)) for index in indices]
    samples, length = range(rollout.samples_per_prompt), rollout.max_response_length
    epochs = [
        [
            Request(prompt, request_key(config.seed, epoch, index, sample), length, step=epoch)
            for index, prompt in enumerate(prompts)
            for sample in samples
        ]
        for epoch in range(_EPOCHS)
    ]
    name = "tiny" if part.quick else Path(path).name.removesuffix(".gguf") if path else "95M"
    return _Bench(part, name, config, policy, unmeasured_numerics(config, policy.config, None), pool, epochs)


def _roll_out(
    bench: _Bench, name: str, keys: dict[str, Any], baseline: Sequence[tuple[list[Completion], float]] = ()
) -> list[tuple[list[Completion], float]]:
    """Adds the rows of plain decoding, or with a `baseline` of a drafter, which learns from every epoch.
    Returns the responses of every epoch, and the seconds they took.
    """
    (scheduler, params, compile_seconds), found = bench.scheduler(keys), []
    repeats = 1 if baseline or bench.part.quick else 2
    for epoch, requests in enumerate(bench.epochs, 1):
        start = time.perf_counter()
        for _ in range(repeats):
            completions, statistics = scheduler.run(params, requests)
        seconds = (time.perf_counter() - start) / repeats
        found.append((completions, seconds))
        rate, lengths = statistics.tokens / seconds, [len(each.response_ids) for each in completions]
        details = {
            "seconds": seconds,
            "tokens": statistics.tokens,
            "passes": statistics.steps,
            "responses": len(lengths),
            "length_mean": float(np.mean(lengths)),
            "length_p75": float(np.percentile(lengths, 75)),
            "length_max": max(lengths),
        }
        if not baseline:
            details["busy_slots"] = statistics.tokens / (statistics.steps * len(requests))
        else:
            start, (expected, plain_seconds) = time.perf_counter(), baseline[epoch - 1]
            scheduler.speculator.learn(unrewarded(requests, completions))
            learn_seconds, count = time.perf_counter() - start, Count()
            for number, (one, other) in enumerate(zip(expected, completions, strict=True)):
                count.compare(one, other, {"request": number})
            plain_rate = sum(len(each.response_ids) for each in expected) / plain_seconds
            details |= {
                "plain_tokens_per_second": plain_rate,
                "ratio": rate / plain_rate,
                "accept_length": statistics.accept_length,
                "acceptance": statistics.accepted / max(statistics.drafted, 1),
                "verifying_passes": statistics.verified,
                "compared_tokens": count.tokens,
                "flips": len(count.flips),
                "different_logprobs": count.logprobs,
                "flips_shown": count.flips[:5],
                "learn_seconds": learn_seconds,
                "host_seconds": statistics.host_seconds,
                "draft_seconds": statistics.draft_seconds,
            }
        label = f"{bench.name}/{name}/epoch {epoch}"
        bench.part.row(label, rate, "tokens/s", compile_seconds, repeats, **details)
    return found


if __name__ == "__main__":
    run("rollout", measure)
