"""From the configuration to a manager."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from drafters.mixed import MOST_DRAFTERS
from rljax.config.decoding import DecodingMode, SpeculationConfig, ToggleConfig
from rljax.engine.buckets import Buckets
from rljax.errors import ConfigError
from rljax.speculation.device_proposers import DeviceProposer, SelfProposer
from rljax.speculation.managers.expected import ExpectedManager
from rljax.speculation.managers.fixed import FixedManager
from rljax.speculation.managers.manager import Manager
from rljax.speculation.managers.papers.bandit_manager import BanditManager
from rljax.speculation.managers.papers.decoupled_manager import DecoupledManager
from rljax.speculation.managers.papers.draft_length_schedule import DraftLengthSchedule
from rljax.speculation.managers.papers.ladder_manager import LadderManager
from rljax.speculation.managers.papers.roofline import Roofline
from rljax.speculation.managers.papers.roofline_manager import RooflineManager, drafting_seconds
from rljax.speculation.managers.papers.toggle import Toggle
from rljax.speculation.pass_choice import RowsChoice, best_rows
from rljax.speculation.pass_times import PassTimes
from rljax.speculation.proposals import Proposer
from rljax.speculation.strategies import Strategy, parse_strategies


@dataclasses.dataclass(frozen=True)
class StrategyChoice:
    """A kind of manager, and its settings.

    Attributes:
      by: "expected", "bandit", "roofline", "ladder", "fixed" or "decoupled".
      mix: see `ExpectedManager` and `BanditManager`.
      strategies: see `BanditManager`; the only one of `FixedManager`.
      epsilon, window, seed, thresholds: see `BanditManager`.
      roofline: fitted constants, for `RooflineManager`.
      toggle: settings of `RooflineManager`.
      modes: ways to decode that `DecoupledManager` chooses among.
      choose_rows: function by which `ExpectedManager` chooses the rows of a pass; None for `best_rows`.
    """

    by: Literal["expected", "bandit", "roofline", "ladder", "fixed", "decoupled"] = "expected"
    mix: bool = False
    strategies: tuple[Strategy, ...] = ()
    epsilon: float = 0.1
    window: int = 32
    seed: int = 0
    roofline: Roofline | None = None
    toggle: ToggleConfig = dataclasses.field(default_factory=ToggleConfig)
    choose_rows: RowsChoice | None = None
    thresholds: tuple[int, ...] = ()
    modes: tuple[DecodingMode, ...] = ()

    def manager(
        self, proposers: Sequence[Proposer], buckets: Buckets, times: PassTimes, max_batch: int
    ) -> Manager:
        """The manager of these drafters.

        Raises:
          ConfigError: a strategy that its drafter cannot draft, or more drafters than one tree can have.
        """
        if len(proposers) > MOST_DRAFTERS and (self.mix or self.by == "ladder"):
            raise ConfigError(
                f"speculation.others: {len(proposers)} drafters, and a tree holds drafts of at most"
                f" {MOST_DRAFTERS}; leave some out, or use speculation.choice: expected alone"
            )
        _check_offered(self.strategies, proposers, buckets.max_drafts)
        if self.by == "expected":
            return ExpectedManager(proposers, buckets, times, self.mix, self.choose_rows or best_rows)
        if self.by == "roofline":
            (proposer,) = proposers
            settings = self.toggle
            lengths = [length for length in settings.lengths if length <= buckets.max_drafts]
            schedule = DraftLengthSchedule(
                lengths or [buckets.max_drafts],
                settings.first,
                settings.alpha_up,
                settings.alpha_down,
                settings.patience,
            )
            drafting = drafting_seconds(proposer, times)
            toggle = Toggle(self.roofline, schedule.length, settings.margin, buckets, drafting)
            return RooflineManager(proposer, buckets, times, toggle, schedule)
        if self.by == "decoupled":
            (proposer,) = proposers
            return DecoupledManager(proposer, buckets, times, self.modes)
        if self.by == "fixed":
            (strategy,) = self.strategies
            return FixedManager(proposers, buckets, times, strategy)
        if self.by == "ladder":
            return LadderManager(proposers, buckets, times, max_batch)
        chances = (self.epsilon, self.window, self.seed)
        return BanditManager(
            proposers,
            buckets,
            self.strategies,
            max_batch,
            *chances,
            mix=self.mix,
            thresholds=self.thresholds,
        )


def _check_offered(strategies: Sequence[Strategy], proposers: Sequence[Proposer], max_drafts: int) -> None:
    """Raises a ConfigError for a strategy that its drafter cannot draft; those on the host can draft all."""
    for proposer in proposers:
        named = [strategy for strategy in strategies if proposer.name in strategy.drafters]
        if isinstance(proposer, SelfProposer):
            for strategy in named:
                if strategy.depth > max_drafts or strategy.top_k > 1:
                    raise ConfigError(
                        f"speculation.strategies: {strategy}: {proposer.name} drafts chains, of up to"
                        f" speculation.max_drafts {max_drafts} tokens; give it top_k 1 and no more depth"
                    )
        elif isinstance(proposer, DeviceProposer):
            offered = [(tree.depth, tree.top_k) for tree in proposer.drafter.strategies]
            for strategy in named:
                if (strategy.depth, strategy.top_k) not in offered:
                    trees = ", ".join(f"{depth}/{top_k}" for depth, top_k in offered)
                    raise ConfigError(
                        f"speculation.strategies: {strategy}: {proposer.name} is set up for trees of"
                        f" depth/top_k {trees}; see its arguments"
                    )


EXPECTED = StrategyChoice()


def strategy_choice(config: SpeculationConfig, seed: int, roofline: Roofline | None = None) -> StrategyChoice:
    """The manager's settings from a config section.

    Raises:
      ConfigError: invalid strategies.
    """
    strategies = parse_strategies(config.strategies, config.drafters, config.max_drafts)
    bandit = (config.epsilon, config.window, seed)
    return StrategyChoice(
        "decoupled" if config.decoupled.window else config.choice,
        config.mix,
        strategies,
        *bandit,
        roofline,
        config.toggle,
        thresholds=config.batch_thresholds,
        modes=config.decoupled.modes,
    )
