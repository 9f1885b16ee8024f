"""One strategy, always, as the papers' always-on baselines do."""

from rljax.config.speculation_keys import SpeculationKeys
from rljax.engine.state import DecodeState
from rljax.requests import DecodeStatistics
from rljax.speculation.managers.drafting import draft, strategies_of, verify_all
from rljax.speculation.managers.manager import Manager, Setup
from rljax.speculation.mixing import Mixer, proposer_of
from rljax.speculation.pass_choice import Choice
from rljax.speculation.proposals import ActiveSlots


class FixedManager(Manager):
    """Uses one strategy before every pass, whether it pays or not.

    Args:
      setup: drafters, sizes and times; these for the expectations in the log.
      config: the keys. `strategies` has the one.
    """

    def __init__(self, setup: Setup, config: SpeculationKeys) -> None:
        (self._strategy,) = strategies_of(setup, config)
        mixer = Mixer(setup.proposers, setup.buckets.max_drafts)
        self._proposer = proposer_of(self._strategy, setup.proposers, mixer)
        self._buckets, self._times = setup.buckets, setup.times

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
