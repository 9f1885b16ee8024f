"""Compares fixed strategies: the effect of depth, width, verified tokens and batch on the gain.

The tables of TLT (Figure 13, Tables 1 and 4) and EfficientRollout (Table 4). An EAGLE-3 head is trained on a
few rollouts; then the policy stands still, and every strategy rolls the same requests out with the same head.
"""

import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from drafters.eagle.checkpoint import save_head
from rljax.benchmarking import Row, counted_row
from rljax.config import ExperimentConfig
from rljax.engine.draft_tree import most_nodes
from rljax.speculation.pass_times import PassTimes
from rljax.speculation.strategies import Strategy
from rljax.training.compiling import compile_programs
from rljax.training.training_run import TrainingRun
from rollout_benchmarks.variants import PLAIN, Variant, check_same, make_variant, open_run, roll_out

_DEPTHS, _NODES, _TOP_KS = (2, 4, 6), (3, 7, 15), (1, 2, 4)
_BITS, _LENGTHS = (8, 4), (2, 4, 8)
_HEAD = "eagle3"
_TRAINING = {"learning_rate": 3e-3, "slices": 24, "depths": [2], "train_below": 0}


@dataclasses.dataclass(frozen=True)
class _Case:
    """A strategy to measure.

    Attributes:
      table: name of the table with the strategy.
      label: label of the strategy in the table.
      keys: keys of the section `speculation`.
      strategy: the strategy, used in every pass.
    """

    table: str
    label: str
    slots: int
    keys: dict[str, Any]
    strategy: Strategy


def strategy_rows(config: ExperimentConfig, training_steps: int) -> list[Row]:
    """Measures tokens per second and accept length of every strategy, against plain decoding.

    Args:
      training_steps: rollouts that the head is trained on.
    """
    with tempfile.TemporaryDirectory() as directory, open_run(config) as (run, progress):
        compile_programs(run, wait=True)
        times: dict[Any, PassTimes] = {}
        head = Path(directory) / "head"
        _train_head(run, head, training_steps, times)
        cases = list(_cases(config, head))
        slots = sorted({case.slots for case in cases})
        progress.stage("bench", len(cases))
        plain = {size: _resized(make_variant(run, PLAIN, None, times), size) for size in slots}
        expected = {size: roll_out(run, plain[size], training_steps) for size in slots}
        rows = []
        for number, case in enumerate(cases):
            speculation = {"choice": "fixed", "strategies": [dataclasses.asdict(case.strategy)]}
            variant = _resized(make_variant(run, case.label, case.keys | speculation, times), case.slots)
            groups = roll_out(run, variant, training_steps)
            check_same(expected[case.slots], groups, case.label)
            roll_out(run, plain[case.slots], training_steps)  # again, close in time to its comparison
            rows.append(_row(case, variant, plain[case.slots]))
            progress.step(number + 1, {"tokens_per_second": rows[-1].value})
    return rows


def _cases(config: ExperimentConfig, head: Path) -> Iterator[_Case]:
    most, slots = config.speculation.max_drafts, config.engine.max_slots

    def eagle(table: str, label: str, slots: int, depth: int, top_k: int, nodes: int) -> _Case:
        nodes = min(nodes, most, most_nodes(depth, top_k))
        args = {"variant": _HEAD, "path": str(head), "train": False, "depths": [depth], "top_k": top_k}
        return _Case(
            table, label, slots, {"drafter": "eagle", "args": args}, Strategy(depth, top_k, nodes, "eagle")
        )

    for depth in _DEPTHS:
        for nodes in _NODES:
            yield eagle("depth", f"depth {depth}, {nodes} to verify", slots, depth, 2, nodes)
    for top_k in _TOP_KS:
        yield eagle("top_k", f"top_k {top_k}", slots, 4, top_k, 15)
    for size in config.engine.batch_buckets or (slots,):
        for nodes in _NODES:
            yield eagle("batch", f"{size} slots, {nodes} to verify", size, 4, 2, nodes)
    for bits in _BITS:
        for length in _LENGTHS:
            keys = {"drafter": "quantized", "args": {"bits": bits}}
            strategy = Strategy(length, 1, length, "quantized")
            yield _Case("bits", f"{bits} bits, {length} drafts", slots, keys, strategy)


def _train_head(run: TrainingRun, directory: Path, steps: int, times: dict[Any, PassTimes]) -> None:
    trained = make_variant(
        run, "trained", {"drafter": "eagle", "args": {"variant": _HEAD, **_TRAINING}}, times
    )
    for step in range(steps):
        roll_out(run, trained, step)
    drafter = trained.speculator.drafters["eagle"]
    save_head(directory, drafter.config, drafter.trainer.params, "float32", "vllm")


def _resized(variant: Variant, slots: int) -> Variant:
    variant.collector.scheduler.max_slots = slots
    return variant


def _row(case: _Case, variant: Variant, plain: Variant) -> Row:
    (statistics,), (seconds,) = variant.statistics, variant.seconds
    baseline = sum(plain.seconds[-2:]) / 2  # just before, and just after
    return counted_row(
        f"strategies/{case.table}/{case.label}",
        statistics.tokens / seconds,
        statistics.tokens / baseline,
        "tokens/s",
        "plain decoding",
        strategy=str(case.strategy),
        slots=case.slots,
        accept_length=statistics.accept_length,
        acceptance=statistics.accepted / max(statistics.drafted, 1),
        tokens=statistics.tokens,
        verifying_passes=statistics.verified,
        draft_share=statistics.draft_seconds / seconds,
    )
