"""One speculative pass: propose, choose, verify, tell.

    propose   drafters offer trees of draft nodes for the active slots
    choose    the manager decides which of them a pass verifies, or that plain steps are faster
    verify    one forward pass samples a token at every node, and accepts the drafts that were sampled
    tell      manager, proposers and drafters learn what was accepted, and what it took

The choice decides only how much work a forward pass does, never a token. While verifying does not pay, the
drafters are asked ever more seldom.
"""

import dataclasses
import time
from collections.abc import Sequence

import numpy as np

from drafters.base import Queries
from drafters.validation import chains, usable_nodes
from rljax.engine.background import BackgroundCompiler
from rljax.engine.draft_tree import DraftTree, empty_tree, pack_rows
from rljax.engine.engine import DecodeEngine
from rljax.engine.host_sync import DecodeResult, Pending
from rljax.engine.state import DecodeState
from rljax.errors import DrafterError
from rljax.models.transformer import Params
from rljax.processes import agree
from rljax.requests import DecodeStatistics
from rljax.speculation.drafter_calls import drafter_call
from rljax.speculation.drafter_slots import DrafterSlots
from rljax.speculation.managers.manager import Manager
from rljax.speculation.pass_choice import Choice
from rljax.speculation.pass_record import DecisionLog, PassRecord, VerifiedNodes
from rljax.speculation.pass_times import DeviceClock, PassTimes
from rljax.speculation.proposals import ActiveSlots, Proposal, Proposer
from rljax.speculation.strategies import Strategy

_QUESTIONS = 4  # in vain, after which drafters are asked half as soon about new requests
_STEPS_WHILE_COMPILING = 16  # plain steps between two questions whether verifying passes are ready


@dataclasses.dataclass(frozen=True)
class VerifyingPass:
    """A verifying pass that the device is computing.

    Attributes:
      active: the slots that take part.
      shape: batch, cache length, rows.
      dispatched: when the device was given it, by `time.perf_counter`.
      host: seconds for which the device waited for the host: to hear of the last pass, to propose and choose.
      timed: whether only passes were before it, so that its time is that of a pass.
    """

    active: ActiveSlots
    tree: DraftTree
    choice: Choice
    shape: tuple[int, int, int]
    dispatched: float
    host: float
    timed: bool
    pending: Pending


class SpeculativeDecoder:
    """Decodes a batch by verifying passes and plain steps.

    Args:
      manager: has drafts made, and decides how much of them to verify.
      drafters: hear of the sampled tokens.
      times: measured times of passes, added to.
      max_batch: larger batches decode plainly.

    Attributes:
      clock: when the device works.
      draft_counts: by drafter, draft nodes of the last pass verified and accepted: int32 [n] each, in the
        order of its active slots. Empty after plain steps.
      drafted, accepted: int64 [requests], draft nodes verified for each request, and accepted.
      compiler: compiles verifying passes in the background. Shapes that are not ready decode plainly. None
        where all passes are compiled before, or when they are first used.
      wait_for: proposers without which nothing is drafted: decoding is plain until they are ready.
    """

    compiler: BackgroundCompiler | None = None
    wait_for: Sequence[Proposer] = ()

    def __init__(
        self, engine: DecodeEngine, manager: Manager, drafters: DrafterSlots, times: PassTimes, max_batch: int
    ) -> None:
        self.engine, self.manager, self.drafters = engine, manager, drafters
        self.times, self.max_batch = times, max_batch
        self.decisions, self.clock = DecisionLog(), DeviceClock()
        self._used: set[tuple[int, int, int]] = set()  # shapes of passes that have run
        self._compiling = False  # in the background, when it was asked last

    def begin(self, statistics: DecodeStatistics) -> None:
        """A rollout begins; `expect` says of how many requests."""
        self._statistics = statistics
        self._choice: Choice | None = None  # the last one
        self._in_flight: list[VerifyingPass] = []
        self.draft_counts: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self.clock.begin(statistics)

    def expect(self, requests: int) -> None:
        """So many requests are decoded from now on; drafters are asked at once again."""
        self.drafted, self.accepted = np.zeros(requests, np.int64), np.zeros(requests, np.int64)
        self._patience = 1  # plain steps until the drafters are asked again
        self._in_vain = 0  # times that they were asked since the last verifying pass
        self._plain_requests: set[int] = set()  # the requests of the last plain steps
        self._told = 0.0  # seconds that the device waited while all heard of the last pass

    def decode(
        self,
        params: Params,
        state: DecodeState,
        active: ActiveSlots,
        until_active: int,
        most_steps: int | None = None,
    ) -> tuple[DecodeState, DecodeResult]:
        """The next tokens of every active slot, by one verifying pass or a few plain steps.

        Args:
          params: the policy's weights, from `engine.load_params`.
          state: the decode state. Consumed.
          active: all slots that decode.
          until_active: plain steps end once no more than so many slots are active.
          most_steps: plain steps at most; None for the engine's `decode_steps_per_sync`.
        """
        state, in_flight = self.start(params, state, active)
        if in_flight is None:
            return self.decode_plainly(params, state, active, until_active, most_steps)
        return state, self.finish(in_flight)

    def start(
        self, params: Params, state: DecodeState, active: ActiveSlots
    ) -> tuple[DecodeState, VerifyingPass | None]:
        """Begins a verifying pass; None where plain decoding is expected to be faster.

        Another pass, over other slots, may be in progress. Arguments as of `decode`.
        """
        if not self._is_ready(state):
            self._choice = None
            return state, None
        start, draft_seconds = time.perf_counter(), self._statistics.draft_seconds
        timed = self._only_passes_before(state)
        # Propose and choose. The manager asks drafters for as long as more is to be expected of it.
        state, choice = self.manager.choose(state, active, self._statistics)
        draft_seconds = self._statistics.draft_seconds - draft_seconds
        if draft_seconds > 0:
            self.clock.finished()  # the host has waited for drafts from the device
        self._choice, in_flight = choice, None
        # Verify: the device gets a pass over the likeliest candidates, `finish` waits for it.
        if choice.rows:
            shape = (state.batch, state.cache.length, choice.rows)
            # The nodes that go into the pass, at the slots of the state.
            nodes = dict(self.engine.buckets.passes(state.batch))[choice.rows]
            taken = choice.candidates.take(choice.rows, nodes)[:, :nodes]
            tree = empty_tree(state.batch, nodes)
            tree.tokens[active.slots] = np.where(taken, choice.proposal.tokens[:, :nodes], 0)
            tree.parents[active.slots] = np.where(taken, choice.proposal.parents[:, :nodes], -1)
            tree.valid[active.slots] = taken
            # One row for every node and every slot's last token.
            rows = pack_rows(tree, active.slots, choice.rows)
            state, pending = self.engine.verify(params, state, tree, rows)
            self.drafters.draft_ahead(active.slots)
            self.clock.dispatched(self.times.verify(*shape))
            dispatched = time.perf_counter()
            host = 0.0 if self._in_flight else self._told + dispatched - (start + draft_seconds)
            in_flight = VerifyingPass(active, tree, choice, shape, dispatched, host, timed, pending)
            self._in_flight.append(in_flight)
        elif self._in_flight and (choice.draft_seconds or choice.events):
            # No plain step follows while other slots are verified.
            self.decisions.add(PassRecord(choice, state.batch, len(active.slots), tokens=0, seconds=0.0))
        self._statistics.host_seconds += time.perf_counter() - start - draft_seconds
        return state, in_flight

    def finish(self, in_flight: VerifyingPass) -> DecodeResult:
        """Waits for the pass that was started first, and tells everybody what it brought."""
        result, seconds = self._wait(in_flight)
        start = time.perf_counter()
        self._patience, self._in_vain = 1, 0
        self._tell(in_flight, result, seconds)
        told = time.perf_counter() - start
        self._told = 0.0 if self._in_flight else told
        self._statistics.host_seconds += told
        return result

    def _wait(self, in_flight: VerifyingPass) -> tuple[DecodeResult, float]:
        """The result of a pass and its seconds: measured if the host saw its end, else estimated."""
        was_over = in_flight.pending.is_ready()
        result = in_flight.pending.result()
        self._in_flight.remove(in_flight)
        seconds, timed = self.times.verify(*in_flight.shape), False
        if not was_over:
            last_end = self.clock.last_end
            now = self.clock.finished(sum(self.times.verify(*other.shape) for other in self._in_flight))
            seconds, timed = now - max(in_flight.dispatched, last_end), in_flight.timed
        seconds, host, timed = agree(seconds, in_flight.host, timed)
        # The first run of a program takes longer, and an untried pass would seem too slow for good.
        timed = timed and (in_flight.shape in self._used or self.times.has_verify(*in_flight.shape))
        self.times.add_verify(*in_flight.shape, seconds + host if timed else None)
        self._used.add(in_flight.shape)
        self._statistics.device_seconds += seconds
        return result, seconds

    def _tell(self, in_flight: VerifyingPass, result: DecodeResult, seconds: float) -> None:
        """Tells proposers, manager, log, statistics and drafters which drafts were accepted."""
        active, choice = in_flight.active, in_flight.choice
        nodes = VerifiedNodes.from_result(result, in_flight.tree, active.slots)
        choice.proposal.record_outcome(nodes.verified, nodes.correct)
        self.draft_counts = choice.proposal.counts(nodes.verified, nodes.accepted)
        drafted, kept = nodes.verified.sum(axis=1), nodes.accepted.sum(axis=1)
        self.drafted[active.requests] += drafted
        self.accepted[active.requests] += kept
        statistics = self._statistics
        statistics.verified += 1
        statistics.verified_slots += len(active.slots)
        statistics.verified_rows += result.rows
        statistics.drafted += int(drafted.sum())
        statistics.accepted += int(kept.sum())
        verified, accepted = nodes.by_depth(choice.proposal.levels)
        record = PassRecord(
            choice,
            batch=in_flight.shape[0],
            responses=len(active.slots),
            tokens=int((result.tokens[active.slots] >= 0).sum()),
            seconds=seconds,
            inactive=active.inactive,
            requests=active.requests,
            nodes=nodes,
            verified_by_depth=verified,
            accepted_by_depth=accepted,
        )
        self.manager.record(record)
        self.decisions.add(record)
        self.drafters.advance(result)

    def decode_plainly(
        self,
        params: Params,
        state: DecodeState,
        active: ActiveSlots,
        until_active: int,
        most_steps: int | None = None,
    ) -> tuple[DecodeState, DecodeResult]:
        """A few plain steps of all slots: twice as many every time in a row, until new requests come. A call
        of few steps costs more a step, so these begin with more where drafters were asked in vain before, and
        a time that is old is measured in a call of the most.

        Arguments as of `decode`.
        """
        longest, may_verify = self.engine.decode_steps_per_sync, self._may_verify(state.batch)
        waits = may_verify and not self._is_ready(state)
        most = longest if most_steps is None else most_steps
        # New requests: drafters are asked again soon.
        requests = set(active.requests.tolist())
        if not requests <= self._plain_requests:
            self._patience = min(2 ** (self._in_vain // _QUESTIONS), longest)
        self._plain_requests = requests
        # Decode until the drafters are asked again, or for as long as the host allows.
        timed = may_verify and self._only_passes_before(state)
        start = self.clock.dispatched()
        steps = most
        if may_verify and not self.times.plain_is_old(state.batch, state.cache.length):
            steps = min(_STEPS_WHILE_COMPILING if waits else self._patience, most)
        state, result = self.engine.generate(params, state, steps, until_active)
        seconds, timed = agree(self.clock.finished() - start, timed)
        # Tell. Plain decoding would not have ended this early: its steps are measured in longer calls.
        cut = result.steps == steps < most
        if timed and not (cut and self.times.has_plain(state.batch, state.cache.length)):
            passes = result.rows // state.batch  # a fixed loop computes more than `result.steps`
            self.times.add_plain(state.batch, state.cache.length, seconds / max(passes, 1))
        self._statistics.device_seconds += seconds
        if may_verify and self._choice is not None:
            self._in_vain += 1
            tokens = int((result.tokens >= 0).sum())
            record = PassRecord(self._choice, state.batch, len(active.slots), tokens, seconds)
            self.manager.record(record)
            self.decisions.add(record)
        self.draft_counts = {}
        self.drafters.advance(result)
        if not waits:
            self._patience = min(2 * self._patience, longest)
        return state, result

    def _may_verify(self, batch: int) -> bool:
        """Whether some compiled pass verifies drafts of a batch."""
        return batch <= self.max_batch and bool(self.engine.buckets.passes(batch))

    def _is_ready(self, state: DecodeState) -> bool:
        """Whether a batch may be verified now: its passes are compiled, and its plain step was measured."""
        shape = (state.batch, state.cache.length)
        if self.compiler is None:
            return self._may_verify(state.batch)
        if not self._may_verify(state.batch):
            self.compiler.near = shape
            return False
        ready = self.compiler.is_ready(shape)
        # Compiling slows everything down, unevenly: measure again when it is over.
        compiling = self.compiler.thread.busy
        if self._compiling and not compiling:
            self.times.forget_passes(drafts=True)
        self._compiling = compiling
        # A pass that is too large may have been left out just now.
        ready &= all(proposer.is_ready(shape) for proposer in self.wait_for)
        return ready and self._may_verify(state.batch) and self.times.has_plain(*shape)

    def _only_passes_before(self, state: DecodeState) -> bool:
        """Whether the device need not prefill, insert or move anything first."""
        return bool(self._in_flight) or state.lengths.is_ready()


class HostProposer(Proposer):
    """A `Proposer` for a drafter on the host, which compiles nothing and does not read the policy."""

    on_host = True

    def expected_rate(self, shape: tuple[int, int], active: ActiveSlots) -> float:
        return float("inf")

    def propose(
        self,
        state: DecodeState,
        active: ActiveSlots,
        statistics: DecodeStatistics,
        strategy: Strategy | None = None,
    ) -> tuple[DecodeState, Proposal]:
        # Ask for as many nodes as a pass verifies of one slot.
        width = self._engine.buckets.max_drafts
        budgets = np.full(len(active.slots), width, np.int32)
        queries = Queries(active.requests, active.positions, budgets, width)
        with drafter_call(self.name, "propose"):
            drafts = self.drafter.propose(queries)
        # Leave out invalid nodes, and count them.
        try:
            usable = usable_nodes(drafts, queries, self._engine.config.vocab_size)
        except ValueError as error:
            raise DrafterError(
                f"speculation.drafter {self.name}: propose returned no drafts: {error}"
            ) from error
        returned = np.arange(width) < np.minimum(drafts.counts, budgets)[:, None]
        statistics.unusable += int(returned.sum() - usable.sum())
        if self._engine.verification == "rejection":
            drafts, usable = chains(drafts, usable)
        return state, self._calibrated(drafts, usable)
