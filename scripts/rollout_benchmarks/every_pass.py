"""Drafting at every turn, whatever is predicted to pay: passes of all sizes, and all drafters."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

from rljax.config import SpeculationConfig
from rljax.engine.buckets import Buckets
from rljax.speculation.device_proposers import SelfProposer
from rljax.speculation.managers.expected import ExpectedManager
from rljax.speculation.managers.selection import StrategyChoice
from rljax.speculation.pass_choice import Candidates
from rljax.speculation.pass_times import PassTimes
from rljax.speculation.speculator import Speculator

_ALWAYS = 1e9  # predicted tokens per second above any other prediction


class EveryPass:
    """Chooses passes of all sizes in turn, with occasional plain steps."""

    def __init__(self) -> None:
        self.turns = itertools.count()

    def __call__(
        self, candidates: Candidates, buckets: Buckets, times: PassTimes, batch: int, length: int
    ) -> int:
        sizes = [rows for rows, _ in buckets.passes(batch) if rows > len(candidates.current)]
        return [*sizes, 0][next(self.turns) % (len(sizes) + 1)]

    def choice(self, mix: bool = False) -> StrategyChoice:
        """The default manager with these passes; see `speculation.mix`."""
        keys = SpeculationConfig.model_construct(mix=mix)
        return StrategyChoice(keys, make=functools.partial(ExpectedManager, choose_rows=self))


def take_turns(speculator: Speculator, every_pass: EveryPass, alone: bool) -> None:
    """Makes a speculator ask all drafters whatever their prediction, in turn or together, for chains of all
    lengths.
    """
    turns, number_of = itertools.count(), len(speculator.proposers)
    for number, proposer in enumerate(speculator.proposers):
        if isinstance(proposer, SelfProposer):
            most = speculator.engine.buckets.max_drafts
            proposer.choose_length = lambda *_, most=most: (1 + next(every_pass.turns) % most, _ALWAYS)
        promise = proposer.promise

        def asked(*of: Any, number: int = number, promise: Callable[..., float] = promise) -> float:
            promise(*of)  # chooses the strategy
            return 0.0 if alone and next(turns) // number_of % number_of != number else _ALWAYS

        proposer.promise = asked
