"""From the configuration to a manager."""

import dataclasses
import pkgutil
from collections.abc import Callable, Sequence

from rljax.config.speculation import POLICIES, SpeculationConfig
from rljax.config.speculation_keys import SpeculationKeys
from rljax.engine.buckets import Buckets
from rljax.engine.engine import DecodeEngine
from rljax.speculation.managers.manager import Manager, Setup
from rljax.speculation.pass_times import PassTimes
from rljax.speculation.proposals import Proposer


@dataclasses.dataclass(frozen=True)
class StrategyChoice:
    """A manager that is yet to be made.

    Attributes:
      engine: the decode engine; None for managers that read nothing of it.
      make: makes the manager; None for the class that `POLICIES` has for the keys.
    """

    config: SpeculationKeys = dataclasses.field(default_factory=SpeculationConfig)
    seed: int = 0
    engine: DecodeEngine | None = None
    make: Callable[[Setup, SpeculationKeys], Manager] | None = None

    @property
    def by(self) -> str:
        """The name of the policy."""
        return self.config.policy

    def manager(
        self, proposers: Sequence[Proposer], buckets: Buckets, times: PassTimes, max_batch: int
    ) -> Manager:
        """The manager of these drafters.

        Raises:
          ConfigError: invalid strategies, or drafters that do not fit the policy.
        """
        make = self.make or pkgutil.resolve_name(POLICIES[self.by].manager)
        return make(Setup(proposers, buckets, times, max_batch, self.seed, self.engine), self.config)


EXPECTED = StrategyChoice()
