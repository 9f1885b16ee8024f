"""Tokens a pass where how good a drafter is varies from request to request: the draft ladder with its races.

Made-up drafters know the responses, and each is right about most tokens of some requests and few of the
others. Passes take made-up times, so that the choices follow from the requests and the seed alone.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from drafters.base import Drafter, Drafts, Queries
from rljax.benchmarking import Row, counted_row
from rljax.config import ExperimentConfig, SpeculationConfig
from rljax.requests import Completion, DecodeStatistics, accumulate
from rljax.rollout.scheduler import Scheduler
from rljax.speculation.managers.selection import StrategyChoice
from rljax.speculation.pass_times import PassTimes
from rljax.speculation.speculator import Speculator
from rljax.training.training_run import TrainingRun
from rollout_benchmarks.equality import check_equal
from rollout_benchmarks.variants import open_run, step_requests, with_hidden_layers

_SHARES = {"first": 0.6, "second": 0.25, "third": 0.15}  # of the requests that each drafter is good for
_GOOD, _BAD = 0.9, 0.15  # share of the tokens that a drafter is right about
_ROWS = 64  # a pass of so many rows takes twice as long as a plain step
_SEEDS = 4


class _Knowing(Drafter):
    """Proposes the recorded responses, with mistakes where a request's `right`, bool [tokens], is False."""

    def __init__(self, right: Sequence[np.ndarray], completions: Sequence[Completion]) -> None:
        self._right, self._completions = right, completions

    def begin(self, requests: Sequence[Any]) -> None:
        self._prompts = [len(request.prompt_ids) for request in requests]

    def observe(self, sampled: Any) -> None:
        """Does nothing: the responses are known."""

    def propose(self, queries: Queries) -> Drafts:
        shape = (len(queries.requests), queries.nodes)
        tokens, counts = np.zeros(shape, np.int32), np.zeros(shape[0], np.int32)
        for row, request in enumerate(queries.requests):
            first = queries.positions[row] - self._prompts[request]
            known = self._completions[request].response_ids[first:][: queries.budgets[row]]
            right = self._right[request][first:][: len(known)]
            counts[row] = len(known)
            tokens[row, : len(known)] = np.where(right, known, known ^ 1)  # another token of the vocabulary
        parents = np.broadcast_to(np.arange(-1, shape[1] - 1, dtype=np.int32), shape)
        return Drafts(tokens, parents, np.zeros(shape, np.float32), counts)


class _MadeUpTimes(PassTimes):
    """Times by the number of rows, whatever is measured."""

    def has_plain(self, batch: int, length: int) -> bool:
        return True

    def plain(self, batch: int, length: int) -> float:
        return 1.0

    def verify(self, batch: int, length: int, rows: int) -> float:
        return 1.0 + rows / _ROWS

    def _add(self, seconds: float, *key: Any) -> None:
        """Does nothing."""


def race_rows(config: ExperimentConfig, seeds: int = _SEEDS) -> list[Row]:
    """Counts verifying passes and tokens a pass of the draft ladder, against its first drafter alone.

    The first rollout of a seed gives the ladder its history; the second is counted.

    Args:
      config: the workload; one step of its requests.
      seeds: draws of who is good for which request.
    """
    totals = {name: DecodeStatistics() for name in ("first alone", "ladder", "expected")}
    with open_run(config) as (run, progress):
        progress.stage("bench", seeds)
        requests = step_requests(run, 0)
        params = run.engine.load_params(run.state.params)
        completions, _ = run.collector.scheduler.run(params, requests)
        for seed in range(seeds):
            right = _draw(completions, np.random.default_rng(seed))
            for name, total in totals.items():
                names = ["first"] if name == "first alone" else list(_SHARES)
                drafters = {each: _Knowing(right[each], completions) for each in names}
                choice = StrategyChoice(
                    SpeculationConfig(choice="expected" if name == "expected" else "ladder")
                )
                scheduler = _scheduler(run, drafters, choice)
                scheduler.run(params, requests)
                again, statistics = scheduler.run(params, requests)
                check_equal(completions, again)
                accumulate(total, statistics)
            progress.step(seed + 1, {"tokens_per_second": 0.0})
    alone = totals.pop("first alone")
    return [_row(name, total, alone, seeds) for name, total in totals.items()]


def _draw(completions: Sequence[Completion], rng: np.random.Generator) -> dict[str, list[np.ndarray]]:
    """By drafter, the tokens of every response that it is right about."""
    good = rng.choice(list(_SHARES), len(completions), p=list(_SHARES.values()))
    return {
        name: [
            rng.random(len(completion.response_ids)) < (_GOOD if of_request == name else _BAD)
            for completion, of_request in zip(completions, good, strict=True)
        ]
        for name in _SHARES
    }


def _scheduler(run: TrainingRun, drafters: dict[str, Drafter], choice: StrategyChoice) -> Scheduler:
    engine, slots = with_hidden_layers(run.engine, None), run.config.engine.max_slots
    speculator = Speculator(engine, drafters, slots, times=_MadeUpTimes(), strategies=choice)
    return Scheduler(engine, slots, None, speculator)


def _row(name: str, total: DecodeStatistics, alone: DecodeStatistics, seeds: int) -> Row:
    return counted_row(
        f"races/{name}",
        total.tokens / total.steps,
        alone.tokens / alone.steps,
        "tokens a pass",
        "the ladder with the first drafter alone",
        seeds=seeds,
        tokens=total.tokens,
        passes=total.steps,
        verifying_passes=total.verified,
        verified_rows=total.verified_rows,
        tokens_a_slot_and_pass=total.accept_length,
        baseline_passes=alone.steps,
    )
