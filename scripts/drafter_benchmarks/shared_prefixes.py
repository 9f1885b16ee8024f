"""Counts the rows that prefix-shared verification could save: those of samples of a prompt that still agree.

Samples of a group whose tokens are the same so far have the same keys, values and logits, and could be one
row of a pass until they part.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from rljax.benchmarking import Row, counted_row
from rljax.config import ExperimentConfig
from rollout_benchmarks.variants import collect_step, open_run


def shared_states(sampled: Sequence[Sequence[int]]) -> tuple[int, int, int]:
    """Returns how many rows a group of responses decodes, how many different states are among them, and how
    many rows stand behind sampled tokens that another response has, too.
    """
    prefixes = [tuple(tokens[:count]) for tokens in sampled for count in range(len(tokens))]
    times = Counter(prefixes)
    return len(prefixes), len(times), sum(bool(prefix) and times[prefix] > 1 for prefix in prefixes)


def shared_prefix_rows(config: ExperimentConfig, steps: int) -> list[Row]:
    """Counts rows of decoding in some steps' rollouts, and different states among those of a group."""
    counts = np.zeros(3, int)
    with open_run(config) as (run, progress):
        progress.stage("bench", steps)
        for step in range(steps):
            groups, _, _ = collect_step(run, run.collector, step)
            for group in groups:
                counts += shared_states([completion.response_ids for completion in group.completions])
            progress.step(step + 1, {"shared": 1.0 - counts[1] / counts[0]})
    rows, states, behind = counts.tolist()
    return [
        counted_row(
            "shared_prefixes",
            states,
            rows,
            "rows",
            "a row for every sample",
            less=True,
            share_saved=1.0 - states / rows,
            share_behind_equal_tokens=behind / rows,
            steps=steps,
            samples_of_a_prompt=config.rollout.samples_per_prompt,
            temperature=config.rollout.temperature,
        )
    ]
