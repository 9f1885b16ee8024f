"""TLT's manager: the strategy that has brought the most tokens per second of late.

TLT, section 5.2 and Algorithm 1; the selector is in `bandit.py`. Measured with three drafters on two cores
(docs/managers.md): 1.52 times plain decoding in the second epoch, where the default manager reaches 2.09,
since it tries every strategy of every batch bucket three times before any median counts.
"""

import itertools
from collections.abc import Sequence

import numpy as np

from drafters.device import TrainedDrafter
from rljax.engine.buckets import Buckets
from rljax.engine.state import DecodeState
from rljax.requests import DecodeStatistics
from rljax.speculation.managers.drafting import draft
from rljax.speculation.managers.papers.bandit import BegMab
from rljax.speculation.mixing import Mixer, pairs, proposer_of
from rljax.speculation.pass_choice import Choice
from rljax.speculation.pass_record import PassRecord
from rljax.speculation.proposals import ActiveSlots, Proposer
from rljax.speculation.strategies import Strategy, arms_by_batch, arms_by_threshold, room_per_slot


class BanditManager:
    """Chooses by `BegMab`.

    Args:
      proposers: the drafters.
      buckets: sizes of passes.
      strategies: the strategies to choose from, of single drafters or of several whose trees are mixed; if
        empty, `default_strategies` of every drafter.
      max_batch: larger batches decode plainly.
      epsilon, window, seed: see `BegMab`.
      mix: without strategies, also those of mixed trees.
      thresholds: see `arms_by_threshold`; empty for `arms_by_batch`. With them the bandit's batch is the
        number of running responses, as in the paper, not the batch bucket.
    """

    def __init__(
        self,
        proposers: Sequence[Proposer],
        buckets: Buckets,
        strategies: Sequence[Strategy],
        max_batch: int,
        epsilon: float,
        window: int,
        seed: int,
        mix: bool = False,
        thresholds: Sequence[int] = (),
    ) -> None:
        self._buckets = buckets
        self._mixer = Mixer(proposers, buckets.max_drafts)
        if not strategies:
            room = room_per_slot(buckets, buckets.batch[0])
            candidates = [*proposers, *(pairs(proposers, self._mixer) if mix else ())]
            defaults = [proposer.default_strategies(room) for proposer in candidates] if room else []
            strategies = [*itertools.chain.from_iterable(defaults)]
        self._proposers = {
            strategy.drafter: proposer_of(strategy, proposers, self._mixer) for strategy in strategies
        }
        self._range_of: dict[Strategy, int] = {}  # with thresholds: each has one range
        if thresholds:
            arms = arms_by_threshold(strategies, thresholds, buckets, max_batch)
            self._range_of = {arm: last for last, group in arms.items() for arm in group if arm is not None}
        else:
            arms = arms_by_batch(strategies, buckets, max_batch)
        self._bandit = BegMab(arms, epsilon, window, seed)
        self._trained = [proposer for proposer in proposers if isinstance(proposer.drafter, TrainedDrafter)]

    def begin(self, training: bool, step: int) -> None:
        self._mixer.forget()  # the bandit's window forgets by itself

    def choose(
        self, state: DecodeState, active: ActiveSlots, statistics: DecodeStatistics
    ) -> tuple[DecodeState, Choice]:
        # A drafter that is not trained yet is not an arm.
        for proposer in self._trained:
            self._bandit.set_available(proposer.name, proposer.drafter.trained)
        # Those standing by wait for this pass, too, so they share its rate.
        responses = len(active.slots) + active.standing_by
        batch = responses if self._range_of else state.batch
        arm = self._bandit.choose(batch, responses)
        _, reason, medians = self._bandit.explain(batch)
        rates = {"expected_rate": medians.get(arm, 0.0), "plain_rate": medians.get(None, 0.0)}
        if arm is None:
            return state, Choice.plain(reason, **rates)
        # Draft as the arm says; if nothing comes of it, a plain step counts as the arm's.
        proposer = self._proposers[arm.drafter]
        state, drafted = draft(proposer, arm, state, active, statistics, self._buckets)
        rates |= {"arm": arm, "draft_seconds": drafted.seconds}
        if not drafted.rows:
            return state, Choice.plain(f"{arm.drafter} had nothing to verify ({reason})", **rates)
        return state, Choice.verify(drafted.proposal, drafted.candidates, drafted.rows, reason, **rates)

    def record(self, record: PassRecord) -> None:
        seconds = record.choice.draft_seconds + record.seconds
        arm, batch = record.choice.arm, record.batch
        if self._range_of:  # a strategy's own range: fewer may run by now than when it was chosen
            batch = record.waiting if arm is None else self._range_of[arm]
        self._bandit.record(batch, arm, record.tokens, seconds, record.waiting)

    def state(self) -> dict[str, np.ndarray]:
        return self._bandit.state() | self._mixer.state()

    def load_state(self, state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return self._mixer.load_state(self._bandit.load_state(state))
