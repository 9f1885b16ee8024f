"""RhymeRL's cut-off: drafts up to the largest batch at which they pay, from a table by acceptance.

RhymeRL, section 5.4. The more responses a worker decodes, the fewer rows of a pass cost nothing, and the more
of the drafts must be accepted. So the largest batch at which speculation gains is profiled for every
acceptance rate beforehand, acceptance is monitored, and speculation is off above the batch that the table has
for it. The paper does not print its table. Here it follows from the passes that the warm-up has timed: with a
share p of the draft tokens accepted, a pass that has room for d of them in every slot is worth

    (1 + p * d) * T_plain / (T_draft + T_verify)

plain steps, and a batch is viable where that is above 1 for some compiled pass. How many tokens of a response
are drafted is left to the drafter: HistoSpec has a window for each (`drafters/histospec.py`).
"""

from collections.abc import Callable

import numpy as np

from rljax.config.speculation_keys import SpeculationKeys
from rljax.engine.buckets import Buckets
from rljax.engine.state import DecodeState
from rljax.requests import DecodeStatistics
from rljax.speculation.managers.drafting import draft, strategy_of, verify_all
from rljax.speculation.managers.manager import Manager, Setup
from rljax.speculation.pass_choice import Choice
from rljax.speculation.pass_record import PassRecord
from rljax.speculation.pass_times import PassTimes
from rljax.speculation.proposals import ActiveSlots

_RATES = np.linspace(0.0, 1.0, 21)
_KEPT = 0.5  # share of the counts that is carried over to the next rollout
_PRIOR_RATE, _PRIOR_DRAFTS = 0.8, 16.0  # high enough that a drafter never tried is worth a try


def viable_batches(
    times: PassTimes, buckets: Buckets, length: int, max_batch: int, draft_seconds: Callable[[int], float]
) -> np.ndarray:
    """The table: the largest batch bucket at which drafts pay, for each of 21 acceptance rates from 0 to 1.

    Args:
      times: measured times of passes.
      length: cache length.
      max_batch: larger batches decode plainly.
      draft_seconds: seconds of drafting for a batch.

    Returns:
      int64 [21], not falling; 0 where no batch is viable.
    """
    table = np.zeros(len(_RATES), np.int64)
    for batch in buckets.batch:
        plain, drafting = times.plain(batch, length), draft_seconds(batch)
        for rows, nodes in buckets.passes(batch):
            room = min(nodes, rows / batch - 1)
            gain = (1 + _RATES * room) * plain / (drafting + times.verify(batch, length, rows))
            if batch <= max_batch:
                table[gain > 1] = np.maximum(table[gain > 1], batch)
    return table


class CutoffManager(Manager):
    """Verifies whatever the drafter has, up to the batch that the table has for its acceptance.

    Args:
      setup: one drafter; sizes and times.
      config: not read; the cut-off has no keys.
    """

    def __init__(self, setup: Setup, config: SpeculationKeys) -> None:
        (self._proposer,) = setup.proposers
        self._buckets, self._times, self._max_batch = setup.buckets, setup.times, setup.max_batch
        self._strategy = strategy_of(self._proposer, setup.buckets.max_drafts)
        self._training = self._proposer.drafter.training
        self._drafts = np.zeros(2)  # verified, and accepted
        self._tables: dict[int, np.ndarray] = {}  # by cache length

    def begin(self, training: bool, step: int) -> None:
        self._drafts *= _KEPT
        self._tables = {}

    def choose(
        self, state: DecodeState, active: ActiveSlots, statistics: DecodeStatistics
    ) -> tuple[DecodeState, Choice]:
        batch, length, name = state.batch, state.cache.length, self._proposer.name
        plain_rate = self._times.plain_rate(active.responses, batch, length)
        if self._training is not None and not self._training.trained:
            return state, Choice.plain(f"{name} is not trained yet", plain_rate)
        # Look the acceptance up in the table, rounded down.
        most = int(self._table(length)[int(self.acceptance * (len(_RATES) - 1) + 1e-9)])
        reason = f"with {self.acceptance:.0%} of the drafts accepted they pay up to batch {most}"
        if batch > most:
            return state, Choice.plain(reason, plain_rate)
        state, drafted = draft(self._proposer, self._strategy, state, active, statistics, self._buckets)
        if not drafted.rows:
            reason = f"{name} had nothing to verify ({reason})"
            return state, Choice.plain(reason, plain_rate, draft_seconds=drafted.seconds)
        return state, verify_all(drafted, state, self._buckets, self._times, reason, plain_rate)

    @property
    def acceptance(self) -> float:
        """The share of the verified draft tokens that was accepted."""
        verified, accepted = self._drafts.tolist()
        return (accepted + _PRIOR_RATE * _PRIOR_DRAFTS) / (verified + _PRIOR_DRAFTS)

    def _table(self, length: int) -> np.ndarray:
        if length not in self._tables:
            arguments = self._times, self._buckets, length, self._max_batch
            self._tables[length] = viable_batches(*arguments, lambda batch: self._seconds(batch, length))
        return self._tables[length]

    def _seconds(self, batch: int, length: int) -> float:
        """Seconds of drafting; on the host it costs next to nothing."""
        if self._proposer.on_host:
            return 0.0
        if self._proposer.only_chains:
            return self._strategy.depth * self._times.draft(batch, length, self._proposer.name)
        tree = min(self._proposer.trees, key=lambda tree: abs(tree.depth - self._strategy.depth))
        return self._times.draft(batch, length, self._proposer.name, tree)

    def record(self, record: PassRecord) -> None:
        if record.nodes is not None:
            self._drafts += [record.nodes.verified.sum(), record.nodes.accepted.sum()]

    def state(self) -> dict[str, np.ndarray]:
        return {"cutoff_drafts": self._drafts.copy()}

    def load_state(self, state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        self._drafts = state.get("cutoff_drafts", self._drafts).astype(np.float64)
        return {name: array for name, array in state.items() if name != "cutoff_drafts"}
