"""Part `exactness`: whether a token depends on what is computed beside it, and what it costs if it does not.

A policy with the widths of Qwen3-1.7B decodes the same requests in a batch, alone, and with drafts, and the
training pass scores what it decoded. Then products with the policy's weights over numbers of rows.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import ArrayLike

from gpu_parts.engines import TimedPool, compile_together, make_engine, random_params, run_numerics
from gpu_parts.part import Part, run
from kernel_benchmarks.products import REPEATS, compare_rows, float32_error
from rljax.engine.engine import DecodeEngine
from rljax.engine.invariance import RowCounts
from rljax.engine.invariance import measure as measure_invariance
from rljax.learning.packing import PackedBatch, Packing, TrainingSequence, build_batch, pack_sequences
from rljax.models.config import ModelConfig
from rljax.models.rope import rope_table
from rljax.models.transformer import Params
from rljax.numerics.rows import Numerics
from rljax.requests import Completion, Request
from rljax.rollout.collector import Scheduler
from rljax.sampling.distribution import SamplingParams
from rljax.sampling.noise import request_key
from rljax.speculation.managers.selection import StrategyChoice
from rljax.speculation.speculator import Speculator
from rljax.training.scoring import score_packed
from rollout_benchmarks.equality import Count, EveryPass, Knowing, take_turns
from workloads import SWITCH, config_of

_SHAPES = ((6144, 2048), (2048, 151_936), (2048, 1024))  # down, the LM head, and keys: few outputs
_ROWS = (1, 2, 8, 16, 32, 64, 128, 512)
_QUICK_SHAPES, _QUICK_ROWS = ((256, 128),), (1, 64, 128)
_SHARPNESS = 6.0  # of the final norm: random weights are sure of some tokens then, and unsure of others
_WRONG = 0.2  # of the drafts
_PER_PRODUCT = 6.0  # seconds that a product takes at least
_PER_MEASUREMENT = 15.0  # seconds that a run's own measurement takes at least


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is decoded: requests in `slots`, some of them `alone`, too; tokens of a `prompt` and a `response`;
    positions of a slot's `cache`, `rows` of a verifying pass, tokens of a `packed` row of the training pass.
    """

    slots: int
    alone: int
    prompt: int
    response: int
    cache: int
    rows: int
    packed: int


_SIZES = Sizes(slots=64, alone=16, prompt=32, response=160, cache=256, rows=256, packed=1024)
_QUICK = Sizes(slots=2, alone=1, prompt=8, response=24, cache=64, rows=8, packed=64)


def measure(part: Part) -> None:
    """Counts flips, then compares products, as long as there is time."""
    # Kernels that were chosen by another part would be read where none are to be measured.
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
    config = config_of("tiny") if part.quick else dataclasses.replace(config_of("Qwen3-1.7B"), num_layers=4)
    numerics = run_numerics(config, part.quick)
    _count_flips(part, config, numerics, _QUICK if part.quick else _SIZES)
    _compare_products(part)
    if part.quick:
        return
    if part.left() < _PER_MEASUREMENT:
        part.note(f"what a run would say at its start is not measured: {part.left():.0f} s are left")
        return
    counts = RowCounts((2, 64, 256), (2, 64), ((64, 3),))
    invariance = measure_invariance(config, numerics, counts)
    part.note(f"a run would say: {invariance.summary(numerics.compute_dtype)}")


# -- decoding ----------------------------------------------------------------------------------------------


def _count_flips(part: Part, config: ModelConfig, numerics: Numerics, sizes: Sizes) -> None:
    """Writes how often decoding alone and with drafts left plain decoding in a batch, and how far the
    logprobs of the training pass are from those of the rollout.
    """
    pool = TimedPool()
    engine = make_engine(config, numerics, pool, sizes.slots, sizes.cache, (sizes.rows,))
    alone = make_engine(config, numerics, pool, 1, sizes.cache)  # which computes 2 slots
    weights = random_params(config)
    weights["final_norm"] *= _SHARPNESS
    params = engine.load_params(weights)
    score = _TrainingPass(config, numerics, sizes)
    length = engine.prefill_length(sizes.prompt)
    calls = [functools.partial(score.compile, params)]
    for each in (engine, alone):
        slots = each.buckets.batch[0]
        shape = slots, sizes.cache
        calls += [
            functools.partial(each.compile_prefill, params, slots, length),
            functools.partial(each.compile_insert, (slots, length), *shape),
            functools.partial(each.compile_plain, params, *shape),
            *(
                functools.partial(each.compile_verify, params, *shape, *size)
                for size in each.buckets.passes(slots)
            ),
        ]
    seconds = compile_together(calls)
    prompts = np.random.default_rng(0).integers(config.vocab_size, size=(sizes.slots, sizes.prompt)).tolist()
    requests = [
        Request(tuple(prompt), request_key(0, 0, 0, i, 0), sizes.response) for i, prompt in enumerate(prompts)
    ]
    plain = Scheduler(engine, sizes.slots).run(params, requests)[0]
    lonely = [Scheduler(alone, 1).run(params, [request])[0][0] for request in requests[: sizes.alone]]
    _flip_row(part, "alone", plain[: sizes.alone], lonely, seconds)
    _flip_row(part, "with drafts", plain, _drafted(engine, params, requests, plain), seconds)
    differences = score.differences(params, requests, plain)
    part.row(
        "the training pass from the rollout",
        float(differences.max()),
        "nats at most",
        seconds,
        mean=float(differences.mean()),
        share_with_other_bits=float((differences > 0).mean()),
        tokens=len(differences),
        mean_logprob=float(np.concatenate([each.logprobs for each in plain]).mean()),
    )


def _drafted(
    engine: DecodeEngine, params: Params, requests: Sequence[Request], plain: Sequence[Completion]
) -> list[Completion]:
    """Returns the responses with drafts in every second pass."""
    every_pass = EveryPass()
    rng = np.random.default_rng(0)
    drafter = Knowing([rng.random(len(each.response_ids)) >= _WRONG for each in plain], plain)
    strategies = StrategyChoice(make=every_pass.make)
    speculator = Speculator(engine, {"known": drafter}, len(requests), strategies=strategies)
    speculator.warm_up(params, len(requests[0].prompt_ids))
    take_turns(speculator, every_pass, alone=False)
    return Scheduler(engine, len(requests), speculator=speculator).run(params, requests)[0]


def _flip_row(
    part: Part, how: str, plain: Sequence[Completion], other: Sequence[Completion], compile_seconds: float
) -> None:
    count, drift = Count(), 0.0
    for number, (one, two) in enumerate(zip(plain, other, strict=True)):
        count.compare(one, two, {"request": number})
        equal = np.cumprod(one.response_ids == two.response_ids).astype(bool)
        drift = max(drift, float(np.abs(one.logprobs - two.logprobs)[equal].max(initial=0.0)))
    part.row(
        f"flips, {how}",
        1e4 * len(count.flips) / count.tokens,
        "in 10,000 tokens",
        compile_seconds,
        flips=len(count.flips),
        tokens=count.tokens,
        other_logprobs=count.logprobs,
        largest_drift=drift,
        drafted=sum(each.drafted for each in other),
        accepted=sum(each.accepted for each in other),
        shown=count.flips[:4],
    )


class _TrainingPass:
    """The logprobs of responses as training computes them."""

    def __init__(self, config: ModelConfig, numerics: Numerics, sizes: Sizes) -> None:
        self._rope = jnp.asarray(rope_table(config, sizes.packed))
        self._arguments, self._sizes = (config, numerics), sizes

    def compile(self, params: Params) -> None:
        """Compiles the pass, for responses as long as they can be."""
        config, numerics = self._arguments
        nothing = np.zeros(self._sizes.response, np.int32)
        batch, _ = self._batch([(np.zeros(self._sizes.prompt, np.int32), nothing)] * self._sizes.slots)

        def score(params: Params, batch: PackedBatch, rope: Array) -> Array:
            return score_packed(params, config, batch, rope, numerics, SamplingParams())[0]

        self._program = jax.jit(score).lower(params, batch, self._rope).compile()

    def differences(
        self, params: Params, requests: Sequence[Request], completions: Sequence[Completion]
    ) -> np.ndarray:
        """Returns how far the logprob of each response token is from that of the rollout."""
        pairs = [
            (request.prompt_ids, each.response_ids)
            for request, each in zip(requests, completions, strict=True)
        ]
        batch, packing = self._batch(pairs)
        scored = np.asarray(self._program(params, batch, self._rope))
        differences = []
        for i, (prompt, response) in enumerate(pairs):
            first = packing.start[i] + len(prompt) - 1
            mine = scored[packing.row[i], first : first + len(response)]
            differences.append(np.abs(mine - completions[i].logprobs))
        return np.concatenate(differences)

    def _batch(self, pairs: Sequence[tuple[ArrayLike, ArrayLike]]) -> tuple[PackedBatch, Packing]:
        sequences = [TrainingSequence(prompt, response, None, 0.0, 1.0) for prompt, response in pairs]
        packing = pack_sequences([sequence.length for sequence in sequences], self._sizes.packed)
        batch = build_batch(sequences, packing, range(packing.num_rows))
        return jax.tree.map(jnp.asarray, batch), packing


# -- products ----------------------------------------------------------------------------------------------


def _compare_products(part: Part) -> None:
    """Writes, for each formulation, which numbers of rows give a row other bits, and what it costs."""
    shapes, rows = (_QUICK_SHAPES, _QUICK_ROWS) if part.quick else (_SHAPES, _ROWS)
    if part.variant != "autotuning":
        error = float32_error(*shapes[0], rows[-1])
        part.row("float32 product", error, "relative error")
    on_gpu = {f"Triton {SWITCH[way]}": {"xla_gpu_enable_triton_gemm": way} for way in (True, False)}
    for compiled, options in (on_gpu if jax.default_backend() == "gpu" else {"as compiled": {}}).items():
        exact: dict[str, list[float]] = {}  # by formulation, prices of those that are exact
        for inputs, outputs in shapes:
            name = f"product [{inputs} -> {outputs}], {compiled}"
            if part.left() < _PER_PRODUCT:
                part.note(f"{name}: left out, {part.left():.0f} s are left")
                continue
            results, seconds = compare_rows(inputs, outputs, rows, options)
            for formulation, result in results.items():
                figures, unit = dataclasses.asdict(result), "numbers of rows with other bits"
                number = len(result.differing)
                part.row(f"{name}, {formulation}", number, unit, seconds, REPEATS, **figures)
                if not result.differing:
                    exact.setdefault(formulation, []).append(result.price[64])
        found = ", ".join(
            f"{name} ({max(prices):.2f} times the time at 64 rows)"
            for name, prices in exact.items()
            if len(prices) == len(shapes)
        )
        part.note(f"{compiled}: one kernel for all rows: {found or 'none'}")


if __name__ == "__main__":
    run("exactness", measure)
