"""What takes part in the steps of a run besides the loop: drafters, rollout workers, a curriculum, tools.

The loop (`loop.py`) knows none of them by name. It calls every `Extra` at the same points of a step.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from drafters.base import Outcome
from rljax.cluster.decoder import ClusterDecoder
from rljax.engine.background import BackgroundCompiler
from rljax.engine.executables import ExecutablePool
from rljax.evaluation.judging import pass_shares
from rljax.requests import spans_of
from rljax.rollout.collector import Group, Scheduler
from rljax.rollout.metrics import tokens_per_second
from rljax.speculation.speculator import Speculator
from rljax.tasks.curriculum import Curriculum
from rljax.training.batches import Rollout
from rljax.training.run_state import RunState


class Extra:
    """Takes part in the steps of a run. What an extra does not define does nothing."""

    def begin_step(self) -> None:
        """A step begins."""

    def before_round(self, round_: int) -> None:
        """A round of the step's rollout, from 0, has begun and is decoded next."""

    def learn(self, responses: Sequence[Outcome]) -> None:
        """Responses of a round are rewarded: all of them, also those that dynamic sampling drops."""

    def after_round(self, round_: int, followed: bool) -> None:
        """Dynamic sampling has decided whether another round follows."""

    def before_update(self) -> None:
        """The weights change next."""

    def during_update(self) -> contextlib.AbstractContextManager[None]:
        """Context of the updates."""
        return contextlib.nullcontext()

    def before_evaluation(self) -> None:
        """Held-out problems are sampled next."""

    def metrics(self, rollout: Rollout, seconds: float) -> Mapping[str, Any]:
        """Returns metrics of a step that took so many seconds, after its updates."""
        return {}


class Compilation(Extra):
    """Programs that are compiled in the background.

    Attributes:
      updates: compiles the programs of updates while the first rollout decodes; None where they are compiled
        with all others, or all are there.
    """

    updates: BackgroundCompiler | None = None

    def __init__(self, scheduler: Scheduler, pool: ExecutablePool) -> None:
        self._engine, self._speculator, self._pool = scheduler.engine, scheduler.speculator, pool

    def before_update(self) -> None:
        if self.updates is not None:
            self.updates.complete()
            self.updates = None

    @property
    def left(self) -> int:
        """Shapes whose programs are still compiled: of prefill, plain decoding and verifying passes."""
        plain = 0 if self._engine.background is None else self._engine.background.left
        return plain + self._speculator.compiling

    def metrics(self, rollout: Rollout, seconds: float) -> Mapping[str, Any]:
        """Returns metrics of the run so far: `engine/compilations`, programs compiled or loaded by the thread
        that decodes and learns. Where others are compiled in the background, too:
        `engine/compiled_in_background`, their number, `time/compiled_in_background`, the seconds that they
        took, and `engine/waited_for_compilation_seconds`, seconds in which decoding waited for them.
        """
        metrics: dict[str, float] = {"engine/compilations": len(self._pool) - self._pool.background_programs}
        if self._engine.background is not None:
            metrics |= {
                "engine/compiled_in_background": self._pool.background_programs,
                "engine/waited_for_compilation_seconds": self._engine.background.seconds_waited,
                "time/compiled_in_background": self._pool.background_seconds,
            }
        return metrics


class Measured(Extra):
    """Metrics of every rollout."""

    def __init__(self, measure: Callable[[Rollout], Mapping[str, Any]]) -> None:
        self._measure = measure

    def metrics(self, rollout: Rollout, seconds: float) -> Mapping[str, Any]:
        return self._measure(rollout)


class Drafting(Extra):
    """Drafters learn from every response."""

    def __init__(self, speculator: Speculator) -> None:
        self._speculator = speculator

    def begin_step(self) -> None:
        self._speculator.decisions.take()  # discards those of evaluations

    def learn(self, responses: Sequence[Outcome]) -> None:
        self._speculator.learn(responses)

    def metrics(self, rollout: Rollout, seconds: float) -> Mapping[str, Any]:
        return self._speculator.metrics(rollout.statistics)


class Workers(Extra):
    """Rollout workers learn from every response. With staleness they decode while the weights change."""

    def __init__(self, cluster: ClusterDecoder, lag: int) -> None:
        self._cluster, self._lag = cluster, lag

    def learn(self, responses: Sequence[Outcome]) -> None:
        self._cluster.learn(responses)

    def during_update(self) -> contextlib.AbstractContextManager[None]:
        return self._cluster.listening() if self._lag else contextlib.nullcontext()

    def metrics(self, rollout: Rollout, seconds: float) -> Mapping[str, Any]:
        metrics = self._cluster.metrics()
        if self._lag:  # they decode all the time
            metrics["rollout/tokens_per_second"] = tokens_per_second(rollout.statistics.tokens, seconds)
        return metrics


class PassRates(Extra):
    """The curriculum learns how often each problem is solved."""

    def __init__(self, curriculum: Curriculum, success: str | None, state: RunState) -> None:
        self._curriculum, self._success, self._state = curriculum, success, state

    def metrics(self, rollout: Rollout, seconds: float) -> Mapping[str, Any]:
        learned = self._curriculum.learn(pass_shares(rollout.sampled, self._success))
        return {**learned, "curriculum/passed_over": self._state.skipped_problems}


def lag_metrics(groups: Sequence[Group], step: int) -> dict[str, float]:
    """Returns how many steps older than the step's weights those are that sampled its tokens: `lag_mean` over
    tokens, `lag_max`, and `stale_share`, the share of tokens under older ones.
    """
    tokens: dict[int, int] = {}
    for completion in (completion for group in groups for completion in group.completions):
        for version in {version for _, version in completion.versions}:
            count = sum(end - begin for begin, end in spans_of(completion, version))
            tokens[step - version] = tokens.get(step - version, 0) + count
    total = sum(tokens.values())
    return {
        "rollout/lag_mean": sum(lag * count for lag, count in tokens.items()) / total,
        "rollout/lag_max": max(lag for lag, count in tokens.items() if count),
        "rollout/stale_share": 1.0 - tokens.get(0, 0) / total,
    }
