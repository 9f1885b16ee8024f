"""Drafters on the device that follow the slots as far as their programs are compiled."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from drafters.device import AheadDrafter, DeviceDrafter
from rljax.engine.host_sync import Assignment, DecodeResult
from rljax.engine.state import Prefix


class Following:
    """A drafter on the device that hears of a decode state only where its programs are compiled.

    It takes part from the start of a decode state on, or not at all, since a drafter that missed tokens of a
    slot could not follow it. It leaves where the state is compacted or widened into a batch that it is not
    compiled for, and takes part again in the next state. Without it tokens are the same, and come later.

    Args:
      drafter: the drafter.

    Attributes:
      drafter: see the arguments.
      is_compiled: whether the programs for a batch are compiled.
      takes_part: whether it follows the present decode state.
    """

    def __init__(self, drafter: DeviceDrafter) -> None:
        self.drafter = drafter
        self.is_compiled: Callable[[int], bool] = lambda _: True
        self.takes_part = True

    def start(self, batch: int) -> None:
        """The decode state is a new one, of `batch` empty slots."""
        if self.takes_part and not self.is_compiled(batch):
            self._leave()
        elif self.is_compiled(batch):
            self.takes_part = True
            self.drafter.start(batch)

    def prefill(self, prefix: Prefix, prompts: Sequence[Sequence[int]]) -> Any:
        """Returns the drafter's part of prompts; None if it does not take part."""
        return self.drafter.prefill(prefix, prompts) if self.takes_part else None

    def insert(self, prefilled: Any, assignments: Sequence[Assignment], requests: Sequence[int]) -> None:
        """Prompts were inserted into slots."""
        if self.takes_part and prefilled is not None:
            self.drafter.insert(prefilled, assignments, requests)

    def advance(self, result: DecodeResult) -> None:
        """Slots have sampled tokens."""
        if self.takes_part:
            self.drafter.advance(result)

    def go_on(self, slots: np.ndarray) -> None:
        """A pass over `slots` is under way."""
        if self.takes_part and isinstance(self.drafter, AheadDrafter):
            self.drafter.go_on(slots)

    def append(
        self, slots: Sequence[int], sizes: Sequence[int], tokens: np.ndarray, counts: np.ndarray
    ) -> None:
        """Tokens that were not sampled were appended; see `DeviceDrafter.append`."""
        if self.takes_part:
            self.drafter.append(slots, sizes, tokens, counts)

    def compact(self, slots: Sequence[int], batch: int) -> None:
        """Only `slots` go on, in a state of `batch`."""
        if not self.takes_part:
            return
        if self.is_compiled(batch):
            self.drafter.compact(slots, batch)
        else:
            self._leave()

    def widen(self, batch: int) -> None:
        """All slots go on, in a state of `batch`, which may be as before."""
        if not self.takes_part:
            return
        if self.is_compiled(batch):
            self.drafter.widen(batch)
        else:
            self._leave()

    def _leave(self) -> None:
        self.takes_part = False
        self.drafter.leave()
