"""The decode loop: milliseconds a step, the share of the memory's bandwidth, and the kernels it starts."""

import functools
import itertools
import math
import statistics
from collections.abc import Sequence

from compiled_programs import counts_of_loop, text_of, trips_of_loop
from gpu_parts import engines
from gpu_parts.part import Part, run
from kernel_benchmarks.ceilings import copy_bandwidth
from rljax.models.transformer import num_params
from rljax.speculation.warm_up import time_passes
from workloads import config_of

_LENGTH = 2048  # positions of a slot's cache, half of them filled
_STEPS = 16  # between two host syncs, as a run decodes
_BATCHES = ((8,), (1,), (64, 32, 16))  # of each the first that there is memory for
_REPEATS = 9
_PER_POLICY = 20.0  # seconds that compiling and measuring takes at least, the 8B policy's


def measure(part: Part) -> None:
    """Times all slots busy in half-filled caches; the smaller policy first."""
    bandwidth = copy_bandwidth(8 if part.quick else 2048)
    if part.quick:
        _measure_policy(part, "tiny", (2,), bandwidth)
        return
    for name in ("Qwen3-1.7B", "Qwen3-8B"):
        config = config_of(name)
        weights = 2 * num_params(config)
        if not part.has_time(name, _PER_POLICY) or not part.has_room(name, weights):
            continue
        batches = []
        for sizes in _BATCHES:
            needed = {batch: weights + engines.cache_bytes(config, batch * _LENGTH) for batch in sizes}
            rooms = (batch for batch in sizes if part.has_room(f"{name}/batch {batch}", needed[batch]))
            batches += itertools.islice(rooms, 1)
        _measure_policy(part, name, batches, bandwidth)


def _measure_policy(part: Part, name: str, batches: Sequence[int], bandwidth: float) -> None:
    config, pool = config_of(name), engines.TimedPool()
    length, repeats = (128, 1) if part.quick else (_LENGTH, _REPEATS)
    numerics, params, by_batch, calls = engines.run_numerics(config, part.quick), None, {}, []
    for batch in batches:
        engine = by_batch[batch] = engines.make_engine(config, numerics, pool, batch, length, steps=_STEPS)
        engine.fixed_gain = math.inf  # both loops are compiled
        params = engine.load_params(engines.random_params(config)) if params is None else params
        calls.append(functools.partial(engine.compile_plain, params, engine.buckets.batch[0], length))
    together = engines.compile_together(calls)
    for batch, engine in by_batch.items():
        slots = engine.buckets.batch[0]
        for loop, kind in (("", "generate"), ("/fixed loop", "generate fixed")):
            engine.fixed_gain = math.inf if loop else 0.0
            program, compile_seconds = pool.find(kind, slots, length)
            counts = counts_of_loop(text_of(program))
            seconds = time_passes(engine, params, slots, length, repeats, _STEPS)[0]
            step = statistics.median(seconds)
            size = engines.read_bytes(params) + engines.cache_bytes(config, slots * (length + _STEPS) / 2)
            part.row(
                f"{name}/batch {batch}{loop}",
                1e3 * step,
                "ms/step",
                compile_seconds,
                repeats,
                compiled_together_seconds=together,
                share_of_bandwidth=size / step / bandwidth,
                bytes=size,
                copy_bandwidth=bandwidth,
                kernels=counts and counts.kernels,
                known_steps=counts and trips_of_loop(text_of(program)),
                moved_bytes=counts and counts.bytes,
                tokens_per_second=batch / step,
                least_ms=1e3 * min(seconds),
                most_ms=1e3 * max(seconds),
                computed_slots=slots,
                filled_positions=length // 2,
            )


if __name__ == "__main__":
    run("decode", measure)
