"""Single steps and passes of the engine on the CPU, by what they are computed with.

`price`: exactness, `engine.row_invariant` on against off. `blocks`: weights in blocks, against whole ones.
`loops`: the device's loop over steps, and when its results are read.
`self_draft`: steps that draft with quantized weights. `companion`: a small model beside the policy.
`sampling`: settings a slot, against settings inside the programs.
"""

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from drafters.quantized import QuantizedPolicy, WeightFormat, default_format
from engine_benchmarks.update import UPDATE, long_tailed_sequences, packed_updates
from gpu_parts.engines import make_engine as engine_of_one_shape
from rljax.benchmarking import Row, counted_row, speed_row, timed_row
from rljax.engine.buckets import Buckets, make_buckets
from rljax.engine.companion import CATCH_UP_WIDTHS, Companion
from rljax.engine.engine import DecodeEngine
from rljax.engine.executables import ExecutablePool
from rljax.models.config import ModelConfig
from rljax.models.transformer import Params, init_params, num_params
from rljax.numerics.rows import Numerics
from rljax.requests import Request
from rljax.rollout.collector import Scheduler
from rljax.sampling.distribution import SamplingParams
from rljax.sampling.noise import request_key
from rljax.speculation.warm_up import time_passes
from rljax.timing import compare, interleave
from workloads import (
    PROMPT_TOKENS,
    assignments,
    begun,
    config_of,
    make_engine,
    measured_numerics,
    params_of,
    random_prompts,
)

_NODES, _LENGTH = 7, 256
_DTYPES = ("float32", "bfloat16")

# --- exactness, and weights in blocks --------------------------------------------------------------------


def _numerics_of_a_run(config: ModelConfig, dtype: str, row_invariant: bool) -> tuple[Numerics, str]:
    """Returns numerics as a run measures them on this device, and a line about them."""
    buckets = Buckets((2, 8, 64), (_LENGTH,), tuple(batch * (_NODES + 1) for batch in (2, 8, 64)), _NODES)
    return measured_numerics(config, Numerics(row_invariant, dtype), buckets, [UPDATE.pack_length])


Work = dict[str, tuple[int, dict[Any, list[float]]]]
"""By name of what was timed: its tokens, and seconds by side."""


def _timed_passes(
    config: ModelConfig, sides: Mapping[Any, Numerics], params: Params, batch: int, verify: bool, repeats: int
) -> Work:
    """Times plain steps, and passes that verify a chain of `_NODES` in every slot, over half-full caches, of
    sides that take turns.
    """
    rows, engines, work = (batch * (_NODES + 1),) if verify else (), {}, {}
    for side, numerics in sides.items():
        pool = ExecutablePool(numerics.row_invariant)
        engine = engine_of_one_shape(config, numerics, pool, batch, _LENGTH, rows)
        engines[side] = engine, engine.load_params(params), engine.buckets.batch[0], _LENGTH
    for repeat in range(repeats):
        for side in reversed(engines) if repeat % 2 else engines:
            for count, taken in time_passes(*engines[side], 1).items():
                name = f"verify {batch} x {_NODES + 1}" if count else f"decode batch {batch}"
                _, by_side = work.setdefault(name, (count or batch, {each: [] for each in sides}))
                by_side[side] += taken
    return work


def price_rows(
    name: str, repeats: int, num_sequences: int, batches: Sequence[int] = (1, 2, 8, 64)
) -> list[Row]:
    """Measures tokens per second of decode steps, verifying passes and updates with exactness on, against
    off and against float32.
    """
    config, params = config_of(name), params_of(name)
    sequences = long_tailed_sequences(num_sequences, config.vocab_size)
    found = {(dtype, on): _numerics_of_a_run(config, dtype, on) for dtype in _DTYPES for on in (True, False)}
    sides = {side: numerics for side, (numerics, _) in found.items()}
    work: Work = {}
    for batch in batches:
        work |= _timed_passes(config, sides, params, batch, batch <= 8, repeats)
    given = config, params, sequences
    updates = {side: packed_updates(*given, numerics, UPDATE)[0] for side, numerics in sides.items()}
    seconds = interleave(updates, max(1, repeats // 3))
    work["update"] = sum(sequence.length for sequence in sequences), seconds
    rows = []
    for what, (count, seconds) in work.items():
        for dtype in _DTYPES:
            timing = compare(seconds[dtype, True], seconds[dtype, False])
            against = compare(seconds[dtype, True], seconds["float32", True]).ratio
            details = {"against_float32": against, "numerics": found[dtype, True][1]}
            row = f"price/{name}/{dtype}/{what}"
            rows.append(speed_row(row, count, timing, "row_invariant off", **details))
    return rows


def block_rows(name: str, repeats: int, batches: Sequence[int] = (1, 2, 4, 8, 16, 32, 64)) -> list[Row]:
    """Measures tokens per second by batch in float32, exact on both sides, against whole weights."""
    config, params = config_of(name), params_of(name)
    in_blocks, form = _numerics_of_a_run(config, "float32", True)
    whole = dataclasses.replace(in_blocks.product_form, blocks=())
    sides = {"blocks": in_blocks, "whole": dataclasses.replace(in_blocks, measured_form=whole)}
    rows = []
    for batch in batches:
        work = _timed_passes(config, sides, params, batch, batch <= 4, repeats)
        for what, (tokens, seconds) in work.items():
            timing, row = compare(*seconds.values()), f"blocks/{name}/float32/{what}"
            rows.append(speed_row(row, tokens, timing, "whole weights", numerics=form))
    return rows


# --- the loop over steps -----------------------------------------------------------------------------------

_LOOPS = {"fixed": (True, False), "overlap": (False, True), "fixed, overlap": (True, True)}


def loop_rows(name: str, slots: int, repeats: int) -> list[Row]:
    """Measures tokens per second of plain rollouts by their loop on the device, and by when its results are
    read, against a loop that ends as soon as it may, read before the next begins. A response in twelve is
    four to twelve times as long as the others.
    """
    config = config_of(name)
    prompts = random_prompts(3 * slots, config.vocab_size)
    requests = [
        Request(tuple(prompt), request_key(0, 0, i), 12 * (i % 8 + 4) if i % 12 == 0 else 8 + i % 8)
        for i, prompt in enumerate(prompts)
    ]
    engine = make_engine(config, True, slots, PROMPT_TOKENS + 133)
    params = engine.load_params(params_of(name))

    def roll_out(fixed: bool, overlap: bool) -> list[list[int]]:
        engine.fixed_gain = math.inf if fixed else 0.0
        completions, _ = Scheduler(engine, slots, overlap=overlap).run(params, requests)
        return [each.response_ids.tolist() for each in completions]

    sides = {label: functools.partial(roll_out, *loop) for label, loop in _LOOPS.items()}
    sides["until"] = functools.partial(roll_out, False, False)
    expected = sides["until"]()
    for label, side in sides.items():
        if side() != expected:
            raise AssertionError(f"{label}: responses differ")
    seconds, tokens, rows = interleave(sides, repeats), sum(map(len, expected)), []
    for label in _LOOPS:
        timing = compare(seconds[label], seconds["until"])
        rows.append(speed_row(f"loops/{name}/{slots} slots/{label}", tokens, timing, "until"))
    return rows


# --- the quantized self-drafter --------------------------------------------------------------------------

_DRAFTS = 15
_FORMATS = {
    "W4": default_format(4),
    "W8": default_format(8),
    "W8, float activations": WeightFormat(8, 0, "float"),
}


def self_draft_rows(name: str, batches: Sequence[int], repeats: int) -> list[Row]:
    """Measures milliseconds of a draft step by format, batch and number type, and the bytes of the weights.

    The baseline is the same program with the policy's weights. Both sides draft chains of the same length
    from the same decode state.
    """
    rows, config = [], config_of(name)
    for dtype in _DTYPES:
        length = PROMPT_TOKENS + _DRAFTS + 2
        engine = make_engine(config, True, max(batches), length, dtype=dtype, max_drafts=_DRAFTS)
        params = engine.load_params(params_of(name))
        own_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
        drafters, of_bytes = {}, []
        for label, fmt in _FORMATS.items():
            policy = QuantizedPolicy(fmt)
            policy.refresh(params)  # compiles
            seconds = []
            for _ in range(repeats):
                drafters[label] = policy.refresh(params)
                seconds.append(policy.seconds)
            row = f"self_draft/{name}/{dtype}/{label}/bytes"
            details = {
                "params": num_params(config),
                "stored_beside_policy_mb": policy.bytes / 1e6,
                "refresh_seconds": statistics.median(seconds),
                "ideal_time_ratio": policy.read_bytes / own_bytes,
            }
            sizes = policy.read_bytes / 1e6, own_bytes / 1e6
            of_bytes.append(counted_row(row, *sizes, "MB", "the policy's weights", less=True, **details))
        for batch in batches:
            label = f"self_draft/{name}/{dtype}/batch {batch}"
            rows += _draft_rows(label, engine, params, drafters, batch, repeats)
        rows += of_bytes
    return rows


def _draft_rows(
    name: str, engine: DecodeEngine, params: Params, drafters: Mapping[str, Params], batch: int, repeats: int
) -> list[Row]:
    prompts = random_prompts(batch, engine.config.vocab_size)
    held = [begun(engine, params, prompts, 2 * _DRAFTS, _DRAFTS + 2)]

    def draft(weights: Params) -> np.ndarray:
        held[0], drafted = engine.draft(weights, held[0], _DRAFTS)
        tokens = np.asarray(drafted.tokens)[:batch]
        if (tokens < 0).any():
            raise RuntimeError("a chain ended early")
        return tokens

    truth = draft(params)
    agreement = {label: float((draft(weights) == truth).mean()) for label, weights in drafters.items()}
    sides = {**drafters, "policy": params}
    actions = {label: functools.partial(draft, weights) for label, weights in sides.items()}
    seconds, rows = interleave(actions, repeats), []
    for label, same in agreement.items():
        timing = compare(seconds[label], seconds["policy"])
        details = {"computed_rows": engine.buckets.batch_for(batch), "same_tokens_as_policy": same}
        details["time_ratio"] = 1.0 / timing.ratio
        own, scale = "the policy's own weights", 1e3 / _DRAFTS
        rows.append(timed_row(f"{name}/{label}", timing, own, "ms/step", scale, **details))
    return rows


# --- a small model beside the policy ---------------------------------------------------------------------

_CHAIN = 7


def companion_rows(name: str, layers: int, batches: Sequence[int], repeats: int) -> list[Row]:
    """Measures milliseconds by batch of a companion with the policy's widths and fewer layers."""
    config, length = config_of(name), PROMPT_TOKENS + (repeats + 2) * _CHAIN + 2
    engine = make_engine(config, True, max(batches), length, max_drafts=_CHAIN)
    params = engine.load_params(params_of(name))
    small = dataclasses.replace(config, num_layers=layers)
    companion = Companion(engine, small, init_params(small, seed=1))
    rows = []
    for batch in batches:
        seconds = interleave(_companion_actions(engine, params, companion, batch, length), repeats)
        step = [each / _CHAIN for each in seconds.pop("policy")]
        seconds["draft step"] = [each / _CHAIN for each in seconds["draft step"]]
        for label, ours in seconds.items():
            row = f"companion/{name}/{layers} layers/batch {batch}/{label}"
            sizes = {"params": num_params(small), "policy_params": num_params(config)}
            rows.append(timed_row(row, compare(ours, step), "a plain step of the policy", "ms", 1e3, **sizes))
    return rows


def _companion_actions(
    engine: DecodeEngine, params: Params, companion: Companion, batch: int, length: int
) -> dict[str, Callable[[], None]]:
    """Returns the timed actions: `_CHAIN` draft steps, passes that catch up, `_CHAIN` steps of the policy."""
    prompts = random_prompts(batch, engine.config.vocab_size)
    idle, *held = (begun(engine, params, prompts, length, length - PROMPT_TOKENS) for _ in range(2))
    companion.begin(idle.batch, idle.cache.length)
    companion.enter(range(batch), prompts)
    caches = [companion.engine.init_state(batch, length).cache]
    own_lengths = np.full(idle.batch, PROMPT_TOKENS, np.int32)

    def draft() -> None:
        if (np.asarray(companion.draft_chains(idle, _CHAIN).tokens)[:batch] < 0).any():
            raise RuntimeError("a chain ended early")

    def catch_up(width: int) -> None:
        tokens, counts = np.ones((idle.batch, width), np.int32), np.full(idle.batch, width, np.int32)
        caches[0] = companion.engine.extend(companion.params, caches[0], tokens, own_lengths, counts)
        jax.block_until_ready(caches[0])

    def step() -> None:
        held[0], result = engine.generate(params, held[0], _CHAIN)
        if result.steps != _CHAIN:
            raise RuntimeError("decoding ended early")

    passes = {f"catch up by {width}": functools.partial(catch_up, width) for width in CATCH_UP_WIDTHS}
    return {"draft step": draft, **passes, "policy": step}


# --- sampling settings by request ------------------------------------------------------------------------

_WARM, _TOP_P = SamplingParams(0.7), SamplingParams(0.7, top_p=0.9)
MIXES = {  # the settings of the slots, in turn; the first are those of the baseline
    "temperature 1": (SamplingParams(),),
    "temperature 0.7": (_WARM,),
    "greedy": (SamplingParams(0.0),),
    "min_p 0.05": (SamplingParams(0.7, min_p=0.05),),
    "top_p 0.9": (_TOP_P,),
    "temperature 0.7 and greedy": (_WARM, SamplingParams(0.0)),
    "temperature 0.7 and top_p 0.9": (_WARM, _TOP_P),
}


def sampling_rows(
    name: str, batch: int, new_tokens: int, repeats: int, mixes: Sequence[str] = tuple(MIXES)
) -> list[Row]:
    """Measures tokens per second with settings a slot, against programs with the settings inside. The least
    time of the cores in a round, which other processes hardly change, is in the details.
    """
    config, pool = config_of(name), ExecutablePool()
    prompts = random_prompts(batch, config.vocab_size)
    buckets = make_buckets(batch, PROMPT_TOKENS + new_tokens, True)
    params = params_of(name)

    def decoding(sampling: SamplingParams, own: Sequence[SamplingParams | None]) -> Callable[[], np.ndarray]:
        """Returns a function that samples `new_tokens` after each prompt."""
        options = {"per_slot_sampling": own[0] is not None}
        engine = DecodeEngine(config, Numerics(), sampling, buckets, (), new_tokens, pool, **options)
        loaded = engine.load_params(params)
        prefix, plain = engine.prefill(loaded, prompts), assignments(batch, new_tokens)
        requests = [dataclasses.replace(each, sampling=one) for each, one in zip(plain, own, strict=True)]

        def decode() -> np.ndarray:
            state = engine.init_state(batch, PROMPT_TOKENS + new_tokens)
            return engine.generate(loaded, engine.bulk_insert(prefix, state, requests))[1].tokens

        return decode

    rows = []
    for mix in mixes:
        settings = MIXES[mix]
        of_slots = [settings[slot % len(settings)] for slot in range(batch)]
        sides = {
            "by slot": decoding(SamplingParams(), of_slots),
            "inside": decoding(settings[0], [None] * batch),
        }
        tokens = [decode()[:: len(settings)] for decode in sides.values()]
        if not np.array_equal(*tokens):
            raise RuntimeError(f"{mix}: settings a slot sample other tokens than the same settings inside")
        on_cores: dict[str, list[float]] = {side: [] for side in sides}

        def timed(side: str, sides=sides, on_cores=on_cores) -> None:
            start = time.process_time()
            sides[side]()
            on_cores[side].append(1e3 * (time.process_time() - start) / new_tokens)

        seconds = interleave({side: functools.partial(timed, side) for side in sides}, repeats, warmups=0)
        least = [min(of_side) for of_side in on_cores.values()]
        details = {"params": num_params(config), "vocab_size": config.vocab_size}
        details |= {"core_ms_a_step": least[0], "baseline_core_ms_a_step": least[1]}
        baseline = f"{'the same settings' if len(settings) == 1 else 'temperature 0.7'} inside"
        row, timing = f"sampling/{name}/batch {batch}/{mix}", compare(*seconds.values())
        rows.append(speed_row(row, batch * new_tokens, timing, baseline, **details))
    return rows
