"""The drafter protocol: what a drafter is told, and what it returns.

    drafter.begin(requests)              # a rollout begins, with all of its requests
    drafts = drafter.propose(queries)    # draft trees for the whole active batch
    drafter.observe(sampled)             # the tokens that were sampled, drafted or not
    drafter.learn(outcomes)              # the rollout is over and rewarded

There are three protocols, from small to large:

1. `SimpleDrafter` (`drafters/simple.py`) has one method: tokens in, draft tokens out.
2. `Drafter` drafts for the whole batch at once, and may learn from rollouts, report metrics and keep a state
   in checkpoints. A subclass writes `begin`, `propose` and `observe`; the rest has defaults.
3. `SlotDrafter` (`drafters/device.py`) drafts on the accelerator: in the place of `propose`, a drafter hands
   out one for the engine that decodes.

What only some drafters do is an object of its own that they hand out: training (`drafters/training.py`),
weights with which the engine drafts, and drafting ahead of the verification (both in `drafters/device.py`).

A drafter can waste time, but cannot change a token: verification samples every token itself. Invalid draft
nodes are left out and counted (`drafters/validation.py`). An exception, or a return value that breaks the
protocol, stops the run with one line that names the drafter and the method.
"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from drafters.device import PolicyWeights, SlotDrafter
    from drafters.training import Training
    from rljax.engine.engine import DecodeEngine
    from rljax.models.config import ModelConfig
    from rljax.models.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class DraftRequest:
    """A request of the rollout that begins.

    Attributes:
      prompt_ids: the prompt's token ids; requests of a group share them.
      noise_key: uint32 [2], the key of the request's sampling noise. None where verification needs drafts
        that do not depend on it (`engine.verification` other than coupled).
      ahead: int32 [n], the beginning of the response as it was sampled ahead of time, or None.
      trainable: False where no drafter may be trained on the request: in evaluation, and for requests that
        are only sampled ahead.
    """

    prompt_ids: tuple[int, ...]
    noise_key: np.ndarray | None
    ahead: np.ndarray | None = None
    trainable: bool = True


@dataclasses.dataclass(frozen=True)
class Queries:
    """The active batch, for which drafts are asked.

    Attributes:
      requests: int32 [n], indices into the requests of `begin`, without duplicates.
      positions: int32 [n], position of the first draft token, counted from the start of the prompt.
      budgets: int32 [n], the largest number of draft nodes.
      nodes: the largest possible budget: the width of the arrays in `Drafts`.
    """

    requests: np.ndarray
    positions: np.ndarray
    budgets: np.ndarray
    nodes: int


@dataclasses.dataclass(frozen=True)
class Drafts:
    """A draft tree for every query, the most promising nodes first.

    Attributes:
      tokens: int32 [n, nodes].
      parents: int32 [n, nodes], the node that a node continues, -1 for the last sampled token. Parents
        precede their children.
      log_probability: float32 [n, nodes], the drafter's estimate of the log probability that the node and
        all of its ancestors are accepted.
      counts: int32 [n], the number of nodes of each tree.
    """

    tokens: np.ndarray
    parents: np.ndarray
    log_probability: np.ndarray
    counts: np.ndarray


@dataclasses.dataclass(frozen=True)
class Sampled:
    """Tokens that were appended to requests: sampled since the last host sync, or a tool's answer (then
    none of them was drafted).

    Attributes:
      requests: int32 [n].
      tokens: int32 [n, T]; the first counts[i] of row i are appended to request i.
      counts: int32 [n].
      drafted: int32 [n], how many draft nodes of this drafter were verified; 0 where another drafter's were.
      accepted: int32 [n], how many of them were accepted.
      ended: bool [n], the response is complete.
    """

    requests: np.ndarray
    tokens: np.ndarray
    counts: np.ndarray
    drafted: np.ndarray
    accepted: np.ndarray
    ended: np.ndarray


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A finished response.

    Attributes:
      prompt_ids: its prompt.
      response_ids: int32 [n].
      reward: from the task.
    """

    prompt_ids: tuple[int, ...]
    response_ids: np.ndarray
    reward: float


class Drafter:
    """A drafter. All of its methods are called from one thread. A subclass on the host writes `begin`,
    `propose` and `observe`, one on the device `attach`, and whatever else it needs: by default nothing is
    learned, kept or reported.

    Attributes:
      on_host: whether `propose` drafts; else the engine, with `policy_weights`, or what `attach` returns.
      state_name: drafters with the same one share what a checkpoint keeps, and find it when they take over
        from each other; None for the drafter's own name.
      training: trains it between passes; None for a drafter that is not trained.
      policy_weights: other weights of the policy's architecture, with which the engine drafts; None for none.
    """

    on_host: bool = True
    state_name: str | None = None
    training: "Training | None" = None
    policy_weights: "PolicyWeights | None" = None

    # -- a rollout -------------------------------------------------------------------------------------------

    def begin(self, requests: Sequence[DraftRequest]) -> None:
        """Begins a rollout of `requests`; the requests of the previous one are over."""

    def propose(self, queries: Queries) -> Drafts:
        """Returns draft trees for the active batch."""
        raise NotImplementedError

    def observe(self, sampled: Sampled) -> None:
        """Receives the tokens that were sampled since the last call."""

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        """Receives the rewarded responses of a training rollout."""

    # -- a run -----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, np.ndarray]:
        """Returns the arrays that a checkpoint keeps, by name."""
        return {}

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        """Restores the arrays that `state` returned."""

    def metrics(self) -> dict[str, float]:
        """Returns the drafter's own metrics of the last rollout, by name."""
        return {}

    # -- on the device ---------------------------------------------------------------------------------------

    def reads(self, policy: "ModelConfig", tokenizer: "Tokenizer | None") -> tuple[int, ...] | None:
        """Returns `hidden_layers` of the engine that decodes: the layers whose features the policy must hand
        out, or None. Raises a UserError where it cannot draft for such a policy.
        """
        return None

    def attach(self, engine: "DecodeEngine") -> "SlotDrafter | None":
        """Sets the engine that it drafts for, after `reads`. Returns what drafts for the engine's slots; None
        for a drafter on the host, and for one that has `policy_weights`.
        """
        return None

    def refresh(self, params: Any) -> None:
        """Receives the policy's weights for the rollout that begins, in the engine's form."""
