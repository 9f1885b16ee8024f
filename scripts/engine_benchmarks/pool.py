"""How many programs verify, and the memory that they need: TLT's Table 5.

There, every strategy of speculation has CUDA graphs of its own for every batch size, each of which keeps its
buffers; bucketed, a strategy is captured for the batch sizes that it is for, and strategies share what they
can. XLA's programs take their buffers when they run, so what a device must have free is the largest; the sum
is what graphs would keep.
"""

import time
from collections.abc import Sequence

import numpy as np

from rljax.benchmarking import Row
from rljax.engine.buckets import Buckets
from rljax.engine.draft_tree import empty_tree, pack_rows
from rljax.engine.engine import DecodeEngine
from rljax.engine.executables import ExecutablePool
from rljax.engine.sampling import SamplingParams
from rljax.models.config import ModelConfig
from rljax.models.numerics import Numerics
from rljax.models.transformer import init_params
from rljax.rollout.strategies import Strategy, arms_by_batch

_LENGTH = 512
_NODES = (1, 3, 5, 7, 11, 15, 23, 31)  # of a slot, by strategy
_SINGLE = 7
_ROWS = (8, 16, 32, 64, 128)  # of the bucketed passes


def pool_rows(name: str, config: ModelConfig, batches: Sequence[int]) -> list[Row]:
    """Every strategy for every batch, against one strategy alone and against bucketed passes."""
    strategies = [Strategy("drafter", nodes, 1, nodes) for nodes in _NODES]
    bucketed = Buckets(tuple(batches), (_LENGTH,), _ROWS, _NODES[-1])
    arms = arms_by_batch(strategies, bucketed, batches[-1])
    assert set(strategies) == {arm for own in arms.values() for arm in own if arm is not None}
    shapes = {
        "single": [(batch, _SINGLE, batch * (_SINGLE + 1)) for batch in batches],
        "naive": [(batch, nodes, batch * (nodes + 1)) for batch in batches for nodes in _NODES],
        "bucketed": [(batch, nodes, rows) for batch in batches for rows, nodes in bucketed.passes(batch)],
    }
    found = {way: _compile(config, bucketed, own) for way, own in shapes.items()}
    naive, naive_seconds = found["naive"]
    rows = []
    for way in ("single", "bucketed"):
        own, seconds = found[way]
        rows.append(
            Row(
                name=f"pool/{name}/{way}",
                value=sum(own) / 1e6,
                unit="MB",
                baseline="naive",
                baseline_value=sum(naive) / 1e6,
                ratio=sum(naive) / sum(own),
                details={
                    "programs": len(own),
                    "baseline_programs": len(naive),
                    "largest": max(own) / 1e6,
                    "baseline_largest": max(naive) / 1e6,
                    "compile_seconds": seconds,
                    "baseline_compile_seconds": naive_seconds,
                    "strategies": 1 if way == "single" else len(strategies),
                },
            )
        )
    return rows


def _compile(
    config: ModelConfig, buckets: Buckets, shapes: Sequence[tuple[int, int, int]]
) -> tuple[list[int], float]:
    """Bytes of the programs of (batch, nodes of a slot, rows), and the seconds that compiling them took."""
    pool = ExecutablePool()
    engine = DecodeEngine(config, Numerics(), SamplingParams(), buckets, (), pool=pool)
    params = engine.load_params(init_params(config, seed=0))
    start = time.perf_counter()
    for batch, nodes, rows in shapes:
        tree = empty_tree(batch, nodes)
        engine.verify_bytes(
            params, engine.init_state(batch, _LENGTH), tree, pack_rows(tree, np.arange(batch), rows)
        )
    return list(pool.bytes().values()), time.perf_counter() - start
