"""Number and memory of the programs that verify and draft: TLT's Table 5.

In TLT every strategy has one CUDA graph per batch size, and every graph keeps its buffers. With buckets, a
strategy is captured only for its batch sizes, separately for target and drafter, and strategies share graphs.
XLA's programs allocate buffers when they run, so a device needs free memory for the largest program; the sum
is the memory that graphs would keep.
"""

import time
from collections.abc import Sequence

import numpy as np

from drafters.eagle.collecting import FeatureCollector
from drafters.eagle.model import HeadConfig, init_head, shared_params
from drafters.eagle.slots import HeadSlots
from rljax.benchmarking import Row, counted_row
from rljax.engine.buckets import Buckets
from rljax.engine.draft_tree import DraftStrategy, empty_tree, pack_rows
from rljax.engine.engine import DecodeEngine
from rljax.engine.executables import ExecutablePool
from rljax.models.config import ModelConfig
from rljax.models.transformer import init_params
from rljax.numerics.rows import Numerics
from rljax.sampling.distribution import SamplingParams
from rljax.speculation.strategies import Strategy
from workloads import config_of

_LENGTH = 512
_NODES = (1, 3, 5, 7, 11, 15, 23, 31)  # per slot, by strategy
_DEPTHS = {2: 7, 4: 15, 6: 31}  # depth of a head's trees: most nodes per slot
_TOP_K = 4
_SINGLE = 7
_ROWS = (8, 16, 32, 64, 128)  # of the bucketed passes


def pool_rows(name: str, batches: Sequence[int]) -> list[Row]:
    """Compares all strategies for all batches to one strategy alone and to bucketed programs."""
    from rljax.papers.tlt.arms import arms_by_batch

    config = config_of(name)
    strategies = [Strategy(nodes, nodes, nodes, "drafter") for nodes in _NODES]
    bucketed = Buckets(tuple(batches), (_LENGTH,), _ROWS, _NODES[-1])
    arms = arms_by_batch(strategies, bucketed, batches[-1])
    assert set(strategies) == {arm for choices in arms.values() for arm in choices if arm is not None}
    verifying = {
        "single": [(batch, _SINGLE, batch * (_SINGLE + 1)) for batch in batches],
        "naive": [(batch, nodes, batch * (nodes + 1)) for batch in batches for nodes in _NODES],
        "bucketed": [(batch, nodes, rows) for batch in batches for rows, nodes in bucketed.passes(batch)],
    }
    drafting = {
        "single": [(batch, _tree(_SINGLE)) for batch in batches],
        "naive": [(batch, _tree(nodes)) for batch in batches for nodes in _NODES],
        # Strategies with trees of the same depth share a program, and verify different numbers of nodes.
        "bucketed": sorted(
            {
                (batch, _tree(_DEPTHS[_depth(arm.nodes)]))
                for batch, choices in arms.items()
                for arm in choices
                if arm is not None
            },
            key=str,
        ),
    }
    rows = []
    for part, shapes, compile_all in (("", verifying, _compile), ("drafting ", drafting, _compile_drafting)):
        compiled = {way: compile_all(config, bucketed, programs) for way, programs in shapes.items()}
        naive, naive_seconds = compiled["naive"]
        for way in ("single", "bucketed"):
            sizes, seconds = compiled[way]
            rows.append(
                counted_row(
                    f"pool/{name}/{part}{way}",
                    sum(sizes) / 1e6,
                    sum(naive) / 1e6,
                    "MB",
                    "naive",
                    less=True,
                    programs=len(sizes),
                    baseline_programs=len(naive),
                    largest=max(sizes) / 1e6,
                    baseline_largest=max(naive) / 1e6,
                    compile_seconds=seconds,
                    baseline_compile_seconds=naive_seconds,
                    strategies=1 if way == "single" else len(strategies),
                )
            )
    return rows


def _depth(nodes: int) -> int:
    return next(depth for depth, most in _DEPTHS.items() if nodes <= most)


def _tree(nodes: int) -> DraftStrategy:
    return DraftStrategy(_depth(nodes), _TOP_K, nodes)


def _engine(config: ModelConfig, buckets: Buckets, pool: ExecutablePool) -> DecodeEngine:
    return DecodeEngine(config, Numerics(), SamplingParams(), buckets, (), pool=pool)


def _compile(
    config: ModelConfig, buckets: Buckets, shapes: Sequence[tuple[int, int, int]]
) -> tuple[list[int], float]:
    """Returns bytes of the programs that verify (batch, nodes per slot, rows), and seconds of compiling
    them.
    """
    pool = ExecutablePool()
    engine = _engine(config, buckets, pool)
    params = engine.load_params(init_params(config, seed=0))
    start = time.perf_counter()
    for batch, nodes, rows in shapes:
        tree = empty_tree(batch, nodes)
        engine.verify_bytes(
            params, engine.init_state(batch, _LENGTH), tree, pack_rows(tree, np.arange(batch), rows)
        )
    return list(pool.bytes().values()), time.perf_counter() - start


def _compile_drafting(
    config: ModelConfig, buckets: Buckets, shapes: Sequence[tuple[int, DraftStrategy]]
) -> tuple[list[int], float]:
    """Returns the same for the programs with which an EAGLE-3 head drafts such trees."""
    pool, head = ExecutablePool(), HeadConfig("eagle3", config)
    engine = _engine(config, buckets, pool)
    params = init_params(config, seed=0)
    slots = HeadSlots(head, engine, (), FeatureCollector(0), max(_DEPTHS))
    slots.use(init_head(head, params, seed=0), shared_params(params, config))
    start = time.perf_counter()
    for batch, tree in shapes:
        slots.start(batch)
        slots.draft(engine.init_state(batch, _LENGTH), tree)
    return list(pool.bytes().values()), time.perf_counter() - start
