"""Cost of the quantized self-drafter: a draft step against the policy's, a refresh, and its bytes."""

import statistics
from collections.abc import Callable

import jax
import numpy as np

from drafters.quantized import QuantizedPolicy, WeightFormat, default_format
from engine_benchmarks.policies import PROMPT_TOKENS, measured_numerics, random_prompts
from rljax.benchmarking import Row, compare, interleave
from rljax.engine.buckets import Buckets, make_buckets
from rljax.engine.engine import DecodeEngine
from rljax.engine.host_sync import Assignment
from rljax.engine.state import DecodeState
from rljax.models.config import ModelConfig
from rljax.models.transformer import Params, init_params, num_params
from rljax.numerics.rows import Numerics
from rljax.sampling.distribution import SamplingParams
from rljax.sampling.noise import request_key

_STEPS = 15
_FORMATS = {
    "W4": default_format(4),
    "W8": default_format(8),
    "W8, float activations": WeightFormat(8, 0, "float"),
}


def self_draft_rows(name: str, config: ModelConfig, batches: tuple[int, ...], repeats: int) -> list[Row]:
    """Measures milliseconds of a draft step by format, batch and number type, against the policy's.

    The baseline is the same program with the policy's weights. Both sides draft chains of the same length
    from the same decode state.
    """
    rows = []
    for dtype in ("float32", "bfloat16"):
        length = PROMPT_TOKENS + _STEPS + 2
        buckets: Buckets = make_buckets(max(batches), length, True, max_drafts=_STEPS)
        numerics, _ = measured_numerics(config, Numerics(True, dtype), buckets)
        engine = DecodeEngine(config, numerics, SamplingParams(), buckets, eos_token_ids=())
        params = engine.load_params(init_params(config, seed=0))
        drafters, refreshes = {}, []
        for label, fmt in _FORMATS.items():
            policy = QuantizedPolicy(fmt)
            policy.refresh(params)  # compiles
            seconds = []
            for _ in range(repeats):
                drafters[label] = policy.refresh(params)
                seconds.append(policy.seconds)
            refreshes.append((label, statistics.median(seconds), policy.bytes, policy.read_bytes))
        for batch in batches:
            rows += _step_rows(
                f"self_draft/{name}/{dtype}/batch {batch}", engine, params, drafters, batch, repeats
            )
        own_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
        for label, seconds, stored, read in refreshes:
            rows.append(
                Row(
                    name=f"self_draft/{name}/{dtype}/{label}/bytes",
                    value=read / 1e6,
                    unit="MB",
                    baseline="the policy's weights",
                    baseline_value=own_bytes / 1e6,
                    ratio=own_bytes / read,
                    details={
                        "params": num_params(config),
                        "stored_beside_policy_mb": stored / 1e6,
                        "refresh_seconds": seconds,
                        "ideal_time_ratio": read / own_bytes,
                    },
                )
            )
    return rows


def _step_rows(
    name: str, engine: DecodeEngine, params: Params, drafters: dict[str, Params], batch: int, repeats: int
) -> list[Row]:
    prompts = random_prompts(batch, engine.config.vocab_size)
    requests = [Assignment(i, i, request_key(0, i), 2 * _STEPS) for i in range(batch)]
    state = engine.bulk_insert(
        engine.prefill(params, prompts), engine.init_state(batch, len(prompts[0]) + _STEPS + 2), requests
    )
    held: list[DecodeState] = [state]

    def drafts(weights: Params) -> Callable[[], np.ndarray]:
        def run() -> np.ndarray:
            held[0], drafted = engine.draft(weights, held[0], _STEPS)
            tokens = np.asarray(drafted.tokens)[:batch]
            if (tokens < 0).any():
                raise RuntimeError("a chain ended early")
            return tokens

        return run

    draft_by_policy, actions = drafts(params), {label: drafts(weights) for label, weights in drafters.items()}
    truth = draft_by_policy()
    agreement = {label: float((action() == truth).mean()) for label, action in actions.items()}
    seconds = interleave({**actions, "policy": draft_by_policy}, repeats)
    rows = []
    for label in actions:
        timing = compare(seconds[label], seconds["policy"])
        rows.append(
            Row(
                name=f"{name}/{label}",
                value=1e3 * timing.seconds / _STEPS,
                unit="ms/step",
                baseline="the policy's own weights",
                baseline_value=1e3 * timing.baseline_seconds / _STEPS,
                ratio=timing.ratio,
                details={
                    "ratio_low": timing.ratio_low,
                    "ratio_high": timing.ratio_high,
                    "rounds": repeats,
                    "time_ratio": 1.0 / timing.ratio,
                    "computed_rows": engine.buckets.batch_for(batch),
                    "same_tokens_as_policy": agreement[label],
                },
            )
        )
    return rows
