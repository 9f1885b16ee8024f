"""What a drafter is: a protocol, what it is told, and what it may return.

    drafter.begin(requests)                     # a rollout begins: everything that will be decoded
    drafts = drafter.propose(queries)           # for the whole active batch, within a budget per request
    drafter.observe(sampled)                    # what was really sampled, drafted or not
    drafter.learn(outcomes)                     # the rollout is over and rewarded

Drafters on the host propose; the engine drafts with other weights (`SelfDrafter`), or a drafter lives on the
device and follows the slots there (`DeviceDrafter`).

A drafter can only waste time: verification samples every token itself, so a wrong draft is refused, and what
is no draft at all (`usable_nodes`) is left out and counted. What it raises, and what it returns that is not
what the protocol says, stops the run in one line that names it.
"""

import dataclasses
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

if TYPE_CHECKING:  # most drafters live on the host and need no device code
    from drafters.eagle.drafting import DraftStrategy, ScoredTree
    from rljax.engine.engine import DecodeEngine
    from rljax.engine.state import DecodeState, Prefix
    from rljax.engine.visits import Assignment, DecodeResult
    from rljax.models.config import ModelConfig
    from rljax.models.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class DraftRequest:
    """A request of the rollout that begins.

    Attributes:
      prompt_ids: the prompt's token ids; requests of a group share them.
      noise_key: uint32 [2], from which the request's tokens will be sampled. None where verification needs
        drafts that do not depend on it (`engine.verification` other than coupled).
      ahead: int32 [n], the beginning of its response as sampled ahead of time (`drafters/aligned.py`), or
        None.
      trainable: False where no drafter may be trained on it: in evaluation, and what is only sampled ahead.
    """

    prompt_ids: tuple[int, ...]
    noise_key: np.ndarray | None
    ahead: np.ndarray | None = None
    trainable: bool = True


@dataclasses.dataclass(frozen=True)
class Queries:
    """The active batch, which wants drafts.

    Attributes:
      requests: int32 [n], indices into what `begin` was given, each at most once.
      positions: int32 [n], where the first drafted token would stand, counted from the prompt's start.
      budgets: int32 [n], draft nodes at most.
      nodes: the largest budget there can be: width of the arrays in `Drafts`.
    """

    requests: np.ndarray
    positions: np.ndarray
    budgets: np.ndarray
    nodes: int


@dataclasses.dataclass(frozen=True)
class Drafts:
    """A draft tree for every query, its most promising nodes first.

    Attributes:
      tokens: int32 [n, nodes].
      parents: int32 [n, nodes], the node that a node continues, -1 for the last sampled token. Parents
        precede their children.
      log_probability: float32 [n, nodes], how likely the drafter thinks that the node will be accepted, with
        all its ancestors.
      counts: int32 [n], how many nodes each query got.
    """

    tokens: np.ndarray
    parents: np.ndarray
    log_probability: np.ndarray
    counts: np.ndarray


@dataclasses.dataclass(frozen=True)
class Sampled:
    """What a look from the host brought, or what a tool answered: then nothing of it was drafted.

    Attributes:
      requests: int32 [n].
      tokens: int32 [n, T]; the first counts[i] of row i follow what was known of request i.
      counts: int32 [n].
      drafted: int32 [n], this drafter's draft nodes that were verified, as many as were worth it; 0 where
        another one's were.
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
      reward: the task's.
    """

    prompt_ids: tuple[int, ...]
    response_ids: np.ndarray
    reward: float


class Drafter(Protocol):
    """What every drafter is told, and asked for. All calls come from one thread."""

    def begin(self, requests: Sequence[DraftRequest]) -> None:
        """A rollout of `requests` begins; those of the one before are over."""

    def observe(self, sampled: Sampled) -> None:
        """What was sampled since the last time."""

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        """The responses of a training rollout, rewarded."""

    def state(self) -> dict[str, np.ndarray]:
        """What a checkpoint keeps, by name, under the drafter's own name. Drafters with the same attribute
        `state_name` share what is kept under that one instead, and find it when they take over from each
        other.
        """

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        """Takes up what `state` returned."""

    def metrics(self) -> dict[str, float]:
        """What the drafter itself has to report of the last rollout, for the metrics line."""


class HostDrafter(Drafter, Protocol):
    """A drafter on the host: it proposes tokens for all requests of a rollout."""

    def propose(self, queries: Queries) -> Drafts:
        """Draft trees for the active batch."""


@runtime_checkable
class SelfDrafter(Drafter, Protocol):
    """A drafter that is other weights of the policy's own architecture: the engine drafts with them, on the
    target's cache (`rljax/engine/self_drafting.py`).

    Attributes:
      pending_seconds: what making the weights ready will take, as far as is known; 0 where they are.
    """

    pending_seconds: float

    def attach(self, engine: "DecodeEngine") -> None:
        """The engine that will draft with the weights; those made for another are let go."""

    def draft_params(self) -> Any:
        """The weights, as `DecodeEngine.draft` takes them, made ready if they are not."""

    def refresh(self, params: Any) -> None:
        """The policy's weights of the rollouts to come, as the engine has them."""


@runtime_checkable
class DeviceDrafter(Drafter, Protocol):
    """A drafter on the device, which knows something of each slot and so is told what becomes of them.

    Attributes:
      strategies: the trees that it can draft; a program each.
    """

    strategies: "tuple[DraftStrategy, ...]"

    def reads(self, policy: "ModelConfig", tokenizer: "Tokenizer | None") -> tuple[int, ...] | None:
        """`hidden_layers` of the engine that decodes: which of the policy's states it must hand out. Raises a
        UserError where it cannot draft for such a policy.
        """

    def attach(self, engine: "DecodeEngine") -> None:
        """The engine that it will draft for, after `reads`."""

    def refresh(self, params: Any) -> None:
        """The policy's weights of the rollout that begins, as the engine has them."""

    def warm_up(
        self, prefixes: "Sequence[Prefix]", batches: Sequence[int], prompt_length: int, widens: bool = False
    ) -> None:
        """Compiles what following the slots needs, for prompts and states of these shapes; with `widens` also
        what `widen` does.
        """

    def start(self, batch: int) -> None:
        """All slots of a state of `batch` are empty."""

    def prefill(self, prefix: "Prefix", prompts: Sequence[Sequence[int]]) -> Any:
        """What it wants to know of prompts that the engine prefilled, row by row, to `insert` it."""

    def insert(self, prefilled: Any, assignments: "Sequence[Assignment]", requests: Sequence[int]) -> None:
        """Prompts have gone into slots, for these requests of the newest `begin`. Where that came without a
        `start`, as for requests that join others, the slots of those before go on as they are.
        """

    def advance(self, result: "DecodeResult") -> None:
        """Slots have sampled tokens."""

    def append(
        self, slots: Sequence[int], sizes: Sequence[int], tokens: np.ndarray, counts: np.ndarray
    ) -> None:
        """The first counts[i] of tokens[i], int32 [n, T], which nobody sampled, stand in slot slots[i] behind
        the first sizes[i] of prompt and response: what `advance` told beyond these was not kept.
        """

    def compact(self, slots: Sequence[int], batch: int) -> None:
        """Only `slots` go on, in that order, in a state of `batch`."""

    def widen(self, batch: int) -> None:
        """All slots go on, with empty ones behind them, in a state of `batch`, which may be as before."""

    def draft(self, state: "DecodeState", strategy: "DraftStrategy") -> "ScoredTree":
        """Trees below the slots' last tokens, on the device; nothing where it knows nothing."""


@runtime_checkable
class KnowingDrafter(DeviceDrafter, Protocol):
    """A drafter that drafts for a slot only where it was told all of its tokens."""

    def pretend(self, state: "DecodeState") -> None:
        """After `start`, as if it had been told those of every slot of `state`: to time its drafts."""


@runtime_checkable
class TrainedDrafter(Drafter, Protocol):
    """A drafter that is trained in small slices, whenever there is room.

    Attributes:
      train_below: train inside a rollout once no more than this many responses are still running.
      trained: False for a new one whose drafts are guesses.
    """

    train_below: int
    trained: bool

    def train(self) -> bool:
        """One slice; False when there is nothing left to do, or it would take more time than it may."""

    def freeze(self) -> None:
        """Before the first rollout, and before `load_state`: it will neither be trained nor saved. What only
        that needs is not kept.
        """


class ProtocolError(ValueError):
    """What a drafter returned is not what the protocol says; the message goes on behind "METHOD returned"."""


_KINDS = {
    "tokens": (np.integer, "integers"),
    "parents": (np.signedinteger, "signed integers"),  # -1 is one of them
    "log_probability": (np.floating, "floats"),
    "counts": (np.integer, "integers"),
}


def usable_nodes(drafts: Any, queries: Queries, vocab_size: int) -> np.ndarray:
    """Which nodes can be verified: bool [n, nodes].

    Left out are nodes beyond count or budget, tokens outside the vocabulary, parents that do not precede
    their child, and everything below such a node.

    Raises:
      ValueError: it is not `Drafts` for these queries at all.
    """
    shape = (len(queries.requests), queries.nodes)
    for name, wanted in (
        ("tokens", shape),
        ("parents", shape),
        ("log_probability", shape),
        ("counts", shape[:1]),
    ):
        array = getattr(drafts, name, None)
        if not isinstance(array, np.ndarray) or array.shape != wanted:
            found = array.shape if isinstance(array, np.ndarray) else type(array).__name__
            raise ValueError(f"{name} should be an array {list(wanted)}, got {found}")
        kind, called = _KINDS[name]
        if not np.issubdtype(array.dtype, kind):
            raise ValueError(f"{name} should be {called}, got {array.dtype}")
    order = np.arange(queries.nodes)
    tokens, parents = drafts.tokens.astype(np.int64), drafts.parents.astype(np.int64)
    usable = order < np.minimum(drafts.counts, queries.budgets)[:, None]
    usable &= (tokens >= 0) & (tokens < vocab_size)
    usable &= (parents >= -1) & (parents < order)
    for node in range(queries.nodes):
        parent = parents[:, node]
        has_parent = usable[:, node] & (parent >= 0)
        rows = np.flatnonzero(has_parent)
        usable[rows, node] = usable[rows, parent[rows]]
    return usable


def usable_metrics(metrics: Any, taken: Collection[str] = ()) -> dict[str, float]:
    """What `Drafter.metrics` returned, if a metrics line can hold it beside the names `taken`.

    Raises:
      ProtocolError: it cannot.
    """
    for name, value in _named(metrics, "numbers").items():
        if name in taken:
            raise ProtocolError(f"{name!r}, which says something else already: give it another name")
        if not isinstance(value, int | float) and (
            getattr(value, "ndim", None) != 0 or np.dtype(value.dtype).kind not in "biuf"
        ):
            raise ProtocolError(f"{name!r} as {_described(value)}, expected a number")
    return metrics


def usable_state(state: Any) -> dict[str, np.ndarray]:
    """What `Drafter.state` returned, if a checkpoint can hold it and gives it back as it was.

    Raises:
      ProtocolError: it cannot.
    """
    for name, array in _named(state, "numpy arrays").items():
        if not isinstance(array, np.ndarray) or array.dtype.kind not in "biufcSU":
            raise ProtocolError(f"{name!r} as {_described(array)}, expected a numpy array of numbers or text")
    return state


def _named(found: Any, what: str) -> dict[str, Any]:
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise ProtocolError(f"{_described(found)}, expected a dict of {what} by name")
    return found


def _described(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype} {list(value.shape)}"
    if isinstance(value, dict):
        return f"a dict with the key {next(name for name in value if not isinstance(name, str))!r}"
    return " ".join(f"{type(value).__name__} {value!r}".split())[:80]


def chains(drafts: Drafts, usable: np.ndarray) -> tuple[Drafts, np.ndarray]:
    """Of every tree only the path of first children, as `rejection` verifies it.

    Args:
      drafts: trees.
      usable: from `usable_nodes`.

    Returns:
      Drafts whose node i continues node i - 1, and which of their nodes are usable.
    """
    rows, width = drafts.tokens.shape
    last = np.full(rows, -1)  # the node that the chain has reached
    length = np.zeros(rows, np.int32)
    tokens = np.zeros_like(drafts.tokens)
    scores = np.full_like(drafts.log_probability, -np.inf)
    for node in range(width):
        own = np.flatnonzero(usable[:, node] & (drafts.parents[:, node] == last))
        tokens[own, length[own]] = drafts.tokens[own, node]
        scores[own, length[own]] = drafts.log_probability[own, node]
        last[own] = node
        length[own] += 1
    order = np.arange(width, dtype=drafts.parents.dtype)
    parents = np.broadcast_to(order - 1, (rows, width)).copy()
    return Drafts(tokens, parents, scores, length), order < length[:, None]
