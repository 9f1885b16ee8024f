"""A cluster whose trainer is several processes: the first one has the workers, all get what these decode.

Every process calls the same methods at the same points, as it runs the same programs. Weights whose parts lie
in several processes are put together in all of them before the first one publishes them.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from drafters.base import Outcome
from rljax import processes
from rljax.assembly.policy import Policy
from rljax.cluster.decoder import BegunRollout, ClusterDecoder
from rljax.config import ExperimentConfig
from rljax.engine.invariance import Invariance
from rljax.models.transformer import Params
from rljax.requests import Completion, DecodeStatistics, Request
from rljax.rollout.collector import OnProgress, Scheduler

_LONGEST_WAIT = 60.0  # seconds in one collective; gloo's end with an error after half an hour


class SharedDecoder:
    """Has the methods of `ClusterDecoder` that a run with staleness 0 calls, which say more about each.

    Args:
      decoder: the first process's; None in the others.
    """

    def __init__(self, decoder: ClusterDecoder | None) -> None:
        self._decoder = decoder

    def build(
        self, scheduler: Scheduler, config: ExperimentConfig, policy: Policy, invariance: Invariance | None
    ) -> None:
        """Lets workers build their engines."""
        processes.from_first(lambda: self._decoder.build(scheduler, config, policy, invariance))

    def wait(self) -> None:
        """Waits until every worker that there is has built its engine."""
        processes.from_first(lambda: self._decoder.wait())

    def begin(self, params: Params, requests: Sequence[Request], version: int) -> BegunRollout | None:
        """Lets workers decode requests, the same in every process. Returns None in all but the first."""
        whole = processes.put_together(params)
        begun: list[BegunRollout] = []
        processes.from_first(lambda: begun.append(self._decoder.begin(whole, requests, version)))
        return begun[0] if begun else None

    def finish(
        self, begun: BegunRollout | None, on_progress: OnProgress | None = None
    ) -> tuple[list[Completion], DecodeStatistics]:
        """Waits for a rollout's responses. `on_progress` is called in the first process alone."""
        if self._decoder is None:
            while (finished := processes.copied_from_first(lambda: None)) is None:
                pass
            return finished
        waiting = _telling_others(on_progress)
        return processes.copied_from_first(lambda: self._decoder.finish(begun, waiting))

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        """Shares rewarded responses with the drafters of all workers."""
        if self._decoder is not None:
            self._decoder.learn(outcomes)

    # What only the process that writes the run's files needs.

    @property
    def doing(self) -> str:
        """A phrase on what the workers do, for the display."""
        return "" if self._decoder is None else self._decoder.doing

    def metrics(self) -> dict[str, float]:
        """Metrics since the last call."""
        return {} if self._decoder is None else self._decoder.metrics()

    def timeline(self) -> dict[str, Any]:
        """What everyone has done since the last call."""
        return {} if self._decoder is None else self._decoder.timeline()

    def state(self) -> dict[str, np.ndarray]:
        """Returns the arrays that a checkpoint keeps."""
        return {} if self._decoder is None else self._decoder.state()

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Takes up what `state` returned."""
        if self._decoder is not None:
            self._decoder.load_state(state)


def _telling_others(on_progress: OnProgress | None) -> OnProgress:
    """Returns a callback that, from time to time, also tells the processes that wait to go on waiting."""
    reported = time.monotonic()

    def tell(tokens: int, ended: int) -> None:
        nonlocal reported
        if on_progress is not None:
            on_progress(tokens, ended)
        if time.monotonic() - reported >= _LONGEST_WAIT:
            processes.copied_from_first(lambda: None)
            reported = time.monotonic()

    return tell


@contextlib.contextmanager
def in_first(make: contextlib.AbstractContextManager[ClusterDecoder]) -> Iterator[SharedDecoder]:
    """Context of the cluster of several processes.

    Args:
      make: context of the first process's decoder, which only that process enters.
    """
    with contextlib.ExitStack() as stack:
        decoders: list[ClusterDecoder] = []
        processes.from_first(lambda: decoders.append(stack.enter_context(make)))
        yield SharedDecoder(decoders[0] if decoders else None)
