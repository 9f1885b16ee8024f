"""Drafters on the accelerator, and drafters that are trained: the third tier of the drafter protocol.

`SelfDrafter` is other weights of the policy, with which the engine drafts. `DeviceDrafter` drafts by itself
and keeps a state for each of the engine's slots, so it hears of everything that happens to them.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from drafters.base import Drafter

if TYPE_CHECKING:
    from drafters.eagle.drafting import DraftStrategy, ScoredTree
    from rljax.engine.engine import DecodeEngine
    from rljax.engine.host_sync import Assignment, DecodeResult
    from rljax.engine.state import DecodeState, Prefix
    from rljax.models.config import ModelConfig
    from rljax.models.tokenizer import Tokenizer


@runtime_checkable
class SelfDrafter(Drafter, Protocol):
    """A drafter that is other weights of the policy's own architecture: the engine drafts with them, on the
    target's KV cache (`rljax/engine/self_drafting.py`).

    Attributes:
      pending_seconds: the expected time until the weights are ready, in seconds; 0 where they are.
    """

    pending_seconds: float

    def attach(self, engine: "DecodeEngine") -> None:
        """Sets the engine that will draft with the weights, and frees weights made for another engine."""

    def draft_params(self) -> Any:
        """Returns the weights as `DecodeEngine.draft` takes them; makes them if they are not ready."""

    def refresh(self, params: Any) -> None:
        """Receives the policy's weights for the rollouts to come, in the engine's form."""

    def compile(self, params: Any) -> Any:
        """Compiles what makes the weights, in a thread; another one may call everything else meanwhile.

        Args:
          params: the shapes of the policy's weights.

        Returns:
          The shapes of the drafter's weights.
        """


@runtime_checkable
class DeviceDrafter(Drafter, Protocol):
    """A drafter with a state on the device for each slot.

    Attributes:
      strategies: the shapes of draft tree that it can draft; each compiles a program.
    """

    strategies: "tuple[DraftStrategy, ...]"

    def reads(self, policy: "ModelConfig", tokenizer: "Tokenizer | None") -> tuple[int, ...] | None:
        """Returns `hidden_layers` of the engine that decodes: the layers whose features the policy must hand
        out, or None. Raises a UserError where it cannot draft for such a policy.
        """

    def attach(self, engine: "DecodeEngine") -> None:
        """Sets the engine that it will draft for; called after `reads`."""

    def refresh(self, params: Any) -> None:
        """Receives the policy's weights for the rollout that begins, in the engine's form."""

    def warm_up(
        self, prefixes: "Sequence[Prefix]", batches: Sequence[int], prompt_length: int, widens: bool = False
    ) -> None:
        """Compiles the programs that follow the slots, for prefixes and decode states of these shapes; with
        `widens` also the programs of `widen`.
        """

    def compile(
        self,
        batch: int,
        largest: int,
        lengths: Sequence[int],
        prefixes: "Sequence[Prefix]",
        padded: Sequence[tuple[int, int]],
        should_stop: Callable[[], bool],
    ) -> Callable[[], None] | None:
        """Compiles every program that follows the slots of decode states of `batch` slots, compaction from
        larger ones included, and that drafts for them. It runs in a thread, after `refresh`; another one may
        call everything else meanwhile.

        Args:
          batch: slots of the decode states.
          largest: the most slots of any decode state.
          lengths: cache lengths of the decode states, ascending.
          prefixes: shapes of the prefixes that enter them.
          padded: number of prompts and padded length of each prefix.
          should_stop: asked before each program whether to stop.

        Returns:
          A function for the thread that decodes to call when it takes over the programs; None for none.
        """

    def compiles_behind(self) -> None:
        """Called before the first `compile`: programs of the drafter's training are compiled there, too, and
        it is not trained before they are taken over.
        """

    def leave(self) -> None:
        """Stops following the slots, until the next `start`."""

    def start(self, batch: int) -> None:
        """Begins with a decode state of `batch` empty slots."""

    def prefill(self, prefix: "Prefix", prompts: Sequence[Sequence[int]]) -> Any:
        """Returns the drafter's part of prompts that the engine prefilled, row by row, for `insert`."""

    def insert(self, prefilled: Any, assignments: "Sequence[Assignment]", requests: Sequence[int]) -> None:
        """Inserts prompts into slots, for these requests of the newest `begin`. Without a `start` since that
        `begin`, as when requests join others, the other slots go on unchanged.
        """

    def advance(self, result: "DecodeResult") -> None:
        """Appends the tokens that slots have sampled."""

    def append(
        self, slots: Sequence[int], sizes: Sequence[int], tokens: np.ndarray, counts: np.ndarray
    ) -> None:
        """Appends tokens that were not sampled (a tool's answer).

        Args:
          slots: the slots that continue, n of them.
          sizes: tokens of prompt and response that each slot keeps; tokens of `advance` beyond them are
            dropped.
          tokens: int32 [n, T]; the first counts[i] of row i are appended behind the kept ones.
          counts: int32 [n].
        """

    def compact(self, slots: Sequence[int], batch: int) -> None:
        """Keeps only `slots`, in that order, in a decode state of `batch` slots."""

    def widen(self, batch: int) -> None:
        """Keeps all slots and adds empty ones behind them, up to `batch`, which may be the present size."""

    def draft(self, state: "DecodeState", strategy: "DraftStrategy") -> "ScoredTree":
        """Returns draft trees below the slots' last tokens, on the device; empty ones for unknown slots."""


@runtime_checkable
class KnowingDrafter(DeviceDrafter, Protocol):
    """A drafter that drafts for a slot only where it was told all of its tokens."""

    def pretend(self, state: "DecodeState") -> None:
        """After `start`: behaves as if it had been told the tokens of every slot of `state`, so that its
        drafts can be timed.
        """


@runtime_checkable
class AheadDrafter(KnowingDrafter, Protocol):
    """A drafter on devices of its own, which drafts while the engine verifies.

    Attributes:
      window: most tokens that it drafts at a time.
    """

    window: int

    def use(self, slots: np.ndarray, windows: np.ndarray, ahead: np.ndarray, goes_on: bool) -> None:
        """Sets how far to draft for `slots`, int32 [n], from now on.

        Args:
          windows: int [n], most tokens at a time, up to `window`; 0 for no drafts.
          ahead: bool [n], whether to draft while drafts of the slot are unanswered.
          goes_on: whether `go_on` drafts at all.
        """

    def ready(self, slots: np.ndarray, length: int, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns chains to verify.

        Args:
          slots: int32 [n].
          length: positions of the engine's cache.
          width: most drafts of a slot.

        Returns:
          Tokens, int32 [n, width], -1 behind the last; and log-probabilities, float32 [n, width], of being
          accepted with all before.
        """

    def go_on(self, slots: np.ndarray) -> None:
        """A pass over `slots` is under way: drafts behind their drafts, and does not wait."""

    def measured(self) -> list[float]:
        """Returns the seconds of a drafted token of every slot, of all new measurements."""


@runtime_checkable
class TrainedDrafter(Drafter, Protocol):
    """A drafter that is trained in small slices between passes.

    Attributes:
      train_below: it is trained inside a rollout once at most this many responses are running.
      trained: False for a new one, whose drafts are guesses.
    """

    train_below: int
    trained: bool

    def train(self) -> bool:
        """Runs one slice; returns False when nothing is left to do or the time budget is spent."""

    def freeze(self) -> None:
        """Called before the first rollout and before `load_state`: the drafter will neither be trained nor
        saved, and does not keep what only training needs.
        """


@runtime_checkable
class SharedDrafter(TrainedDrafter, Protocol):
    """A trained drafter whose weights frozen ones in other processes draft with: rollout workers decode, and
    the process that trains the policy trains it, too.
    """

    def read(
        self, params: Any, responses: Sequence[tuple[Sequence[int], np.ndarray]], seconds: float
    ) -> None:
        """Takes responses that other processes have decoded to train on, as `insert`, `advance` and `observe`
        would; `learn` follows.

        Args:
          params: the policy's weights that sampled them, in the engine's form.
          responses: prompt and response ids of each.
          seconds: time that decoding them took.
        """

    def weights(self) -> dict[str, np.ndarray]:
        """Returns the arrays of `state` that a frozen drafter needs, which takes them by `load_state`; none
        as long as nothing was trained or loaded.
        """


@dataclasses.dataclass(frozen=True)
class TrainingLimits:
    """How much a drafter is trained.

    Attributes:
      updates: most updates in a rollout; 0 never trains it.
      tokens: of the samples of a rollout, at most.
      batch_tokens: of the samples that are prepared at a time.
      every: it is trained in every so-manieth step alone.
    """

    updates: int
    tokens: int
    batch_tokens: int
    every: int = 1


@runtime_checkable
class SpotDrafter(SharedDrafter, Protocol):
    """A shared drafter that workers train while they have nothing to decode (`cluster.spot`).

    Attributes:
      limits: how much it is trained.
    """

    limits: TrainingLimits

    def delegate(self) -> None:
        """Called in the process that trains the policy: others train the drafter from now on."""

    def saved(self) -> dict[str, np.ndarray]:
        """Returns the arrays that a session goes on from; none as long as nothing was trained or loaded."""

    def adopt(self, saved: Mapping[str, np.ndarray], metrics: Mapping[str, float]) -> None:
        """Takes what a session has come to: arrays as of `saved`, and metrics of its last update."""

    def warm_up_session(self, params: Any) -> None:
        """Compiles what `prepare` and sessions need, on a worker.

        Args:
          params: weights of the policy's shapes, in the engine's form.
        """

    def prepare(self, params: Any, samples: "Sequence[tuple[Sequence[int], Sequence[int]]]") -> Any:
        """Returns what training needs of samples (prompt and response ids of each); it can be pickled."""

    def session(self, params: Any, saved: Mapping[str, np.ndarray] | None) -> "TrainingSession":
        """Begins to train: from what another session has saved, or with None from what it drafts with."""


class TrainingSession(Protocol):
    """A drafter that is trained, beside the one that drafts."""

    def add(self, prepared: Any) -> None:
        """Takes what `SpotDrafter.prepare` returned, here or on another worker."""

    def update(self) -> dict[str, float] | None:
        """Updates once, and returns the update's metrics; None without data."""

    def copy(self) -> dict[str, Any]:
        """Returns the arrays of `SpotDrafter.saved` as they are now, on their way to the host."""
