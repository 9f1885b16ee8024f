"""The drafters of a run with all that they need, and what remains of them between rollouts.

The pass is in `speculative_pass.py`. `rljax/rollout/slots.py` calls it, and tells drafters what happens in a
rollout: requests join, slots are filled and moved, tokens are kept.
"""

from collections.abc import Mapping, Sequence
from typing import Self

import numpy as np

from drafters.base import Drafter, Outcome
from rljax.engine.background import CompilerThread
from rljax.engine.engine import DecodeEngine
from rljax.engine.shapes import Shapes
from rljax.models.transformer import Params
from rljax.requests import Completion, DecodeStatistics, Request
from rljax.response_lengths import ResponseLengths
from rljax.speculation.ahead_proposer import AheadProposer
from rljax.speculation.device_proposers import DeviceProposer, SelfProposer
from rljax.speculation.drafter_calls import drafter_call
from rljax.speculation.drafter_slots import DrafterSlots
from rljax.speculation.idle_requests import IdleRequests
from rljax.speculation.managers.selection import EXPECTED, StrategyChoice
from rljax.speculation.metrics import speculation_metrics
from rljax.speculation.pass_times import PassTimes
from rljax.speculation.proposals import Proposer
from rljax.speculation.saved_state import drafter_states, drafter_weights, load_drafter_states
from rljax.speculation.speculative_pass import HostProposer, SpeculativeDecoder
from rljax.speculation.warm_up import warm_up, warm_up_in_background


class Speculator:
    """Decodes with drafters. `NoDrafts` (`no_drafts.py`) stands in its place where there are none.

    Args:
      drafters: by name.
      max_batch: larger batch buckets decode plainly; no program is compiled to verify them.
      idle: what idle slots decode besides the requests of a rollout; None for nothing.
      times: measured times of passes, added to; speculators of the same engine may share them.
      strategies: choice of the manager, and of its strategies.

    Attributes:
      decoder: decodes by verifying passes and plain steps.
      drafters: by name.
      slots: the drafters, as they hear of requests and slots.
      training: of drafters that are trained, by the drafter's name.
      proposers: the drafters as the manager asks them.
      manager: decides how much a pass verifies.
      lengths: lengths of the responses so far, by prompt.
      keeps_lengths: whether `state` has them.
      has_history: whether some drafter drafts from other responses to a prompt.
    """

    keeps_lengths = True

    def __init__(
        self,
        engine: DecodeEngine,
        drafters: Mapping[str, Drafter],
        max_batch: int,
        idle: IdleRequests | None = None,
        times: PassTimes | None = None,
        strategies: StrategyChoice = EXPECTED,
    ) -> None:
        self.engine, self.max_batch, self.idle = engine, max_batch, idle or IdleRequests()
        self.lengths = ResponseLengths()
        self._times, self._strategies = PassTimes() if times is None else times, strategies
        drafters = self.idle.drafting(drafters, self.lengths)
        self.drafters, self.slots = drafters, DrafterSlots(drafters, engine)
        self.training = {
            name: drafter.training for name, drafter in drafters.items() if drafter.training is not None
        }
        self.has_history = any(drafter.on_host for drafter in drafters.values())
        self.proposers = [self._proposer(name, drafter) for name, drafter in drafters.items()]
        self.manager = strategies.manager(self.proposers, engine.buckets, self._times, max_batch)
        self.decoder = SpeculativeDecoder(engine, self.manager, self.slots, self._times, max_batch)
        if strategies.by != "expected":  # a bandit would take drafters that are not ready for bad ones
            self.decoder.wait_for = self.proposers
        self.decisions = self.decoder.decisions
        self._state_of_others: dict[str, np.ndarray] = {}  # in checkpoints, for other drafters than these

    def _proposer(self, name: str, drafter: Drafter) -> Proposer:
        if drafter.on_host:
            return HostProposer(name, drafter, self.engine)
        if drafter.policy_weights is not None:
            return SelfProposer(name, drafter, self.engine, self._times)
        kind = DeviceProposer if self.slots.on_device[name].ahead is None else AheadProposer
        return kind(name, drafter, self.engine, self._times, self.slots)

    def prefer(self, name: str | None) -> None:
        """Drafts with one drafter alone from now on; None leaves the choice to the manager again."""
        self.decoder.manager = self.manager
        for proposer in self.proposers:
            if proposer.name == name:
                choice = self._strategies if proposer.keeps_choice else EXPECTED
                self.decoder.manager = choice.manager(
                    [proposer], self.engine.buckets, self._times, self.max_batch
                )

    # -- training of drafters --------------------------------------------------------------------------------

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        """Tells drafters the rewarded responses of a training rollout."""
        self.slots.call_all("learn", outcomes)
        for outcome in outcomes:
            self.lengths.learn(outcome.prompt_ids, len(outcome.response_ids))

    def learn_lengths(self, requests: Sequence[Request], completions: Sequence[Completion]) -> None:
        """Does nothing: `learn` learns them, of training rollouts alone, and checkpoints keep them. They
        decide the order of the requests, and so the tokens that drafts come from.
        """

    # -- other processes -------------------------------------------------------------------------------------

    def read(
        self, params: Params, responses: Sequence[tuple[Sequence[int], np.ndarray]], seconds: float
    ) -> None:
        """Lets drafters that are trained here for others read responses that other processes have decoded;
        arguments as of `SharedTraining.read`. `learn` follows.
        """
        for name, training in self.training.items():
            with drafter_call(name, "read"):
                training.shared.read(params, responses, seconds)

    def freeze(self) -> None:
        """Before the first rollout: drafters are neither trained nor saved here."""
        for name, training in self.training.items():
            with drafter_call(name, "freeze"):
                training.freeze()

    def weights(self) -> dict[str, np.ndarray]:
        """Returns the newest weights of drafters that are trained here, for frozen ones elsewhere, and what
        idle slots have decoded.
        """
        return drafter_weights(self.drafters) | self.idle.state()

    def load_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        """Loads `weights`, which the next rollout drafts with."""
        load_drafter_states(self.drafters, self.idle.load_state(weights))

    # -- a run -----------------------------------------------------------------------------------------------

    def warm_up(
        self,
        params: Params,
        prompt_length: int = 1,
        widens: bool = False,
        slots: int | None = None,
        longest: int | None = None,
    ) -> None:
        """Compiles every program that drafts and verifies, and measures the time of each.

        Args:
          params: weights from `engine.load_params`.
          prompt_length: the longest prompt, in tokens.
          widens: compile what `widen` needs, too.
          slots: requests decoded at a time, at most; None for the largest batch bucket.
          longest: the most tokens of a prompt and its response; None for the largest cache bucket.
        """
        shapes = self._shapes(slots, prompt_length, longest, widens, ())
        warm_up(self.engine, params, self.proposers, self.slots, self._times, shapes)

    def _shapes(
        self, slots: int | None, prompt_length: int, longest: int | None, widens: bool, first: Sequence[int]
    ) -> Shapes:
        """Returns the shapes that drafters follow; arguments as of `warm_up_in_background`."""
        return Shapes(
            self.engine.buckets,
            self.engine.buckets.batch[-1] if slots is None else slots,
            prompt_length,
            longest,
            self.max_batch,
            first,
            late_inserts=widens or self.idle.late_inserts,
            widens=widens,
        )

    def warm_up_in_background(
        self,
        params: Params,
        slots: int,
        prompt_length: int = 1,
        widens: bool = False,
        first_prompts: Sequence[int] = (),
        longest: int | None = None,
        thread: CompilerThread | None = None,
    ) -> None:
        """Compiles every program that drafts or verifies in a thread, which `close` ends.

        Args as of `warm_up`, and:
          first_prompts: lengths of the first prompts; the passes that they use come first.
          thread: the thread to compile in; None for one of its own.
        """
        self.close()
        shapes = self._shapes(slots, prompt_length, longest, widens, first_prompts)
        self.decoder.compiler = warm_up_in_background(
            self.engine, params, self.proposers, self.slots, shapes, thread
        )

    @property
    def compiling(self) -> int:
        """Number of decode-state shapes whose verifying passes are still compiled in the background."""
        return 0 if self.decoder.compiler is None else self.decoder.compiler.left

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the compilation in the background. Shapes that are not ready go on without verification."""
        if self.decoder.compiler is not None:
            self.decoder.compiler.close()

    def metrics(self, statistics: DecodeStatistics) -> dict[str, float]:
        """Metrics of speculation in the rollouts of `statistics`, with those that drafters report."""
        metrics = speculation_metrics(statistics, self.drafters, self.idle)
        if self.decoder.compiler is not None:
            pool = self.engine.pool
            metrics["engine/compiled_in_background"] = pool.background_programs
            metrics["time/compiled_in_background"] = pool.background_seconds
        return metrics

    def state(self, to_share: bool = False) -> dict[str, np.ndarray]:
        """Checkpoint content: drafters, acceptance of their drafts, the manager's, and response lengths.

        Args:
          to_share: for another process, see `drafter_states`.
        """
        state = self._state_of_others | self.idle.state() | drafter_states(self.drafters, to_share)
        for proposer in self.proposers:
            state |= proposer.state()
        return state | self.manager.state() | self.lengths.state()

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        """Restores `state`. A drafter that the checkpoint does not have starts empty; the state of drafters
        that this run does not have is kept for later checkpoints.
        """
        state = self.manager.load_state(self.lengths.load_state(state))
        for proposer in self.proposers:
            state = proposer.load_state(state)
        state = load_drafter_states(self.drafters, self.idle.load_state(state))
        self._state_of_others = {key: array for key, array in state.items() if "/" in key}
