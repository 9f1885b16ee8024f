"""The price of a draft, in plain steps: passes over 16 and 64 rows, and steps of the quantized drafter."""

import dataclasses
import functools

from compiled_programs import counts_of_program, text_of
from drafters.quantized import QuantizedPolicy, default_format
from gpu_parts import engines
from gpu_parts.part import Part, run
from rljax.engine.engine import DecodeEngine
from rljax.models.transformer import Params, num_params
from rljax.speculation.warm_up import time_drafts, time_passes
from rljax.timing import compare
from workloads import config_of

_LENGTH = 2048  # positions of a slot's cache, half of them filled, as of the part `decode`
_PASSES = 16  # between two host syncs
_REPEATS = 9
_PER_BATCH = 8.0  # seconds that three programs take at least

_ROWS = {8: (16, 64), 1: (16, 64), 32: (64, 512)}
"""Rows of a pass, the last tokens of the slots included, by batch: the most valuable first. A pass has more
rows than slots, so that 32 slots have 2 or 16 each.
"""


def measure(part: Part) -> None:
    """Times passes in turn with plain steps, all slots busy in half-filled caches."""
    name = "tiny" if part.quick else "Qwen3-1.7B"
    config = config_of(name)
    numerics = engines.run_numerics(config, part.quick)
    pool, params = engines.TimedPool(), None
    length, repeats = (128, 1) if part.quick else (_LENGTH, _REPEATS)
    for batch, rows in ({2: (16,)} if part.quick else _ROWS).items():
        needed = engines.cache_bytes(config, batch * length) + (0 if params else 2 * num_params(config))
        what = f"batch {batch}"
        if not part.has_time(what, _PER_BATCH) or not part.has_room(what, needed):
            continue
        engine = engines.make_engine(config, numerics, pool, batch, length, rows)
        params = engine.load_params(engines.random_params(config)) if params is None else params
        _verify_rows(part, f"{name}/{what}", engine, pool, params, repeats)
    if part.has_time("steps of the quantized drafter", _PER_BATCH):
        engine = engines.make_engine(config, numerics, pool, 2 if part.quick else 8, length)
        _draft_row(part, name, engine, pool, params, repeats)


def _verify_rows(
    part: Part, label: str, engine: DecodeEngine, pool: engines.TimedPool, params: Params, repeats: int
) -> None:
    """Adds the rows of one batch."""
    slots, length = engine.buckets.batch[0], engine.buckets.cache[0]
    passes = engine.buckets.passes(slots)
    verify = functools.partial(engine.compile_verify, params, slots, length)
    calls = [functools.partial(engine.compile_plain, params, slots, length)]
    together = engines.compile_together(calls + [functools.partial(verify, *each) for each in passes])
    seconds = time_passes(engine, params, slots, length, repeats, _PASSES)
    for rows, nodes in passes:
        program, compile_seconds = pool.find("verify", slots, length, nodes, rows)
        counts = counts_of_program(text_of(program))
        timing = compare(seconds[rows], seconds[0])
        part.row(
            f"{label}/{rows} rows",
            1.0 / timing.ratio,
            "plain steps",
            compile_seconds,
            repeats,
            compiled_together_seconds=together,
            ms=1e3 * timing.seconds,
            plain_step_ms=1e3 * timing.baseline_seconds,
            least=1.0 / timing.ratio_high,
            most=1.0 / timing.ratio_low,
            kernels=counts and counts.kernels,
            moved_bytes=counts and counts.bytes,
            computed_slots=slots,
            nodes_of_a_slot=nodes + 1,
        )


def _draft_row(
    part: Part, name: str, engine: DecodeEngine, pool: engines.TimedPool, params: Params, repeats: int
) -> None:
    """Adds a step of the 4-bit drafter, against a step of the same program with the policy's weights."""
    slots, length = engine.buckets.batch[0], engine.buckets.cache[0]
    fmt = dataclasses.replace(default_format(4), activations="float")
    quantized = QuantizedPolicy(fmt, kernels=engine.numerics.kernels)
    weights = quantized.refresh(params)
    policy_times = time_drafts(engine, params, slots, length, repeats)
    timing = compare(time_drafts(engine, weights, slots, length, repeats), policy_times)
    compile_seconds = [seconds for key, (_, seconds) in pool.by_key.items() if key[0] == "draft"]
    part.row(
        f"{name}/batch {slots}/a draft of the W4 policy",
        1.0 / timing.ratio,
        "steps with the policy's weights",
        sum(compile_seconds),
        repeats,
        ms=1e3 * timing.seconds,
        policy_ms=1e3 * timing.baseline_seconds,
        ratio_of_bytes=quantized.read_bytes / engines.read_bytes(params),
        refresh_ms=1e3 * quantized.seconds,
    )


if __name__ == "__main__":
    run("verify", measure)
