"""The drafters of a run together: each hears what happens to requests and slots, and its errors name it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from drafters.base import Drafter, Sampled
from drafters.device import DeviceDrafter, SelfDrafter, TrainedDrafter
from drafters.validation import ProtocolError
from rljax.engine.engine import DecodeEngine
from rljax.engine.host_sync import Assignment, DecodeResult
from rljax.engine.state import Prefix
from rljax.errors import DrafterError, UserError
from rljax.speculation.following import Following

_ERROR_LENGTH = 300  # characters of a drafter's exception that its message shows


def ask(name: str, drafter: Drafter, method: str, *arguments: Any) -> Any:
    """Calls a method of a drafter. Whatever it raises becomes a one-line DrafterError that names it."""
    try:
        return getattr(drafter, method)(*arguments)
    except UserError:
        raise
    except ProtocolError as error:
        raise DrafterError(f"speculation.drafter {name}: {method} returned {error}") from error
    except Exception as error:
        said = " ".join(repr(error).split())[:_ERROR_LENGTH]
        raise DrafterError(f"speculation.drafter {name}: {method} raised {said}") from error


def ask_for(name: str, drafter: Drafter, method: str, check: Callable[[Any], Any]) -> Any:
    """Like `ask`, and returns check(answer); a ProtocolError of the check becomes a DrafterError, too."""
    answer = ask(name, drafter, method)
    try:
        return check(answer)
    except ProtocolError as error:
        raise DrafterError(f"speculation.drafter {name}: {method} returned {error}") from error


def is_on_host(drafter: Drafter) -> bool:
    """Whether a drafter proposes on the host."""
    return not isinstance(drafter, SelfDrafter | DeviceDrafter)


class DrafterGroup:
    """The drafters, and what they are told.

    Args:
      drafters: by name.
      engine: the decode engine that they draft for.

    Attributes:
      by_name: the drafters.
      following: those that follow the slots on the device, by name.
      on_device: the same.
      trained: those that are trained, by name.
    """

    def __init__(self, drafters: Mapping[str, Drafter], engine: DecodeEngine) -> None:
        self.by_name = dict(drafters)
        self.following = {
            name: Following(drafter)
            for name, drafter in drafters.items()
            if isinstance(drafter, DeviceDrafter)
        }
        self.on_device = list(self.following.values())
        self.trained = {
            name: drafter for name, drafter in drafters.items() if isinstance(drafter, TrainedDrafter)
        }
        for drafter in drafters.values():
            if not is_on_host(drafter):
                drafter.attach(engine)

    def ask_all(self, method: str, *arguments: Any) -> None:
        """Calls a method of every drafter."""
        for name, drafter in self.by_name.items():
            ask(name, drafter, method, *arguments)

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
            ask(name, drafter, "observe", Sampled(requests, tokens, counts, drafted, accepted, ended))

    # -- slots, for drafters that follow them on the device --------------------------------------------------

    def restart(self, batch: int) -> None:
        """The decode state is a new one, of `batch` empty slots."""
        for drafter in self.on_device:
            drafter.start(batch)

    def prefill(self, prefix: Prefix, prompts: Sequence[Sequence[int]]) -> list[Any]:
        """Prefills drafters with prompts that the engine prefills. Returns the data that `insert` takes."""
        return [drafter.prefill(prefix, prompts) for drafter in self.on_device]

    def insert(
        self, prefilled: list[Any], assignments: Sequence[Assignment], requests: Sequence[int]
    ) -> None:
        """Prefilled prompts were inserted into slots."""
        for drafter, part in zip(self.on_device, prefilled, strict=True):
            drafter.insert(part, assignments, requests)

    def compact(self, slots: Sequence[int], batch: int) -> None:
        """Only `slots` go on."""
        for drafter in self.on_device:
            drafter.compact(slots, batch)

    def widen(self, batch: int) -> None:
        """All slots go on, in a state of `batch`, which may be as before."""
        for drafter in self.on_device:
            drafter.widen(batch)

    def go_on(self, slots: np.ndarray) -> None:
        """A pass over `slots` is under way, beside which drafters with devices of their own may draft."""
        for drafter in self.on_device:
            drafter.go_on(slots)

    def advance(self, result: DecodeResult) -> None:
        """Slots have sampled tokens."""
        for drafter in self.on_device:
            drafter.advance(result)
