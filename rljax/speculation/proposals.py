"""Draft trees for a verifying pass (`Proposal`), and the interface to drafters (`Proposer`).

HostProposer      `speculative_pass.py`: asks a drafter on the host, which costs next to nothing
SelfProposer      `device_proposers.py`: other weights of the policy draft chains on the policy's KV cache
DeviceProposer    `device_proposers.py`: a drafter with slots of its own on the device drafts trees
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np

from drafters.base import Drafter, Drafts
from rljax.engine.background import CompilerThread
from rljax.engine.draft_tree import DraftStrategy
from rljax.engine.engine import DecodeEngine
from rljax.engine.shapes import Shapes
from rljax.engine.state import DecodeState
from rljax.models.transformer import Params
from rljax.requests import DecodeStatistics
from rljax.speculation.acceptance import NodeCalibration
from rljax.speculation.strategies import Strategy


@dataclasses.dataclass(frozen=True)
class ActiveSlots:
    """The n slots that take part in a pass.

    Attributes:
      slots: int32 [n], their places in the decode state.
      requests: int32 [n], the request that each decodes.
      positions: int32 [n], the position of its next token.
      current: bool [n], False for requests of the next rollout, which are only sampled ahead.
      inactive: further slots that decode a current request and do not take part.
      ahead_weight: the value of a token that is sampled ahead, as a share of a current one's.
    """

    slots: np.ndarray
    requests: np.ndarray
    positions: np.ndarray
    current: np.ndarray
    inactive: int = 0
    ahead_weight: float = 0.0

    @property
    def responses(self) -> int:
        """Responses of the rollout that a plain step would continue, those of inactive slots included."""
        return int(self.current.sum()) + self.inactive


@dataclasses.dataclass(frozen=True)
class Proposal:
    """Draft trees of one drafter for n slots: N nodes each, the most promising first.

    Attributes:
      tokens, parents: int32 [n, N], as in `Drafts`.
      usable: bool [n, N], False for invalid nodes.
      probability: float [n, N], the probability of being accepted with all ancestors, from the acceptance of
        such nodes so far.
      bins: int [n, N], the nodes' bins in the proposer's `NodeCalibration`.
      seconds: time that drafting took on the device.
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
        """The drafter's name."""
        return self.proposer.name

    @functools.cached_property
    def _valid_parents(self) -> np.ndarray:
        """`parents`, with -1 at invalid nodes, where anything may stand."""
        return np.where(self.usable, self.parents, -1)

    @functools.cached_property
    def levels(self) -> np.ndarray:
        """Depth of each node, int64 [n, N]: 1 for children of the last token, and for invalid nodes."""
        parents = self._valid_parents
        levels, rows = np.ones(parents.shape, np.int64), np.arange(len(parents))
        for column in range(parents.shape[1]):  # parents precede their children
            parent = parents[:, column]
            levels[:, column] = np.where(parent < 0, 1, levels[rows, np.maximum(parent, 0)] + 1)
        return levels

    def within(self, strategy: Strategy) -> np.ndarray:
        """Nodes that a strategy verifies, bool [n, N]: cut to its depth, top_k and number of nodes."""
        kept, rows = self.usable & (self.levels <= strategy.depth), np.arange(len(self.usable))
        parents = self._valid_parents
        for column in range(kept.shape[1]):  # parents precede their children
            parent = parents[:, column]
            siblings = (parents[:, :column] == parent[:, None]) & kept[:, :column]
            parent_kept = (parent < 0) | kept[rows, np.maximum(parent, 0)]
            kept[:, column] &= parent_kept & (siblings.sum(axis=1) < strategy.top_k)
        return kept & (np.cumsum(kept, axis=1) <= strategy.nodes)

    def scored(self, verified: np.ndarray, correct: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Levels of each slot that were scored, and how many of them were right: int [n] each.

        A level is scored if it has a verified node and the level above was right. Arguments as of
        `record_outcome`.
        """
        offered = np.where(verified, self.levels[:, : verified.shape[1]], 0).max(axis=1, initial=0)
        taken = correct.sum(axis=1)
        return np.minimum(taken + 1, offered), taken

    def record_outcome(self, verified: np.ndarray, correct: np.ndarray) -> None:
        """Lets the proposer learn which nodes were verified, and which of these were sampled.

        Both are bool [n, V], V <= N: later nodes were not verified.
        """
        self.proposer.record_outcome(self, verified, correct)

    def by_drafter(
        self, verified: np.ndarray, correct: np.ndarray
    ) -> "list[tuple[Proposal, np.ndarray, np.ndarray]]":
        """The proposals of the single drafters, and the fate of their nodes, as of `record_outcome`."""
        return [(self, verified, correct)]

    def counts(self, verified: np.ndarray, accepted: np.ndarray) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """By drafter, how many of its nodes were verified for each slot, and accepted: int32 [n] each.

        Arguments as of `record_outcome`.
        """
        return {self.name: (verified.sum(axis=1, dtype=np.int32), accepted.sum(axis=1, dtype=np.int32))}


class Proposer:
    """A drafter as managers see it.

    Before it drafts, a proposer that takes time predicts what its drafts are worth (`expected_rate`), from
    their acceptance so far and from measured times; afterwards it learns what became of them
    (`record_outcome`). Checkpoints keep the acceptance and not the times: the warm-up measures those, on
    whatever machine.

    Attributes:
      on_host: whether it drafts on the host, where drafts of any shape cost next to nothing.
      trees: the shapes of trees that it can draft; empty for any.
      only_chains: whether it drafts chains, of any length.
      keeps_choice: whether the run's way to choose how much is drafted is also the one for it alone.
    """

    on_host = False
    trees: Sequence[DraftStrategy] = ()
    only_chains = keeps_choice = False

    def __init__(self, name: str, drafter: Drafter, engine: DecodeEngine) -> None:
        self.name, self.drafter, self._engine = name, drafter, engine
        self._calibration = NodeCalibration()

    def refresh(self, params: Params) -> None:
        """A rollout with these weights begins."""

    def warm_up(self, params: Params, batch: int, length: int, repeats: int) -> None:
        """Compiles drafting over a state of this batch and cache length, and measures its time."""

    def compile_in_background(self, params: Params, shapes: Shapes, thread: CompilerThread) -> None:
        """Leaves the programs that `warm_up` compiles for decode states to a thread. The proposer drafts
        nothing for one whose programs are not ready.
        """

    def is_ready(self, shape: tuple[int, int]) -> bool:
        """Whether it can draft for the present decode state, of this batch and cache length."""
        return True

    def forget(self) -> None:
        """Halves the weight of earlier acceptance: the policy has moved."""
        self._calibration.forget()

    def expected_rate(self, shape: tuple[int, int], active: ActiveSlots) -> float:
        """Tokens of current requests per second that drafting may bring; infinite where asking is free.

        Args:
          shape: batch and cache length of the decode state.
          active: the slots that would draft.
        """
        raise NotImplementedError

    def propose(
        self,
        state: DecodeState,
        active: ActiveSlots,
        statistics: DecodeStatistics,
        strategy: Strategy | None = None,
    ) -> tuple[DecodeState, Proposal]:
        """Drafts for the active slots. Consumes `state`.

        Args:
          active: the slots to draft for.
          statistics: the rollout's, to which the time of drafting is added.
          strategy: the trees to draft; None for those of the last `expected_rate`.
        """
        raise NotImplementedError

    def record_outcome(self, proposal: Proposal, verified: np.ndarray, correct: np.ndarray) -> None:
        """Learns from the fate of one of its proposals, see `Proposal.record_outcome`."""
        self._calibration.add(bins_of(proposal, verified), correct[verified])

    def state(self) -> dict[str, np.ndarray]:
        """Checkpoint content: the acceptance so far. Names hold no slash."""
        return {f"calibration_of_{self.name}": self._calibration.state()}

    def load_state(self, state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Restores the part of `state` that is this proposer's, and returns the rest."""
        return restore(state, {f"calibration_of_{self.name}": self._calibration.load_state})

    def _calibrated(self, drafts: Drafts, usable: np.ndarray, seconds: float = 0.0) -> Proposal:
        """The proposal of drafts, with measured probabilities in the place of the drafter's own."""
        bins = self._calibration.bins(drafts.log_probability)
        rates = self._calibration.rates[bins]
        return Proposal(self, drafts.tokens, drafts.parents, usable, rates, bins, seconds)


def no_proposal(proposer: Proposer, slots: int, nodes: int) -> Proposal:
    """The proposal of a drafter that does not draft: `nodes` invalid nodes for so many slots."""
    nothing = np.zeros((slots, nodes), np.int32)
    return Proposal(proposer, nothing, nothing - 1, nothing > 0, np.zeros((slots, nodes)), nothing, 0.0)


def bins_of(proposal: Proposal, nodes: np.ndarray) -> np.ndarray:
    """Calibration bins of the nodes that are set in bool [n, V], V <= N."""
    return proposal.bins[:, : nodes.shape[1]][nodes]


def restore(
    state: dict[str, np.ndarray], loaders: dict[str, Callable[[np.ndarray], None]]
) -> dict[str, np.ndarray]:
    """Passes the named arrays that are there to their loaders, and returns the others."""
    for name, load in loaders.items():
        if name in state:
            load(state[name])
    return {name: array for name, array in state.items() if name not in loaders}
