"""One strategy, always, as the papers' always-on baselines do."""

from collections.abc import Sequence

import numpy as np

from rljax.engine.buckets import Buckets
from rljax.engine.state import DecodeState
from rljax.requests import DecodeStatistics
from rljax.speculation.managers.drafting import draft, verify_all
from rljax.speculation.mixing import Mixer, proposer_of
from rljax.speculation.pass_choice import Choice
from rljax.speculation.pass_record import PassRecord
from rljax.speculation.pass_times import PassTimes
from rljax.speculation.proposals import ActiveSlots, Proposer
from rljax.speculation.strategies import Strategy


class FixedManager:
    """Uses one strategy before every pass, whether it pays or not.

    Args:
      proposers: the drafters.
      buckets: sizes of passes.
      times: measured times of passes, for the promises in the log.
      strategy: the strategy.
    """

    def __init__(
        self, proposers: Sequence[Proposer], buckets: Buckets, times: PassTimes, strategy: Strategy
    ) -> None:
        self._proposer = proposer_of(strategy, proposers, Mixer(proposers, buckets.max_drafts))
        self._buckets, self._times, self._strategy = buckets, times, strategy

    def begin(self, training: bool, step: int) -> None:
        """Does nothing."""

    def choose(
        self, state: DecodeState, active: ActiveSlots, statistics: DecodeStatistics
    ) -> tuple[DecodeState, Choice]:
        state, drafted = draft(self._proposer, self._strategy, state, active, statistics, self._buckets)
        reason, plain_rate = (
            f"always {self._strategy}",
            self._times.plain_rate(active.responses, state.batch, state.cache.length),
        )
        if not drafted.rows:
            reason = f"{self._proposer.name} had nothing to verify ({reason})"
            return state, Choice.plain(reason, plain_rate, draft_seconds=drafted.seconds)
        return state, verify_all(drafted, state, self._buckets, self._times, reason, plain_rate)

    def record(self, record: PassRecord) -> None:
        """Does nothing."""

    def state(self) -> dict[str, np.ndarray]:
        return {}

    def load_state(self, state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return state
