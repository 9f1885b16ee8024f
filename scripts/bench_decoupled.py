"""Coupled and decoupled speculation: `python scripts/bench_decoupled.py [--policy NAMES]`.

`model`: a small model, which is the policy with noise on its weights.
`head`: an EAGLE head, trained behind four rollouts before.

On a CPU it needs two devices, one that verifies and one that drafts:
XLA_FLAGS=--xla_force_host_platform_device_count=2. Tokens and logprobs must be those of plain decoding.
`docs/small-model.md` explains the rows.
"""

import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from drafters.registry import make_drafters, states_read
from rljax.benchmark_runs import Benchmark, Measurement
from rljax.benchmarking import Row, counted_row
from rljax.config.speculation import SpeculationConfig
from rljax.engine.buckets import Buckets
from rljax.engine.engine import DecodeEngine
from rljax.errors import UserError
from rljax.models.huggingface import save_model
from rljax.models.transformer import Params
from rljax.numerics.rows import Numerics
from rljax.requests import Completion, DecodeStatistics, Request
from rljax.rollout.scheduler import Scheduler
from rljax.sampling.distribution import SamplingParams
from rljax.sampling.noise import request_key
from rljax.speculation.managers.selection import StrategyChoice
from rljax.speculation.pass_times import PassTimes
from rljax.speculation.speculator import Speculator
from rollout_benchmarks.equality import check_equal
from workloads import POLICY_OPTION, REAL, config_of, params_of, policies_of

_SLOTS, _PROMPT, _RESPONSE, _MOST_DRAFTS = 8, 16, 96, 7
_NOISE = (0.0, 0.01, 0.02)
_WAYS = (("coupled", 3), ("decoupled", 3), ("decoupled", 4))
_HEAD = {"variant": "eagle3", "train_below": 0, "slices": 64, "pack_length": 128, "rows": 8}
_ROLLOUTS = 4  # behind which the head is trained


class _AlwaysWorthIt(PassTimes):
    """Times by which every pass with drafts pays, so that all ways draft as far as they can."""

    def has_plain(self, batch: int, length: int) -> bool:
        return True

    def plain(self, batch: int, length: int) -> float:
        return 1.0

    def verify(self, batch: int, length: int, rows: int) -> float:
        return 1e-3

    def draft(self, batch: int, length: int, drafter: str, strategy: object = None) -> float:
        return 1e-3


def model_rows(policy: str) -> list[Row]:
    """Returns a row for every noise and way, against plain decoding in the same process."""
    params, rows = _params(policy), []
    for noise in _NOISE:
        with tempfile.TemporaryDirectory() as directory:
            _save(policy, params, noise, Path(directory) / "model")
            for mode, window in _WAYS:
                name = f"{mode}/window {window}/noise {noise:g}"
                given = {"drafter": "small_model", "args": {"path": str(Path(directory) / "model")}}
                rows.append(_row(policy, name, given, mode, window, rollouts=0))
    return rows


def head_rows(policy: str) -> list[Row]:
    """Returns a row for every way, against plain decoding in the same process."""
    given = {"drafter": "eagle", "args": _HEAD}
    return [
        _row(policy, f"{mode}/window {window}/head", given, mode, window, rollouts=_ROLLOUTS)
        for mode, window in _WAYS
    ]


def _params(policy: str) -> Params:
    """A policy's; random ones twice as large, so that some tokens are much likelier than others."""
    scale = 1 if policy == REAL else 2
    return jax.tree.map(lambda leaf: scale * leaf if leaf.ndim > 1 else leaf, params_of(policy))


def _row(policy: str, name: str, given: dict[str, Any], mode: str, window: int, rollouts: int) -> Row:
    """Returns the row of a way to decode with a drafter.

    Args:
      name: of the row, behind the policy's.
      given: the drafter, in the config's section `speculation`.
      rollouts: behind so many of other prompts the drafter learns before.
    """
    speculation = {"decoupled": {"window": window, "modes": [mode]}, "max_drafts": _MOST_DRAFTS}
    config = SpeculationConfig.model_validate(given | speculation)
    choice, drafters = StrategyChoice(config), make_drafters(config)
    buckets = Buckets((_SLOTS,), (128,), (_SLOTS * 4, _SLOTS * (_MOST_DRAFTS + 1)), _MOST_DRAFTS)
    shape = config_of(policy)
    layers = states_read(drafters, shape)
    engine = DecodeEngine(shape, Numerics(), SamplingParams(), buckets, (), 4, hidden_layers=layers)
    loaded, requests = engine.load_params(_params(policy)), list(_requests(shape.vocab_size, 0))
    expected, plain, plain_seconds = _timed(Scheduler(engine, _SLOTS), loaded, requests)
    with Speculator(engine, drafters, _SLOTS, times=_AlwaysWorthIt(), strategies=choice) as speculator:
        scheduler = Scheduler(engine, _SLOTS, None, speculator)
        for rollout in range(rollouts):
            scheduler.run(loaded, list(_requests(shape.vocab_size, 1 + rollout)))
            speculator.learn([])
        done, statistics, seconds = _timed(scheduler, loaded, requests)
        metrics = speculator.metrics(statistics)
    check_equal(done, expected)
    counts = ("windows", "ready_share", "wasted", "most_wasted")
    return counted_row(
        f"{policy}/{name}",
        statistics.tokens / statistics.steps / _SLOTS,
        plain.tokens / plain.steps / _SLOTS,
        "tokens of a slot in a pass",
        "plain decoding",
        tokens=statistics.tokens,
        seconds=seconds,
        plain_seconds=plain_seconds,
        acceptance=metrics["speculation/acceptance"],
        **{count: metrics[f"speculation/decoupled_{count}"] for count in counts},
    )


def _requests(vocab_size: int, seed: int) -> Iterator[Request]:
    rng = np.random.default_rng(seed)
    for i in range(2 * _SLOTS):
        prompt = tuple(rng.integers(0, vocab_size, _PROMPT).tolist())
        yield Request(prompt, request_key(seed, 0, 0, i, 0), _RESPONSE)


def _save(policy: str, params: Params, noise: float, path: Path) -> None:
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    noisy = [
        leaf + noise * jax.random.normal(key, leaf.shape) for key, leaf in zip(keys, leaves, strict=True)
    ]
    save_model(path, config_of(policy), jax.tree.unflatten(tree, noisy), "float32")


def _timed(
    scheduler: Scheduler, params: Params, requests: Sequence[Request]
) -> tuple[list[Completion], DecodeStatistics, float]:
    """Decodes twice, of which the first time compiles."""
    scheduler.run(params, requests)
    start = time.perf_counter()
    completions, statistics = scheduler.run(params, requests)
    return completions, statistics, time.perf_counter() - start


def _prepare(sections: Sequence[str]) -> None:
    if jax.local_device_count() < 2:
        raise UserError(
            "one device verifies and another one drafts, and there is one; on a CPU set"
            " XLA_FLAGS=--xla_force_host_platform_device_count=2"
        )


def _plan(arguments: Namespace) -> list[Measurement]:
    return [
        Measurement(section, f"{name}, 16 responses of 96 tokens", rows, (name,))
        for section, rows in (("model", model_rows), ("head", head_rows))
        for name in policies_of(arguments)
    ]


BENCHMARK = Benchmark("decoupled", __doc__, _plan, prepare=_prepare, options=POLICY_OPTION)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
