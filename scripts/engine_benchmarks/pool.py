"""How many programs verify and draft, and the memory that they need: TLT's Table 5.

There, every strategy of speculation has CUDA graphs of its own for every batch size, each of which keeps its
buffers; bucketed, a strategy is captured for the batch sizes that it is for, target and drafter apart, and
strategies share what they can. XLA's programs take their buffers when they run, so what a device must have
free is the largest; the sum is what graphs would keep.
"""

import time
from collections.abc import Sequence

import numpy as np

from drafters.eagle.drafting import DraftStrategy
from drafters.eagle.model import HeadConfig, init_head, shared_params
from drafters.eagle.slots import HeadSlots
from rljax.benchmarking import Row
from rljax.engine.buckets import Buckets
from rljax.engine.draft_tree import empty_tree, pack_rows
from rljax.engine.engine import DecodeEngine
from rljax.engine.executables import ExecutablePool
from rljax.models.config import ModelConfig
from rljax.models.transformer import init_params
from rljax.numerics.rows import Numerics
from rljax.sampling.distribution import SamplingParams
from rljax.speculation.strategies import Strategy, arms_by_batch

_LENGTH = 512
_NODES = (1, 3, 5, 7, 11, 15, 23, 31)  # of a slot, by strategy
_DEPTHS = {2: 7, 4: 15, 6: 31}  # of the trees that a head drafts for up to so many of them
_TOP_K = 4
_SINGLE = 7
_ROWS = (8, 16, 32, 64, 128)  # of the bucketed passes


def pool_rows(name: str, config: ModelConfig, batches: Sequence[int]) -> list[Row]:
    """Every strategy for every batch, against one strategy alone and against bucketed programs."""
    strategies = [Strategy(nodes, nodes, nodes, "drafter") for nodes in _NODES]
    bucketed = Buckets(tuple(batches), (_LENGTH,), _ROWS, _NODES[-1])
    arms = arms_by_batch(strategies, bucketed, batches[-1])
    assert set(strategies) == {arm for own in arms.values() for arm in own if arm is not None}
    verifying = {
        "single": [(batch, _SINGLE, batch * (_SINGLE + 1)) for batch in batches],
        "naive": [(batch, nodes, batch * (nodes + 1)) for batch in batches for nodes in _NODES],
        "bucketed": [(batch, nodes, rows) for batch in batches for rows, nodes in bucketed.passes(batch)],
    }
    drafting = {
        "single": [(batch, _tree(_SINGLE)) for batch in batches],
        "naive": [(batch, _tree(nodes)) for batch in batches for nodes in _NODES],
        # Strategies with trees of one depth share its program: each verifies what it wants of them.
        "bucketed": sorted(
            {
                (batch, _tree(_DEPTHS[_depth(arm.nodes)]))
                for batch, own in arms.items()
                for arm in own
                if arm is not None
            },
            key=str,
        ),
    }
    rows = []
    for part, shapes, compile_all in (("", verifying, _compile), ("drafting ", drafting, _compile_drafting)):
        found = {way: compile_all(config, bucketed, own) for way, own in shapes.items()}
        naive, naive_seconds = found["naive"]
        for way in ("single", "bucketed"):
            own, seconds = found[way]
            rows.append(
                Row(
                    name=f"pool/{name}/{part}{way}",
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


def _depth(nodes: int) -> int:
    return next(depth for depth, most in _DEPTHS.items() if nodes <= most)


def _tree(nodes: int) -> DraftStrategy:
    return DraftStrategy(_depth(nodes), _TOP_K, nodes)


def _engine(config: ModelConfig, buckets: Buckets, pool: ExecutablePool) -> DecodeEngine:
    return DecodeEngine(config, Numerics(), SamplingParams(), buckets, (), pool=pool)


def _compile(
    config: ModelConfig, buckets: Buckets, shapes: Sequence[tuple[int, int, int]]
) -> tuple[list[int], float]:
    """Bytes of the programs that verify (batch, nodes of a slot, rows), and the seconds of compiling them."""
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
    """The same of the programs with which an EAGLE-3 head drafts such trees for so many slots."""
    pool, head = ExecutablePool(), HeadConfig("eagle3", config)
    engine = _engine(config, buckets, pool)
    params = init_params(config, seed=0)
    slots = HeadSlots(head, engine, max(_DEPTHS))
    slots.use(init_head(head, params, seed=0), shared_params(params, config))
    start = time.perf_counter()
    for batch, tree in shapes:
        slots.start(batch)
        slots.draft(engine.init_state(batch, _LENGTH), tree)
    return list(pool.bytes().values()), time.perf_counter() - start
