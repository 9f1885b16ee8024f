"""A manager's decision before a pass (`Choice`), and the outcome that it is told (`PassRecord`)."""

import dataclasses
from collections.abc import Sequence
from typing import Self

import numpy as np

from rljax.engine.draft_tree import DraftTree
from rljax.engine.host_sync import DecodeResult
from rljax.speculation.pass_choice import Candidates
from rljax.speculation.proposals import Proposal
from rljax.speculation.strategies import Arm


@dataclasses.dataclass(frozen=True)
class Choice:
    """The manager's decision about the next step. Made by `plain` or `verify`.

    Attributes:
      proposal: the drafts to verify; None for a plain step.
      candidates: the proposal's nodes that may be verified; None for a plain step.
      rows: rows of the pass; 0 for a plain step.
      reason: a sentence for the log.
      expected_rate: tokens per second that this choice promises, drafting included; 0 where nothing is known.
      plain_rate: tokens per second that plain decoding promises; 0 where nothing is known.
      arm: the arm of the bandit; None for its plain step, and for other managers.
      draft_seconds: time that drafting took, whether the drafts are verified or not.
    """

    proposal: Proposal | None
    candidates: Candidates | None
    rows: int
    reason: str
    expected_rate: float
    plain_rate: float
    arm: Arm = None
    draft_seconds: float = 0.0

    @classmethod
    def plain(
        cls,
        reason: str,
        plain_rate: float,
        *,
        expected_rate: float | None = None,
        arm: Arm = None,
        draft_seconds: float = 0.0,
    ) -> Self:
        """A plain step. It promises `plain_rate`, unless the manager expects something else of its arm."""
        expected = plain_rate if expected_rate is None else expected_rate
        return cls(None, None, 0, reason, expected, plain_rate, arm, draft_seconds)

    @classmethod
    def verify(
        cls,
        proposal: Proposal,
        candidates: Candidates,
        rows: int,
        reason: str,
        *,
        expected_rate: float,
        plain_rate: float,
        arm: Arm = None,
        draft_seconds: float = 0.0,
    ) -> Self:
        """A pass of `rows` rows over the likeliest candidates of a proposal."""
        return cls(proposal, candidates, rows, reason, expected_rate, plain_rate, arm, draft_seconds)


@dataclasses.dataclass(frozen=True)
class VerifiedNodes:
    """The fate of the draft nodes of n slots in a pass: bool [n, N] each.

    Attributes:
      verified: nodes that the pass computed.
      accepted: those of them that a token of the response came from.
      correct: those of them that were sampled. One more than accepted where a response ends: its last token
        is counted as the pass's own, yet the node that foretold it was right.
    """

    verified: np.ndarray
    accepted: np.ndarray
    correct: np.ndarray

    @classmethod
    def from_result(cls, result: DecodeResult, tree: DraftTree, slots: np.ndarray) -> Self:
        """Reads them off a pass over `tree`, for `slots`, int32 [n]."""
        path = result.path[slots]  # [n, N + 1], nodes along the accepted path; node 0 is the last token
        counts = (result.tokens[slots] >= 0).sum(axis=1, keepdims=True)
        accepted = _on_path(path, np.arange(1, tree.nodes + 2) <= counts)
        return cls(tree.valid[slots], accepted, _on_path(path, path >= 0))

    def by_depth(self, levels: np.ndarray) -> tuple[list[int], list[int]]:
        """Numbers of verified and of accepted nodes, by depth from 1 on. Levels as `Proposal.levels`."""
        levels = levels[:, : self.verified.shape[1]]
        verified, accepted = np.bincount(levels[self.verified]), np.bincount(levels[self.accepted])
        return verified.tolist()[1:], accepted.tolist()[1:]


def _on_path(path: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Draft nodes in the selected columns of paths: bool [n, N]; both arguments are [n, N + 1]."""
    nodes = np.zeros(path.shape, bool)
    np.put_along_axis(nodes, np.where(columns, path, 0), True, axis=1)
    return nodes[:, 1:]  # node 0 is the last token, not a draft


@dataclasses.dataclass(frozen=True)
class PassRecord:
    """The outcome of a choice: one verifying pass, or a few plain steps in a row.

    Attributes:
      choice: the choice that was carried out.
      batch: slots of the decode state.
      responses: responses that decoded.
      tokens: tokens that they got.
      seconds: time of the forward passes, without drafting.
      standing_by: further responses that waited for a verifying pass over half of the slots.
      requests: int32 [n], the request in each row of `nodes`; None for plain steps.
      nodes: the fate of the drafts; None for plain steps.
      verified_by_depth, accepted_by_depth: numbers of draft nodes, by depth from 1 on.
    """

    choice: Choice
    batch: int
    responses: int
    tokens: int
    seconds: float
    standing_by: int = 0
    requests: np.ndarray | None = None
    nodes: VerifiedNodes | None = None
    verified_by_depth: Sequence[int] = ()
    accepted_by_depth: Sequence[int] = ()

    @property
    def waiting(self) -> int:
        """Responses that the passes held up: those that decoded, and those standing by."""
        return self.responses + self.standing_by
