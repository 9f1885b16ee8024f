"""The drafters of a run beside the slots of the decode state: each hears what happens to requests and slots.

A drafter on the device (`SlotDrafter`) hears of a decode state only where its programs are compiled. It is
active from the start of a decode state on, or not at all, since a drafter that missed tokens of a slot could
not draft for it. It stops where the state is compacted or widened into a batch that it is not compiled for,
and is active again in the next state. Without it tokens are the same, and come later.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from drafters.base import Drafter, Sampled
from drafters.device import SlotDrafter
from rljax.engine.engine import DecodeEngine
from rljax.engine.host_sync import Assignment, DecodeResult
from rljax.engine.state import Prefix
from rljax.speculation.drafter_calls import drafter_call


class DrafterSlots:
    """The drafters, and what they are told.

    Args:
      drafters: by name.
      engine: the decode engine that they draft for.

    Attributes:
      on_device: what drafts for the slots on the device, by the drafter's name.
      active: names of those that follow the present decode state.
      is_compiled: whether the programs of a drafter for a batch are compiled, by its name; they are, unless
        it is there.
    """

    def __init__(self, drafters: Mapping[str, Drafter], engine: DecodeEngine) -> None:
        self.by_name = dict(drafters)
        attached = {name: drafter.attach(engine) for name, drafter in drafters.items()}
        self.on_device = {name: slots for name, slots in attached.items() if slots is not None}
        self.active = set(self.on_device)
        self.is_compiled: dict[str, Callable[[int], bool]] = {}

    def call_all(self, method: str, *arguments: Any) -> None:
        """Calls a method of every drafter."""
        for name, drafter in self.by_name.items():
            with drafter_call(name, method):
                getattr(drafter, method)(*arguments)

    # -- requests --------------------------------------------------------------------------------------------

    def observe(
        self,
        requests: np.ndarray,
        tokens: np.ndarray,
        counts: np.ndarray,
        ended: np.ndarray,
        draft_counts: Mapping[str, tuple[np.ndarray, np.ndarray]],
    ) -> None:
        """Sampled tokens of requests; arguments as of `Sampled`.

        Args:
          draft_counts: by drafter, its draft nodes verified and accepted: int32 [n] each. Drafters that are
            not named had none.
        """
        nothing = (np.zeros_like(counts),) * 2
        for name, drafter in self.by_name.items():
            drafted, accepted = draft_counts.get(name, nothing)
            with drafter_call(name, "observe"):
                drafter.observe(Sampled(requests, tokens, counts, drafted, accepted, ended))

    # -- slots; see `SlotDrafter` ----------------------------------------------------------------------------

    def start(self, batch: int) -> None:
        """The decode state is a new one, of `batch` empty slots."""
        self.active = set(self.on_device)
        for slots in self._following(batch):
            slots.start(batch)

    def prefill(self, prefix: Prefix, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
        """Returns the parts of prompts that the active drafters have prefilled, by their names."""
        return {
            name: slots.prefill(prefix, prompts)
            for name, slots in self.on_device.items()
            if name in self.active
        }

    def insert(
        self, prefilled: Mapping[str, Any], assignments: Sequence[Assignment], requests: Sequence[int]
    ) -> None:
        """Prefilled prompts were inserted into slots."""
        for name, part in prefilled.items():
            if name in self.active:
                self.on_device[name].insert(part, assignments, requests)

    def advance(self, result: DecodeResult) -> None:
        """Slots have sampled tokens."""
        for slots in self._following():
            slots.advance(result)

    def append(
        self, slots: Sequence[int], sizes: Sequence[int], tokens: np.ndarray, counts: np.ndarray
    ) -> None:
        """Tokens that were not sampled were appended."""
        for each in self._following():
            each.append(slots, sizes, tokens, counts)

    def compact(self, slots: Sequence[int], batch: int) -> None:
        """Only `slots` go on, in a state of `batch`."""
        for each in self._following(batch):
            each.compact(slots, batch)

    def widen(self, batch: int) -> None:
        """All slots go on, in a state of `batch`, which may be as before."""
        for slots in self._following(batch):
            slots.widen(batch)

    def draft_ahead(self, slots: np.ndarray) -> None:
        """A pass over `slots` is in progress, beside which drafters with devices of their own may draft."""
        for each in self._following():
            if each.ahead is not None:
                each.ahead.draft_ahead(slots)

    def _following(self, batch: int = 0) -> Iterator[SlotDrafter]:
        """Yields what drafts for the slots of the active drafters, but of those only that are compiled for a
        state of `batch` that begins now; the others are not active any more.
        """
        for name in [name for name in self.on_device if name in self.active]:
            if batch and name in self.is_compiled and not self.is_compiled[name](batch):
                self.active.remove(name)
            else:
                yield self.on_device[name]
