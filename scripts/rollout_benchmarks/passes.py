"""Cost of a verifying pass."""

import statistics

from rljax.benchmarking import Row
from rljax.config import ExperimentConfig
from rljax.speculation.warm_up import time_passes
from rollout_benchmarks.variants import open_run


def pass_rows(config: ExperimentConfig, repeats: int) -> list[Row]:
    """Measures a verifying pass against a plain step, by batch bucket, cache length and number of tokens."""
    rows = []
    with open_run(config) as (run, _):
        params = run.engine.load_params(run.state.params)
        buckets = run.engine.buckets
        for batch in buckets.batch:
            for length in (buckets.cache[0], buckets.cache[-1]):
                seconds = time_passes(run.engine, params, batch, length, repeats)
                plain = statistics.median(seconds.pop(0))
                for size, times in seconds.items():
                    taken = statistics.median(times)
                    rows.append(
                        Row(
                            name=f"pass/batch {batch}/cache {length}/{size} tokens",
                            value=1e3 * taken,
                            unit="ms",
                            baseline="plain step",
                            baseline_value=1e3 * plain,
                            ratio=plain / taken,
                            details={"rounds": repeats, "tokens_to_break_even": batch * taken / plain},
                        )
                    )
    return rows
