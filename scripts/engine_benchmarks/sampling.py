"""The price of sampling settings by request: settings a slot against the same settings in the programs."""

import functools
import time
from collections.abc import Callable, Sequence

import numpy as np

from engine_benchmarks.policies import PROMPT_TOKENS, random_prompts, speed_row
from rljax.benchmarking import Row, compare, interleave
from rljax.engine.buckets import make_buckets
from rljax.engine.engine import DecodeEngine
from rljax.engine.executables import ExecutablePool
from rljax.engine.host_sync import Assignment
from rljax.models import transformer
from rljax.models.config import ModelConfig
from rljax.models.transformer import Params, num_params
from rljax.numerics.rows import Numerics
from rljax.sampling.distribution import SamplingParams
from rljax.sampling.noise import request_key

_WARM, _GREEDY = SamplingParams(0.7), SamplingParams(0.0)
_TOP_P, _MIN_P = SamplingParams(0.7, top_p=0.9), SamplingParams(0.7, min_p=0.05)
_MIXES = {  # the settings of the slots, in turn; the first are those of the baseline
    "temperature 1": (SamplingParams(),),
    "temperature 0.7": (_WARM,),
    "greedy": (_GREEDY,),
    "min_p 0.05": (_MIN_P,),
    "top_p 0.9": (_TOP_P,),
    "temperature 0.7 and greedy": (_WARM, _GREEDY),
    "temperature 0.7 and top_p 0.9": (_WARM, _TOP_P),
}


def decoding(
    engine: DecodeEngine,
    params: Params,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    settings: Sequence[SamplingParams | None],
) -> Callable[[], np.ndarray]:
    """Returns a function that samples `new_tokens` after each prompt, with the settings of each."""
    prefix = engine.prefill(params, prompts)
    requests = [Assignment(i, i, request_key(0, i), new_tokens, each) for i, each in enumerate(settings)]

    def decode() -> np.ndarray:
        state = engine.init_state(len(prompts), PROMPT_TOKENS + new_tokens)
        return engine.generate(params, engine.bulk_insert(prefix, state, requests))[1].tokens

    return decode


def sampling_rows(name: str, config: ModelConfig, batch: int, new_tokens: int, repeats: int) -> list[Row]:
    """Measures tokens per second with settings a slot, against programs with the settings inside. The least
    time of the cores in a round, which other processes hardly change, is in the details.

    Args:
      name: name of the policy.
      config: its architecture.
      batch: number of slots.
      new_tokens: tokens of each response.
      repeats: timed rounds.
    """
    prompts, pool = random_prompts(batch, config.vocab_size), ExecutablePool()
    buckets = make_buckets(batch, PROMPT_TOKENS + new_tokens, True)

    def make_engine(sampling: SamplingParams, by_slot: bool) -> DecodeEngine:
        return DecodeEngine(
            config, Numerics(), sampling, buckets, (), new_tokens, pool, per_slot_sampling=by_slot
        )

    engine = make_engine(SamplingParams(), True)
    params = engine.load_params(transformer.init_params(config, 0))
    rows = []
    for mix, settings in _MIXES.items():
        inside = make_engine(settings[0], False)
        sides = {
            "by slot": decoding(
                engine, params, prompts, new_tokens, [settings[i % len(settings)] for i in range(batch)]
            ),
            "inside": decoding(inside, params, prompts, new_tokens, [None] * batch),
        }
        tokens = [decode()[:: len(settings)] for decode in sides.values()]
        if not np.array_equal(*tokens):
            raise RuntimeError(f"{mix}: settings a slot sample other tokens than the same settings inside")
        on_cores: dict[str, list[float]] = {side: [] for side in sides}

        def decode(side: str, sides=sides, on_cores=on_cores) -> None:
            start = time.process_time()
            sides[side]()
            on_cores[side].append(1e3 * (time.process_time() - start) / new_tokens)

        seconds = interleave({side: functools.partial(decode, side) for side in sides}, repeats, warmups=0)
        label = "the same settings inside" if len(settings) == 1 else "temperature 0.7 inside"
        details = {
            "rounds": repeats,
            "params": num_params(config),
            "vocab_size": config.vocab_size,
            "core_ms_a_step": min(on_cores["by slot"]),
            "baseline_core_ms_a_step": min(on_cores["inside"]),
        }
        timing = compare(seconds["by slot"], seconds["inside"])
        title = f"sampling/{name}/batch {batch}/{mix}"
        rows.append(speed_row(title, batch * new_tokens, timing, label, details))
    return rows
