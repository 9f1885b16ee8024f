"""Several proposals as one tree (`drafters/mixed.py`), and back: the outcome of each drafter's own nodes.

Mixer           mixes proposals that were made anyway
MixedProposer   presents several drafters as one that strategies can name
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from drafters.base import Drafts
from drafters.mixed import MOST_DRAFTERS, Agreement, Mixture, mix, nodes_by_drafter
from rljax.engine.state import DecodeState
from rljax.errors import ConfigError
from rljax.requests import DecodeStatistics
from rljax.speculation.proposals import ActiveSlots, Proposal, Proposer, no_proposal
from rljax.speculation.strategies import MIXED, Strategy


def check_one_tree(proposers: Sequence[Proposer]) -> None:
    """Raises a ConfigError for more drafters than one tree can have."""
    if len(proposers) > MOST_DRAFTERS:
        raise ConfigError(
            f"speculation.others: {len(proposers)} drafters, and a tree holds drafts of at most"
            f" {MOST_DRAFTERS}; leave some out, or use speculation.choice: expected alone"
        )


class Mixer:
    """Mixes proposals, and learns how much likelier a node is that several drafters propose.

    Args:
      nodes: nodes of a mixed tree at most.
    """

    def __init__(self, proposers: Sequence[Proposer], nodes: int) -> None:
        self._numbers = {id(proposer): number for number, proposer in enumerate(proposers[:MOST_DRAFTERS])}
        self._agreement = Agreement(len(self._numbers))
        self._nodes = nodes

    def forget(self) -> None:
        """Halves the weight of earlier counts."""
        self._agreement.forget()

    def mix(self, proposals: Sequence[Proposal], slots: int) -> "MixedProposal":
        """One tree from several proposals for the same slots."""
        by_number = {self._numbers[id(proposal.proposer)]: proposal for proposal in proposals}
        nothing = no_proposal(proposals[0].proposer, slots, self._nodes)
        drafts, probabilities = [], []
        for number in range(len(self._numbers)):
            proposal = by_number.get(number, nothing)
            counts = np.full(slots, proposal.tokens.shape[1], np.int32)
            log_probability = np.zeros(proposal.tokens.shape, np.float32)
            drafts.append(Drafts(proposal.tokens, proposal.parents, log_probability, counts))
            probabilities.append(np.where(proposal.usable, proposal.probability, 0.0))
        budgets = np.full(slots, self._nodes, np.int32)
        mixture = mix(drafts, probabilities, budgets, self._nodes, self._agreement.independence)
        tree = mixture.drafts
        usable = np.arange(self._nodes) < tree.counts[:, None]
        return MixedProposal(
            proposals[0].proposer,
            tree.tokens,
            tree.parents,
            usable,
            mixture.probability,
            np.zeros_like(tree.tokens),
            sum(proposal.seconds for proposal in proposals),
            mixture,
            by_number,
            self._agreement,
        )

    def state(self) -> dict[str, np.ndarray]:
        """Checkpoint content."""
        return self._agreement.state()

    def load_state(self, state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Restores the part of `state` that is the mixer's, and returns the rest."""
        self._agreement.load_state(state)
        return {name: array for name, array in state.items() if not name.startswith("agreement_")}


@dataclasses.dataclass(frozen=True)
class MixedProposal(Proposal):
    """A tree of several drafters.

    Attributes:
      mixture: the drafters that each node comes from.
      parts: the mixed proposals, by the number of their drafter.
      agreement: learns from the fate of the nodes.
    """

    mixture: Mixture
    parts: dict[int, Proposal]
    agreement: Agreement

    @property
    def name(self) -> str:
        return " and ".join(part.name for part in self.parts.values())

    def within(self, strategy: Strategy) -> np.ndarray:
        """Only cut to the strategy's nodes: its depth and width are those of the parts."""
        return self.usable & (np.cumsum(self.usable, axis=1) <= strategy.nodes)

    def record_outcome(self, verified: np.ndarray, correct: np.ndarray) -> None:
        width = self.tokens.shape[1]
        verified, correct = _widen(verified, width), _widen(correct, width)
        # Agreement counts where the parent was right.
        parent_correct = np.take_along_axis(correct, np.maximum(self.parents, 0), axis=1) | (self.parents < 0)
        self.agreement.observe(self.mixture, verified & parent_correct, correct)
        for part, part_verified, part_correct in self._fates(verified, correct):
            part.record_outcome(part_verified, part_correct)

    def by_drafter(
        self, verified: np.ndarray, correct: np.ndarray
    ) -> list[tuple[Proposal, np.ndarray, np.ndarray]]:
        width = self.tokens.shape[1]
        return self._fates(_widen(verified, width), _widen(correct, width))

    def _fates(
        self, verified: np.ndarray, correct: np.ndarray
    ) -> list[tuple[Proposal, np.ndarray, np.ndarray]]:
        """Each part with the fate of its nodes; arguments are bool [n, nodes of the mixture]."""
        fates = []
        for number, part in self.parts.items():
            places = self.mixture.places[number]  # of its own nodes in the mixture, [n, N]
            kept, places = places >= 0, np.maximum(places, 0)
            part_verified = kept & np.take_along_axis(verified, places, axis=1)
            part_correct = part_verified & np.take_along_axis(correct, places, axis=1)
            fates.append((part, part_verified, part_correct))
        return fates

    def counts(self, verified: np.ndarray, accepted: np.ndarray) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        width = self.tokens.shape[1]
        drafted, taken = (
            nodes_by_drafter(self.mixture, _widen(nodes, width)) for nodes in (verified, accepted)
        )
        return {part.name: (drafted[number], taken[number]) for number, part in self.parts.items()}


class MixedProposer:
    """Presents several drafters as one proposer: all of them draft, and their trees are mixed.

    Args:
      mixer: made for these proposers, and maybe further ones.

    Attributes:
      name: the drafters' names, as in strategies.
    """

    def __init__(self, parts: Sequence[Proposer], mixer: Mixer) -> None:
        self.name = MIXED.join(part.name for part in parts)
        self._parts, self._mixer = tuple(parts), mixer

    def propose(
        self, state: DecodeState, active: ActiveSlots, statistics: DecodeStatistics, strategy: Strategy
    ) -> tuple[DecodeState, MixedProposal]:
        """See `Proposer.propose`."""
        offered = []
        for part in self._parts:
            state, proposal = part.propose(state, active, statistics, strategy)
            offered.append(proposal)
        return state, self._mixer.mix(offered, len(active.slots))


def proposer_of(strategy: Strategy, proposers: Sequence[Proposer], mixer: Mixer) -> Proposer | MixedProposer:
    """The proposer that a strategy names: one of `proposers`, or several as one."""
    by_name = {proposer.name: proposer for proposer in proposers}
    parts = [by_name[name] for name in strategy.drafters]
    return parts[0] if len(parts) == 1 else MixedProposer(parts, mixer)


def _widen(nodes: np.ndarray, width: int) -> np.ndarray:
    """Pads nodes with False: bool [n, V] -> bool [n, width]."""
    return np.pad(nodes, [(0, 0), (0, width - nodes.shape[1])])
