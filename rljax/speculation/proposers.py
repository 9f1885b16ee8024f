"""Where candidates for a verifying pass come from: one proposer for each kind of drafter.

    HostProposer      asks a drafter on the host, which costs next to nothing
    SelfProposer      lets other weights of the policy draft chains on the target's own cache
    DeviceProposer    lets a drafter with slots of its own on the device draft trees

What costs time is promised before it is drafted (`promise`), from what was accepted so far and from what
drafting and passes took; what came of it is credited afterwards (`credit`). What was accepted goes into
checkpoints; times do not: the machine that goes on may be another one, or busier, and warming up takes them.
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from drafters.base import Drafter, Drafts, Queries
from drafters.device import DeviceDrafter, SelfDrafter
from drafters.validation import ProtocolError, chains, usable_nodes
from rljax.engine.engine import DecodeEngine
from rljax.engine.self_drafting import margin_log_probability
from rljax.engine.state import DecodeState
from rljax.errors import DrafterError, UserError
from rljax.models.transformer import Params
from rljax.rollout.records import DecodeStatistics
from rljax.speculation.draft_length import (
    DRAFT_STEP,
    ChainAcceptance,
    WorthStarting,
    best_length,
    best_strategy,
)
from rljax.speculation.pass_choice import NodeCalibration, PassTimes, plain_rate, time_drafts, time_trees
from rljax.speculation.strategies import Strategy

_MOST_OF_AN_ERROR = 300  # characters of what a drafter raised that its message shows
_HOST_NODES = (3, 7, 15, 31)  # of a slot, that a bandit chooses from; and steps of chains
_CHAIN_LENGTHS = (2, 4, 8)


@dataclasses.dataclass(frozen=True)
class ActiveSlots:
    """The slots with a request.

    Attributes:
      slots: int32 [n].
      requests: int32 [n], which request each decodes.
      positions: int32 [n], where its next token will stand.
      wanted: bool [n], False for requests that are only sampled ahead.
      standing_by: how many other slots with a wanted request there are.
    """

    slots: np.ndarray
    requests: np.ndarray
    positions: np.ndarray
    wanted: np.ndarray
    standing_by: int = 0


@dataclasses.dataclass(frozen=True)
class Proposal:
    """What one drafter offers n slots: N nodes each, the most promising first.

    Attributes:
      proposer: whose they are.
      tokens, parents: int32 [n, N], as in `Drafts`.
      usable: bool [n, N], which of them are nodes.
      probability: float [n, N], of being accepted with all ancestors, as often as such nodes were so far.
      bins: int [n, N], of the drafter's calibration.
      seconds: that the device spent on it.
    """

    proposer: "Proposer"
    tokens: np.ndarray
    parents: np.ndarray
    usable: np.ndarray
    probability: np.ndarray
    bins: np.ndarray
    seconds: float

    @property
    def name(self) -> str:
        """Of the drafter."""
        return self.proposer.name

    @functools.cached_property
    def _parents_of_nodes(self) -> np.ndarray:
        """As `parents`; -1 for what is no node, which may have any there."""
        return np.where(self.usable, self.parents, -1)

    @functools.cached_property
    def levels(self) -> np.ndarray:
        """Of each node in its tree, 1 for children of the last sampled token: int [n, N]; of others 1."""
        parents = self._parents_of_nodes
        levels, rows = np.ones(parents.shape, np.int64), np.arange(len(parents))
        for column in range(parents.shape[1]):  # parents stand before their children
            parent = parents[:, column]
            levels[:, column] = np.where(parent < 0, 1, levels[rows, np.maximum(parent, 0)] + 1)
        return levels

    def within(self, strategy: Strategy) -> np.ndarray:
        """The nodes that a strategy verifies, bool [n, N]: as deep, with as many children, and as many."""
        kept, rows = self.usable & (self.levels <= strategy.depth), np.arange(len(self.usable))
        parents = self._parents_of_nodes
        for column in range(kept.shape[1]):  # parents stand before their children
            parent = parents[:, column]
            older = (parents[:, :column] == parent[:, None]) & kept[:, :column]
            above = (parent < 0) | kept[rows, np.maximum(parent, 0)]
            kept[:, column] &= above & (older.sum(axis=1) < strategy.top_k)
        return kept & (np.cumsum(kept, axis=1) <= strategy.nodes)

    def judged(self, verified: np.ndarray, accepted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of each slot the levels that were judged, those whose level above was accepted and that had a
        verified node; and how many of them were accepted: int [n] each. Arguments as of `credit`.
        """
        offered = np.where(verified, self.levels[:, : verified.shape[1]], 0).max(axis=1, initial=0)
        taken = accepted.sum(axis=1)
        return np.minimum(taken + 1, offered), taken

    def credit(self, verified: np.ndarray, accepted: np.ndarray) -> None:
        """Which of the nodes were verified, and which of these accepted: bool [n, up to N]."""
        self.proposer.credit(self, verified, accepted)

    def counts(self, verified: np.ndarray, accepted: np.ndarray) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """By drafter, how many of its nodes each slot verified, and accepted: int32 [n] each. Arguments as of
        `credit`.
        """
        return {self.name: (verified.sum(axis=1, dtype=np.int32), accepted.sum(axis=1, dtype=np.int32))}


class Proposer(Protocol):
    """A drafter as the speculator uses it.

    Attributes:
      name: of the drafter.
      drafter: itself.
    """

    name: str
    drafter: Drafter

    def refresh(self, params: Params) -> None:
        """A rollout with these weights begins."""

    def warm_up(self, params: Params, batch: int, length: int, repeats: int) -> None:
        """Compiles what drafting over this shape of a state needs, and takes its time."""

    def forget(self) -> None:
        """What was accepted before weighs less: the policy has moved."""

    def promise(self, shape: tuple[int, int], active: ActiveSlots) -> float:
        """Wanted tokens per second that drafting may bring; infinite where asking costs nothing."""

    def default_strategies(self, room: int) -> list[Strategy]:
        """What a bandit may choose from, with up to `room` draft nodes of a slot."""

    def propose(
        self,
        state: DecodeState,
        active: ActiveSlots,
        statistics: DecodeStatistics,
        strategy: Strategy | None = None,
    ) -> tuple[DecodeState, Proposal]:
        """Candidates for the active slots. Consumes `state`.

        Args:
          state: what is decoded.
          active: the slots that want drafts.
          statistics: of the rollout.
          strategy: how to draft; None for what was promised last.
        """

    def credit(self, proposal: Proposal, verified: np.ndarray, accepted: np.ndarray) -> None:
        """Which of the nodes of its proposal were verified, and which of these accepted; as there."""

    def state(self) -> dict[str, np.ndarray]:
        """What a checkpoint keeps: what was accepted so far. Names hold no slash."""

    def load_state(self, state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Takes up its own part of what `state` returned, and returns the rest."""


def make_proposer(name: str, drafter: Drafter, engine: DecodeEngine, times: PassTimes) -> Proposer:
    """The proposer for this kind of drafter."""
    if isinstance(drafter, SelfDrafter):
        return SelfProposer(name, drafter, engine, times)
    if isinstance(drafter, DeviceDrafter):
        return DeviceProposer(name, drafter, engine, times)
    return HostProposer(name, drafter, engine)


def ask(name: str, drafter: Drafter, method: str, *arguments: Any) -> Any:
    """Calls a drafter; what it raises becomes one line that names it."""
    try:
        return getattr(drafter, method)(*arguments)
    except UserError:
        raise
    except ProtocolError as error:
        raise DrafterError(f"speculation.drafter {name}: {method} returned {error}") from error
    except Exception as error:
        said = " ".join(repr(error).split())[:_MOST_OF_AN_ERROR]
        raise DrafterError(f"speculation.drafter {name}: {method} raised {said}") from error


def ask_for(name: str, drafter: Drafter, method: str, check: Callable[[Any], Any]) -> Any:
    """As `ask`, and what comes back is checked."""
    found = ask(name, drafter, method)
    try:
        return check(found)
    except ProtocolError as error:
        raise DrafterError(f"speculation.drafter {name}: {method} returned {error}") from error


class HostProposer:
    """Trees from a drafter on the host.

    Args:
      name: of the drafter, for messages.
      drafter: what proposes.
      engine: the decode engine.
    """

    def __init__(self, name: str, drafter: Drafter, engine: DecodeEngine) -> None:
        self.name, self.drafter, self._engine = name, drafter, engine
        self._calibration = NodeCalibration()

    def refresh(self, params: Params) -> None:
        """It does not read the policy."""

    def warm_up(self, params: Params, batch: int, length: int, repeats: int) -> None:
        """Nothing to compile."""

    def forget(self) -> None:
        self._calibration.forget()

    def promise(self, shape: tuple[int, int], active: ActiveSlots) -> float:
        return float("inf")

    def default_strategies(self, room: int) -> list[Strategy]:
        sizes = sorted({min(size, room) for size in _HOST_NODES})
        return [Strategy(self.name, nodes, nodes, nodes) for nodes in sizes]  # trees of any shape

    def propose(
        self,
        state: DecodeState,
        active: ActiveSlots,
        statistics: DecodeStatistics,
        strategy: Strategy | None = None,
    ) -> tuple[DecodeState, Proposal]:
        width = self._engine.buckets.max_drafts
        budgets = np.full(len(active.slots), width, np.int32)
        queries = Queries(active.requests, active.positions, budgets, width)
        drafts = ask(self.name, self.drafter, "propose", queries)
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
        return state, _proposal(self, drafts, usable, self._calibration)

    def credit(self, proposal: Proposal, verified: np.ndarray, accepted: np.ndarray) -> None:
        self._calibration.add(_bins(proposal, verified), accepted[verified])

    def state(self) -> dict[str, np.ndarray]:
        return {f"calibration_of_{self.name}": self._calibration.state()}

    def load_state(self, state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return _take(state, {f"calibration_of_{self.name}": self._calibration.load_state})


class _OnDevice:
    """What drafts on the device, and so takes its time.

    Args:
      name: of the drafter, for messages.
      drafter: what proposes, or has the weights that do.
      engine: the decode engine.
      times: what passes and drafting take.
    """

    def __init__(
        self, name: str, drafter: SelfDrafter | DeviceDrafter, engine: DecodeEngine, times: PassTimes
    ) -> None:
        self.name, self.drafter, self._engine, self._times = name, drafter, engine, times
        self._calibration = NodeCalibration()
        self._acceptance = ChainAcceptance()

    def refresh(self, params: Params) -> None:
        ask(self.name, self.drafter, "refresh", params)

    def forget(self) -> None:
        self._calibration.forget()
        self._acceptance.forget()

    def state(self) -> dict[str, np.ndarray]:
        return {
            f"calibration_of_{self.name}": self._calibration.state(),
            f"chains_of_{self.name}": self._acceptance.state(),
        }

    def load_state(self, state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        own = {
            f"calibration_of_{self.name}": self._calibration.load_state,
            f"chains_of_{self.name}": self._acceptance.load_state,
        }
        return _take(state, own)


class SelfProposer(_OnDevice):
    """Chains that the policy drafts for itself, with other weights."""

    def __init__(self, name: str, drafter: SelfDrafter, engine: DecodeEngine, times: PassTimes) -> None:
        super().__init__(name, drafter, engine, times)
        self._length = 0  # of the chains that were promised last
        self._start = WorthStarting()
        self.verified = np.zeros(2, np.int64)
        """Drafts verified by this process so far, and accepted."""

    def refresh(self, params: Params) -> None:
        super().refresh(params)
        self._start = WorthStarting()

    @property
    def acceptance(self) -> float:
        """Of a draft whose predecessors were accepted."""
        return self._acceptance.rate

    def warm_up(self, params: Params, batch: int, length: int, repeats: int) -> None:
        draft_params = ask(self.name, self.drafter, "draft_params")
        for seconds in time_drafts(self._engine, draft_params, batch, length, repeats):
            self._times.add((batch, length, DRAFT_STEP), seconds)

    def promise(self, shape: tuple[int, int], active: ActiveSlots) -> float:
        wanted = int(active.wanted.sum())
        self._length, rate = self.choose_length(shape, len(active.slots), wanted)
        plain = plain_rate(wanted + active.standing_by, self._times, *shape)
        saving = 1.0 - plain / rate if rate > plain else 0.0
        return rate if self._start.allows(self.drafter.pending_seconds, saving) else 0.0

    def default_strategies(self, room: int) -> list[Strategy]:
        lengths = sorted({min(length, room) for length in _CHAIN_LENGTHS})
        return [Strategy(self.name, length, 1, length) for length in lengths]

    def choose_length(self, shape: tuple[int, int], slots: int, wanted: int) -> tuple[int, float]:
        """Steps to draft before the next pass, and the tokens per second that they promise."""
        buckets = self._engine.buckets
        return best_length(self._acceptance.rate, slots, wanted, buckets, self._times, *shape)

    def propose(
        self,
        state: DecodeState,
        active: ActiveSlots,
        statistics: DecodeStatistics,
        strategy: Strategy | None = None,
    ) -> tuple[DecodeState, Proposal]:
        start = time.perf_counter()
        length = self._length if strategy is None else strategy.depth
        params = ask(self.name, self.drafter, "draft_params")
        ready = time.perf_counter()
        state, drafted = self._engine.draft(params, state, length)
        tokens, margins = (np.asarray(x)[active.slots] for x in (drafted.tokens, drafted.margins))
        end = time.perf_counter()
        self._times.add((state.batch, state.cache.length, DRAFT_STEP), (end - ready) / length)
        seconds = end - start
        statistics.draft_seconds += seconds
        usable = tokens >= 0
        bins = self._calibration.bins(margin_log_probability(margins))
        probability = np.cumprod(np.where(usable, self._calibration.rates[bins], 1.0), axis=1)
        parents = np.broadcast_to(np.arange(-1, tokens.shape[1] - 1, dtype=np.int32), tokens.shape)
        return state, Proposal(self, tokens, parents, usable, probability, bins, seconds)

    def credit(self, proposal: Proposal, verified: np.ndarray, accepted: np.ndarray) -> None:
        # A margin says something of its own token only: what is behind the first refused one was not judged.
        taken = accepted.sum(axis=1)
        judged = verified & (np.arange(verified.shape[1]) <= taken[:, None])
        self._acceptance.add(int(judged.sum()), int(taken.sum()))
        self._calibration.add(_bins(proposal, judged), accepted[judged])
        self.verified += np.asarray([verified.sum(), taken.sum()])


class DeviceProposer(_OnDevice):
    """Trees from a drafter that follows the slots on the device."""

    def __init__(self, name: str, drafter: DeviceDrafter, engine: DecodeEngine, times: PassTimes) -> None:
        super().__init__(name, drafter, engine, times)
        self._strategy = drafter.strategies[0]  # that was promised last

    def warm_up(self, params: Params, batch: int, length: int, repeats: int) -> None:
        for strategy in self.drafter.strategies:
            for seconds in time_trees(self._engine, self.drafter, strategy, batch, length, repeats):
                self._times.add((batch, length, (self.name, strategy)), seconds)

    def promise(self, shape: tuple[int, int], active: ActiveSlots) -> float:
        self._strategy, rate = best_strategy(
            self.name,
            self.drafter.strategies,
            self._acceptance.rate,
            len(active.slots),
            int(active.wanted.sum()),
            self._engine.buckets,
            self._times,
            *shape,
        )
        return rate

    def default_strategies(self, room: int) -> list[Strategy]:
        sizes = set()
        for tree in self.drafter.strategies:
            most = min(tree.nodes, room)
            sizes |= {(tree.depth, tree.top_k, nodes) for nodes in (most, max(most // 2, 1))}
        return [Strategy(self.name, *size) for size in sorted(sizes)]

    def propose(
        self,
        state: DecodeState,
        active: ActiveSlots,
        statistics: DecodeStatistics,
        strategy: Strategy | None = None,
    ) -> tuple[DecodeState, Proposal]:
        start, tree = time.perf_counter(), self._strategy
        if strategy is not None:
            shape = (strategy.depth, strategy.top_k)
            tree = next(each for each in self.drafter.strategies if (each.depth, each.top_k) == shape)
        drafted = ask(self.name, self.drafter, "draft", state, tree)
        arrays = (drafted.tree.tokens, drafted.tree.parents, drafted.tree.valid, drafted.log_probability)
        tokens, parents, usable, scores = (np.asarray(x)[active.slots] for x in arrays)
        seconds = time.perf_counter() - start
        self._times.add((state.batch, state.cache.length, (self.name, tree)), seconds)
        statistics.draft_seconds += seconds
        more = [(0, 0), (0, self._engine.buckets.max_drafts - tokens.shape[1])]
        drafts = Drafts(
            np.pad(tokens, more),
            np.pad(parents, more, constant_values=-1),
            np.pad(scores, more, constant_values=-np.inf),
            usable.sum(axis=1),
        )
        usable = np.pad(usable, more)
        if self._engine.verification == "rejection":
            drafts, usable = chains(drafts, usable)
        proposal = _proposal(self, drafts, usable, self._calibration)
        return state, dataclasses.replace(proposal, seconds=seconds)

    def credit(self, proposal: Proposal, verified: np.ndarray, accepted: np.ndarray) -> None:
        judged, taken = proposal.judged(verified, accepted)
        self._acceptance.add(int(judged.sum()), int(taken.sum()))
        self._calibration.add(_bins(proposal, verified), accepted[verified])


def _bins(proposal: Proposal, nodes: np.ndarray) -> np.ndarray:
    """Of these nodes, bool [n, N]."""
    return proposal.bins[:, : nodes.shape[1]][nodes]


def _take(
    state: dict[str, np.ndarray], own: dict[str, Callable[[np.ndarray], None]]
) -> dict[str, np.ndarray]:
    """Hands the named arrays to whom they belong, where they are there, and returns the rest."""
    for name, load in own.items():
        if name in state:
            load(state[name])
    return {name: array for name, array in state.items() if name not in own}


def _proposal(
    proposer: Proposer, drafts: Drafts, usable: np.ndarray, calibration: NodeCalibration
) -> Proposal:
    bins = calibration.bins(drafts.log_probability)
    return Proposal(proposer, drafts.tokens, drafts.parents, usable, calibration.rates[bins], bins, 0.0)
