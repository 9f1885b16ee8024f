"""Share of padding in packed micro-batches."""

import statistics
from collections.abc import Sequence

import numpy as np

from rljax.benchmarking import Row
from rljax.learning.packing import pack_sequences


def padding_rows(
    pack_lengths: Sequence[int],
    count: int = 256,
    draws: int = 20,
    rows_per_microbatch: int = 4,
    longest: int = 500,
) -> list[Row]:
    """Share of padding with the last micro-batches halved, against micro-batches of one size."""
    p75, sigma = 100, 0.8
    lengths = []
    for seed in range(draws):
        drawn = np.random.default_rng(seed).normal(size=count)
        # 0.6745 is the normal distribution's 75th percentile.
        lengths.append(np.clip(p75 * np.exp(sigma * (drawn - 0.6745)), 1, longest).astype(int))
    rows = []
    for pack_length in pack_lengths:
        packings = [pack_sequences(each, pack_length) for each in lengths]

        def padding(row_multiple: int, packings=packings) -> list[float]:
            return [
                100
                * packing.padding_fraction(packing.microbatches(rows_per_microbatch, row_multiple)[-1].stop)
                for packing in packings
            ]

        ours, same_size = padding(1), padding(rows_per_microbatch)
        rows.append(
            Row(
                name=f"padding/pack_length {pack_length}",
                value=statistics.mean(ours),
                unit="%",
                baseline=f"all micro-batches of {rows_per_microbatch}",
                baseline_value=statistics.mean(same_size),
                ratio=statistics.mean(same_size) / statistics.mean(ours),
                details={
                    "worst": max(ours),
                    "baseline_worst": max(same_size),
                    "packed_rows": statistics.mean(packing.num_rows for packing in packings),
                    "sequences": count,
                    "draws": draws,
                    "length_p75": p75,
                    "length_sigma": sigma,
                    "length_max": longest,
                    "tokens": statistics.mean(int(each.sum()) for each in lengths),
                },
            )
        )
    return rows
