"""The price of sampling settings by request: settings a slot against the same settings in the programs."""

import jax
import numpy as np

from engine_benchmarks.policies import PROMPT_TOKENS, random_prompts, speed_row
from rljax.benchmarking import Row, compare, interleave
from rljax.engine.buckets import make_buckets
from rljax.engine.engine import DecodeEngine
from rljax.engine.executables import ExecutablePool
from rljax.engine.host_sync import Assignment
from rljax.models import transformer
from rljax.models.config import ModelConfig
from rljax.models.transformer import num_params
from rljax.numerics.rows import Numerics
from rljax.sampling.distribution import SamplingParams
from rljax.sampling.noise import request_key

_PLAIN, _WARM, _GREEDY, _TOP_P = (
    SamplingParams(),
    SamplingParams(0.7),
    SamplingParams(0.0),
    SamplingParams(0.7, top_p=0.9),
)
_MIXES = {  # the settings of the slots, in turn
    "temperature 1": [_PLAIN],
    "temperature 0.7": [_WARM],
    "all greedy": [_GREEDY],
    "all top_p 0.9": [_TOP_P],
}
_ONLY_BY_SLOT = {
    "half greedy, half temperature 0.7": [_GREEDY, _WARM],
    "one top_p 0.9, others temperature 0.7": [_TOP_P, *[_WARM] * 63],
}


def sampling_rows(name: str, config: ModelConfig, batch: int, new_tokens: int, repeats: int) -> list[Row]:
    """Measures tokens per second of decode steps with settings a slot. The baseline has the same settings in
    its programs; that of a mix has temperature 0.7 for all.

    Args:
      name: name of the policy.
      config: its architecture.
      batch: number of slots.
      new_tokens: tokens of each response.
      repeats: timed rounds.
    """
    pool, weights = ExecutablePool(), transformer.init_params(config, 0)
    prompts = random_prompts(batch, config.vocab_size)
    buckets = make_buckets(batch, PROMPT_TOKENS + new_tokens, True)
    rows = []

    def decoding(engine, params, settings):
        prefix = engine.prefill(params, prompts)
        settings = [settings[i % len(settings)] for i in range(batch)] if engine.per_slot_sampling else []
        settings = settings or [None] * batch
        placed = [
            Assignment(i, i, request_key(0, i), new_tokens + 1, each) for i, each in enumerate(settings)
        ]

        def decode() -> np.ndarray:
            length = PROMPT_TOKENS + new_tokens
            state = engine.bulk_insert(prefix, engine.init_state(batch, length), placed)
            return engine.generate(params, state)[1].tokens

        return decode

    for mix, settings in (_MIXES | _ONLY_BY_SLOT).items():
        inside = settings[0] if mix in _MIXES else _WARM
        engines = {
            by_slot: DecodeEngine(
                config, Numerics(), inside, buckets, (), new_tokens, pool, per_slot_sampling=by_slot
            )
            for by_slot in (True, False)
        }
        params = engines[True].load_params(weights)
        sides = {str(by_slot): decoding(engine, params, settings) for by_slot, engine in engines.items()}
        tokens = {side: decode() for side, decode in sides.items()}
        if mix in _MIXES and not np.array_equal(tokens["True"], tokens["False"]):
            raise RuntimeError(f"{mix}: settings a slot sample other tokens than the same settings inside")
        seconds = interleave(sides, repeats, warmups=0)
        rows.append(
            speed_row(
                f"sampling/{name}/batch {batch}/{mix}",
                batch * new_tokens,
                compare(seconds["True"], seconds["False"]),
                "the same settings inside" if mix in _MIXES else "temperature 0.7 inside",
                {
                    "rounds": repeats,
                    "params": num_params(config),
                    "vocab_size": config.vocab_size,
                    "new_tokens": new_tokens,
                },
            )
        )
        jax.clear_caches()
    return rows
