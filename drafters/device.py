"""Drafting on the accelerator, as objects that a drafter hands out.

`SlotDrafter` drafts with a state of its own for each of the engine's slots, so it hears of everything that
happens to them. `PolicyWeights` are other weights of the policy, with which the engine drafts.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from rljax.engine.draft_tree import DraftStrategy, ScoredTree
    from rljax.engine.host_sync import Assignment, DecodeResult
    from rljax.engine.shapes import Shapes
    from rljax.engine.state import DecodeState, Prefix


class SlotDrafter(Protocol):
    """Drafts for the slots of one engine.

    Attributes:
      strategies: the shapes of draft tree that it can draft; each compiles a program.
      ahead: drafts while the engine verifies, on devices of its own; None where drafting waits for the pass.
    """

    strategies: "tuple[DraftStrategy, ...]"
    ahead: "AheadDrafting | None" = None

    def start(self, batch: int, lengths: np.ndarray | None = None) -> None:
        """Begins with a decode state of `batch` slots, which are empty, or, to time drafting, hold as many
        tokens as `lengths` says, int32 [batch]: whatever drafting needs to know of these is made up.
        """

    def prefill(self, prefix: "Prefix", prompts: Sequence[Sequence[int]]) -> Any:
        """Returns the drafter's part of prompts that the engine prefilled, row by row, for `insert`."""

    def insert(self, prefilled: Any, assignments: "Sequence[Assignment]", requests: Sequence[int]) -> None:
        """Inserts prompts into slots, for these requests of the newest `Drafter.begin`. Without a `start`
        since that `begin`, as when requests join others, the other slots go on unchanged.
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

    def compile(
        self, shapes: "Shapes", batch: int, lengths: Sequence[int], should_stop: Callable[[], bool]
    ) -> None:
        """Compiles every program that follows decode states of `batch` slots, compaction from larger ones
        included, and that drafts for them. It may run in a thread, after `Drafter.refresh`, while another one
        calls everything else.

        Args:
          shapes: the shapes of the run's decode states, and what happens to them.
          batch: slots of the decode states.
          lengths: cache lengths of those that are drafted for.
          should_stop: asked before each program whether to stop.
        """


class AheadDrafting(Protocol):
    """Drafts on devices of its own while the engine verifies.

    Attributes:
      window: most tokens that it drafts at a time.
    """

    window: int

    def configure(
        self, slots: np.ndarray, windows: np.ndarray, ahead: np.ndarray, drafts_ahead: bool
    ) -> None:
        """Sets how far to draft for `slots`, int32 [n], from now on.

        Args:
          windows: int [n], most tokens at a time, up to `window`; 0 for no drafts.
          ahead: bool [n], whether to draft while drafts of the slot are unanswered.
          drafts_ahead: whether `draft_ahead` drafts at all.
        """

    def take_drafts(self, slots: np.ndarray, length: int, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns chains to verify.

        Args:
          slots: int32 [n].
          length: positions of the engine's cache.
          width: most drafts of a slot.

        Returns:
          Tokens, int32 [n, width], -1 behind the last; and log-probabilities, float32 [n, width], of being
          accepted with all before.
        """

    def draft_ahead(self, slots: np.ndarray) -> None:
        """A pass over `slots` is in progress: drafts behind their drafts, and does not wait."""

    def step_seconds(self) -> list[float]:
        """Returns the seconds of a drafted token of every slot, of all new measurements."""


class PolicyWeights(Protocol):
    """Other weights of the policy's own architecture: the engine drafts with them, on the target's KV cache
    (`rljax/engine/self_drafting.py`).

    Attributes:
      pending_seconds: the expected time until the weights are ready, in seconds; 0 where they are.
    """

    pending_seconds: float

    def weights(self) -> Any:
        """Returns the weights as `DecodeEngine.draft` takes them; makes them if they are not ready."""

    def compile(self, params: Any) -> Any:
        """Compiles what makes the weights, in a thread; another one may call everything else meanwhile.

        Args:
          params: the shapes of the policy's weights.

        Returns:
          The shapes of the drafter's weights.
        """
