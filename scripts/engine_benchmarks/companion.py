"""Cost of a small model beside the policy: a draft step, and catching up, against a step of the policy."""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np

from engine_benchmarks.policies import PROMPT_TOKENS, measured_numerics, random_prompts
from rljax.benchmarking import Row, compare, interleave
from rljax.engine.buckets import make_buckets
from rljax.engine.companion import CATCH_UP_WIDTHS, Companion
from rljax.engine.engine import DecodeEngine
from rljax.engine.host_sync import Assignment
from rljax.models.config import ModelConfig
from rljax.models.transformer import init_params, num_params
from rljax.numerics.rows import Numerics
from rljax.sampling.distribution import SamplingParams
from rljax.sampling.noise import request_key

_STEPS = 7


def companion_rows(
    name: str, config: ModelConfig, layers: int, batches: tuple[int, ...], repeats: int
) -> list[Row]:
    """Measures milliseconds by batch of a companion with the policy's widths and fewer layers."""
    length = PROMPT_TOKENS + (repeats + 2) * _STEPS + 2
    buckets = make_buckets(max(batches), length, True, max_drafts=_STEPS)
    numerics, _ = measured_numerics(config, Numerics(), buckets)
    engine = DecodeEngine(config, numerics, SamplingParams(), buckets, eos_token_ids=())
    params = engine.load_params(init_params(config, seed=0))
    small = dataclasses.replace(config, num_layers=layers)
    companion = Companion(engine, small, init_params(small, seed=1))
    rows = []
    for batch in batches:
        actions = _actions(engine, params, companion, batch, length)
        seconds = interleave(actions, repeats)
        for label in actions:
            if label == "policy":
                continue
            timing = compare(seconds[label], seconds["policy"])
            steps = _STEPS if label == "draft step" else 1
            rows.append(
                Row(
                    name=f"companion/{name}/{layers} layers/batch {batch}/{label}",
                    value=1e3 * timing.seconds / steps,
                    unit="ms",
                    baseline="a plain step of the policy",
                    baseline_value=1e3 * timing.baseline_seconds / _STEPS,
                    ratio=timing.ratio * steps / _STEPS,
                    details={
                        "ratio_low": timing.ratio_low * steps / _STEPS,
                        "ratio_high": timing.ratio_high * steps / _STEPS,
                        "rounds": repeats,
                        "params": num_params(small),
                        "policy_params": num_params(config),
                    },
                )
            )
    return rows


def _actions(
    engine: DecodeEngine, params: dict, companion: Companion, batch: int, length: int
) -> dict[str, Callable[[], object]]:
    """Returns the timed actions: `_STEPS` draft steps, passes that catch up, `_STEPS` steps of the policy."""
    prompts = random_prompts(batch, engine.config.vocab_size)
    requests = [Assignment(i, i, request_key(0, i), length) for i in range(batch)]
    prefix = engine.prefill(params, prompts)

    def decoding():
        return engine.bulk_insert(prefix, engine.init_state(batch, length), requests)

    idle, held = decoding(), [decoding()]
    companion.begin(idle.batch, idle.cache.length)
    companion.insert(range(batch), prompts)
    caches = [companion.engine.init_state(batch, length).cache]
    own_lengths = np.full(idle.batch, PROMPT_TOKENS, np.int32)

    def draft() -> None:
        if (np.asarray(companion.draft(idle, _STEPS).tokens)[:batch] < 0).any():
            raise RuntimeError("a chain ended early")

    def catch_up(width: int) -> None:
        tokens, counts = np.ones((idle.batch, width), np.int32), np.full(idle.batch, width, np.int32)
        caches[0] = companion.engine.extend(companion.params, caches[0], tokens, own_lengths, counts)
        jax.block_until_ready(caches[0])

    def step() -> None:
        held[0], result = engine.generate(params, held[0], _STEPS)
        if result.steps != _STEPS:
            raise RuntimeError("decoding ended early")

    passes = {f"catch up by {width}": lambda width=width: catch_up(width) for width in CATCH_UP_WIDTHS}
    return {"draft step": draft, **passes, "policy": step}
